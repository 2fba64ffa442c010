"""The case of the module in a foreign model, which runs in a process of its own."""

from __future__ import annotations

import json

from tools.accept.case import Case, Finding
from tools.accept.figures import Figures
from tools.accept.programs import last_lines
from tools.accept.setting import PYTHON, Setting


def foreign_model(case: Case, setting: Setting) -> Finding:
    """Train :mod:`tools.accept.foreign_model`'s decoder, eager and compiled."""
    log = setting.empty_folder(case.name) / "log.txt"
    small = [] if setting.machine.num_gpus else ["--small"]
    words = [PYTHON, "-m", "tools.accept.foreign_model", *small]
    ended = setting.run(words, log, case.limit_s)
    lines = [line for line in last_lines(log, 50) if line.startswith("{")]
    if ended.code not in (0, 1) or not lines:
        return Finding(log, faults=(ended.fault or "it printed no result",))
    found = json.loads(lines[-1])
    figures = Figures(
        steps=found["steps"],
        compilations_after_5=found["compilations_after_warmup"],
        loss_first=found["loss_first"],
        loss_last=found["loss_last"],
    )
    errors = [found[f"{name}_error_nats"] for name in ("eager", "compiled")]
    remarks = (
        f"{found['steps']} steps, {found['graphs']} graphs, {found['graph_breaks']} graph breaks",
        f"distance from fp32: eager {errors[0]:.5f} nats, compiled {errors[1]:.5f}",
    )
    return Finding(log, figures, None, remarks, tuple(found["faults"]))
