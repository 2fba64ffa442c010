"""``torchrun -m tests.gpu.trained_by_transformers FOLDER``: ``Trainer`` on the windows of a run.

The folder holds a model in ``start``, all windows in the order of the run in ``windows.npy`` and
the settings of the run in ``settings.json``; the losses go to ``losses.json``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments

from nsa.hf import NSAForCausalLM
from nsa.train.optim import lr_factor


class Windows(IterableDataset[dict[str, torch.Tensor]]):
    """Rows of ``[N, S + 1]`` in their order; all tokens but the first are predicted."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for row in self.rows:
            labels = row.clone()
            labels[0] = -100
            yield {"input_ids": row, "labels": labels}


def train(folder: Path) -> None:
    """Train with the optimizer, the schedule and the batches of the run."""
    given: dict[str, Any] = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    options: dict[str, Any] = {
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "accelerator_config": {"dispatch_batches": False},
        "use_cpu": given["device"] == "cpu",
        "bf16": given["compute_dtype"] == "bf16",
    }
    arguments = TrainingArguments(
        str(folder / "trainer"),
        max_steps=given["steps"],
        logging_steps=given["log_every"],
        max_grad_norm=given["optim"]["grad_clip"],
        **options,
    )
    arguments.per_device_train_batch_size = given["global_batch"] // arguments.world_size
    model = NSAForCausalLM.from_pretrained(folder / "start").to(arguments.device).train()
    optim, steps = given["optim"], given["steps"]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rates = {"lr": optim["lr"], "betas": tuple(optim["betas"]), "eps": optim["eps"]}
    optimizer = torch.optim.AdamW(trained, weight_decay=optim["weight_decay"], **rates)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor(step, steps, optim["warmup_steps"], optim["min_lr_ratio"])
    )
    windows = Windows(torch.from_numpy(np.load(folder / "windows.npy")))
    both = (optimizer, schedule)
    trainer = Trainer(model, arguments, train_dataset=windows, optimizers=both)
    trainer.train()
    if trainer.is_world_process_zero():
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        (folder / "losses.json").write_text(json.dumps(losses), encoding="utf-8")


if __name__ == "__main__":
    train(Path(sys.argv[1]))
