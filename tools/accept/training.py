"""Cases that train: ``make train``, and configurations as they ship."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Sequence

from nsa.train.config import TrainConfig
from nsa.train.load import load_config
from nsa.train.telemetry.metrics import read_metrics
from nsa.train.telemetry.throughput import MIB
from tools.accept.case import NSA, PYTHON, Result, Setting, caches, changes, train_words
from tools.accept.figures import figures_of, training_faults
from tools.accept.programs import last_lines
from tools.accept.shards import make_shards

# A model that needs two GPUs does fewer steps on two, so that a leg holds them.
QUICK_STEPS, FULL_STEPS, STEPS_ON_TWO = 60, 300, 100
QUICK_LOG_EVERY = 5
COMPILATION = '"kind": "compilation"'  # in the events: a step that compiles after the start


def train(setting: Setting) -> Result:
    """Train a configuration as it ships, for a number of steps."""
    config = load_config(setting.case.config)
    processes, accumulation = spread(config, setting.machine.num_gpus)
    steps, log_every = STEPS_ON_TWO if processes == 2 else FULL_STEPS, config.log_every
    if setting.is_quick:
        steps, log_every = QUICK_STEPS, min(log_every or QUICK_LOG_EVERY, QUICK_LOG_EVERY)
    added = changes(config, steps=steps, log_every=log_every)
    added += changes(config, world_size=processes, accumulation=accumulation)
    run = str(setting.trained)
    words = [*train_words(processes), setting.case.config, "--run-dir", run, *added]
    if config.data.source == "shards":
        shards = setting.shards or make_shards(setting.out, setting.seconds_left)
        words += ["--data.path", str(shards)]
        added.append("--data.path SHARDS")
    fault = setting.run(words)
    on_gpu = setting.machine.num_gpus > 0 and config.device != "cpu"
    return _result(setting, fault, steps=steps, on_gpu=on_gpu, added=added)


def make_train(setting: Setting) -> Result:
    """``make train`` from start to finish, with compile caches that are empty."""
    arguments = shlex.join(["--run-dir", str(setting.trained)])
    words = ["make", "train", f"PYTHON={PYTHON}", f"ARGS={arguments}", "CONFIG="]
    cold = setting.folder / "cold"
    fault = setting.run(words, env=caches(cold))
    shutil.rmtree(cold, ignore_errors=True)
    steps = load_config(setting.case.config).steps
    return _result(setting, fault, steps=steps, on_gpu=setting.machine.num_gpus > 0)


def _result(
    setting: Setting,
    fault: str,
    *,
    steps: int,
    on_gpu: bool,
    added: Sequence[str] = (),
) -> Result:
    metrics, events = setting.trained / "metrics.jsonl", setting.trained / "events.jsonl"
    rows = read_metrics(metrics) if metrics.exists() else []
    warnings = events.read_text(encoding="utf-8").count(COMPILATION) if events.exists() else 0
    figures = figures_of(rows, warnings)
    faults = [fault] if fault else []
    faults += training_faults(rows, figures, steps=steps, on_gpu=on_gpu)
    remarks = [f"added: {' '.join(added)}" if added else "as it ships"]
    remarks += [f"first step after {r['first_step_s']:.1f} s" for r in rows if "first_step_s" in r]
    return Result(figures, remarks, faults)


def spread(config: TrainConfig, num_gpus: int) -> tuple[int, int]:
    """Processes and accumulation of a run of several processes on all GPUs that it can use."""
    processes, accumulation = config.world_size, config.accumulation
    while processes > 1 and accumulation % 2 == 0 and 2 * processes <= num_gpus:
        processes, accumulation = 2 * processes, accumulation // 2
    return processes, accumulation


def planned_mib(setting: Setting) -> float | None:
    """Peak memory as ``nsa plan`` says it, MiB; None where it says nothing."""
    config = load_config(setting.case.config)
    processes, accumulation = spread(config, setting.machine.num_gpus)
    words = changes(config, world_size=processes, accumulation=accumulation)
    log = setting.folder / "plan.txt"
    setting.run([*NSA, "plan", setting.case.config, "--json", *words], log)
    found = [json.loads(line) for line in last_lines(log, 20) if line.startswith("{")]
    return float(found[-1]["memory_bytes"]["peak"]) / MIB if found else None
