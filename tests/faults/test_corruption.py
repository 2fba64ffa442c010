"""Checkpoints that were changed on the disk: every one is refused, by the name of the file, and
nothing of it is loaded.
"""

from __future__ import annotations

import itertools
import random
import shutil
from pathlib import Path

import pytest
import torch

from nsa.errors import UserError
from nsa.train.checkpoint import list_checkpoints
from tests.faults.cases import DAMAGES, damage
from tests.train.cases import make_trainer, tiny_config

FILES = ("tensors.safetensors", "meta.json", "SHA256SUMS")


@pytest.mark.parametrize("number", [1, pytest.param(10, marks=pytest.mark.faults)])
def test_corrupted_checkpoints_are_refused(tmp_path: Path, count, number: int) -> None:
    config = tiny_config(tmp_path, steps=4, checkpoint_every=2, log_every=1, eval_every=0)
    make_trainer(config, tmp_path / "run").run()
    older, newest = list_checkpoints(tmp_path / "run" / "checkpoints")
    resumed = make_trainer(config, tmp_path / "run", resume=True)
    tensors = resumed.state.training_tensors()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    rng, cases = random.Random(number), list(itertools.product(FILES, DAMAGES, range(number)))
    for name, how, _ in cases:
        path = tmp_path / "damaged" / newest.name
        shutil.copytree(newest, path)
        damage(path / name, older / name, how, rng)
        with pytest.raises(UserError, match="hold an undamaged checkpoint") as caught:
            resumed.state.load(path)
        # Another file's sums make the two files that they name look changed.
        named = [path / other for other in (FILES if name == "SHA256SUMS" else (name,))]
        assert any(str(file) in str(caught.value) for file in named), (name, how, caught.value)
        assert all(torch.equal(before[key], tensor) for key, tensor in tensors.items())
        shutil.rmtree(path)
    count("corrupted checkpoints, refused by name, nothing loaded", len(cases), len(cases))
