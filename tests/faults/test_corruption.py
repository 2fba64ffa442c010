"""Checkpoints that were changed on the disk: every one is refused, by the name of the file, and
nothing of it is loaded.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch

from nsa.errors import UserError
from nsa.train.checkpoint import list_checkpoints
from tests.train.cases import make_trainer, tiny_config

FILES = ("tensors.safetensors", "meta.json", "SHA256SUMS")
DAMAGES = ("bit", "bits", "truncated", "empty", "missing", "longer", "swapped", "garbled")


def damage(file: Path, other: Path, how: str, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    if how in ("bit", "bits"):
        for _ in range(1 if how == "bit" else 20):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif how == "truncated":
        del content[rng.randrange(len(content)) :]
    elif how == "empty":
        content.clear()
    elif how == "longer":
        content += rng.randbytes(rng.randint(1, 100))
    elif how == "swapped":  # the file of another checkpoint
        content = bytearray(other.read_bytes())
    elif how == "garbled":  # a page of the disk
        start = rng.randrange(len(content))
        content[start : start + 4096] = bytes(255 - byte for byte in content[start : start + 4096])
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes(content)


@pytest.mark.parametrize("number", [24, pytest.param(200, marks=pytest.mark.faults)])
def test_corrupted_checkpoints_are_refused(tmp_path: Path, count, number: int) -> None:
    config = tiny_config(tmp_path, steps=4, checkpoint_every=2, log_every=1, eval_every=0)
    make_trainer(config, tmp_path / "run").run()
    older, newest = list_checkpoints(tmp_path / "run" / "checkpoints")
    resumed = make_trainer(config, tmp_path / "run", resume=True)
    tensors = resumed.state.training_tensors()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    rng, refused = random.Random(number), 0
    for trial in range(number):
        path = tmp_path / "damaged" / newest.name
        shutil.copytree(newest, path)
        name, how = FILES[trial % len(FILES)], DAMAGES[trial // len(FILES) % len(DAMAGES)]
        intact = (path / name).read_bytes()
        damage(path / name, older / name, how, rng)
        assert not (path / name).exists() or (path / name).read_bytes() != intact
        with pytest.raises(UserError, match="hold an undamaged checkpoint") as caught:
            resumed.state.load(path)
        # Another file's sums make the two files that they name look changed.
        named = FILES if name == "SHA256SUMS" else (name,)
        assert any(str(path / other) in str(caught.value) for other in named), (
            name,
            how,
            caught.value,
        )
        assert all(torch.equal(before[key], tensor) for key, tensor in tensors.items())
        refused += 1
        shutil.rmtree(path)
    count("corrupted checkpoints, refused by name, nothing loaded", number, refused)
