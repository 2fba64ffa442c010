"""``nsa track``: send the rows of a run to a tracker, in a process of its own."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import json
import time
from collections.abc import Iterator

from nsa.errors import check
from nsa.files import replace_text
from nsa.train.run_folder import RunFolder
from nsa.train.telemetry.metrics import numbers, read_metrics

SERVICES = ("trackio", "wandb")
_POLL_S = 5.0
_IDLE_LOOKS = 3  # the processes of a run may be restarted in between


def track(
    folder: RunFolder,
    service: str,
    *,
    project: str = "nsa",
    follow: bool = False,
) -> Iterator[str]:
    """Send the rows of a run that a tracker does not have yet.

    They are read from ``metrics.jsonl``, so a tracker that fails or a network that hangs cannot
    affect the run, and the rows of a run on a machine without a network can be sent from a copy of
    its folder. ``tracking.json`` in the run folder stores the last step sent to each tracker; rows
    that a resumption writes again are equal and not sent again.

    Args:
        folder: run folder.
        service: ``trackio`` or ``wandb``.
        project: project of the tracker.
        follow: send new rows until the run ends, when no process has worked on it for some
            seconds.

    Yields:
        A line for the user whenever rows were sent.

    Raises:
        UserError: the service is unknown, or its package is not installed.
    """
    check(service in SERVICES, "--to", f"be one of {', '.join(SERVICES)}", service)
    is_there = importlib.util.find_spec(service) is not None
    hint = f"Install it: pip install {service}"
    check(is_there, "--to", "be a package that is installed", service, hint)
    config, name = folder.load_config(), _name(folder)
    more = {"id": name, "dir": str(folder.path)} if service == "wandb" else {}
    tracker = importlib.import_module(service).init(
        project=project,
        name=name,
        config=dataclasses.asdict(config),
        resume="allow",
        **more,
    )
    key, sent = f"{service} {project}", folder.tracking
    state: dict[str, int] = json.loads(sent.read_bytes()) if sent.exists() else {}
    idle = 0
    try:
        while True:
            # before the rows are read, so that none is written after the last read
            idle = 0 if folder.is_in_use() else idle + 1
            rows = read_metrics(folder.metrics_jsonl)
            new = [row for row in rows if int(row["step"]) > state.get(key, 0)]
            for row in new:
                tracker.log(numbers(row, "step"), step=int(row["step"]))
            if new:
                state[key] = int(new[-1]["step"])
                replace_text(sent, json.dumps(state) + "\n")
                rows_sent = f"{len(new)} rows to step {state[key]}"
                yield f"{service}, project {project}, run {name}: {rows_sent}"
            if not follow or idle == _IDLE_LOOKS or (idle and state.get(key, 0) >= config.steps):
                return
            time.sleep(_POLL_S)
    finally:
        tracker.finish()


def _name(folder: RunFolder) -> str:
    """Name of the run at the tracker: equal for a copy of the folder, unique otherwise."""
    first = next(iter(folder.launches()), {})
    digest = hashlib.sha256(json.dumps(first).encode()).hexdigest()
    return f"{folder.path.resolve().name}-{digest[:8]}"
