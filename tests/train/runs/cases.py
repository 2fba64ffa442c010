"""Runs that were stopped and resumed."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

from nsa.train.config import TrainConfig
from nsa.train.run_folder import RunFolder
from nsa.train.telemetry.metrics import Row
from tests.train.cases import make_trainer


def stop_after_step_6(row: Row) -> None:
    """Callback ``on_row`` of a trainer."""
    if row["step"] == 6:
        os.kill(os.getpid(), signal.SIGTERM)


def resumed_run(path: Path, config: TrainConfig, times: int = 1) -> RunFolder:
    """A run that stopped after step 6 and was resumed from there, ``times`` over."""
    make_trainer(config, path, on_row=stop_after_step_6).run()
    kept = shutil.copytree(path / "checkpoints", path.with_name(f"{path.name}-checkpoints"))
    for _ in range(times):
        shutil.rmtree(path / "checkpoints")
        shutil.copytree(kept, path / "checkpoints")
        trainer = make_trainer(config, path, resume=True)
        trainer.run_folder.record_launch(resumed_from_step=6)
        trainer.run()
    shutil.rmtree(kept)
    return trainer.run_folder
