"""Checkpoints: whole or absent, verified, and nothing in them runs."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from nsa.train.checkpoint import list_checkpoints, load_tensors, read_meta, save_checkpoint


def tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.weight": torch.randn(3, 5, generator=generator),
        "model.tied": torch.randn(2, generator=generator, dtype=torch.float64),
        "optimizer.weight.step": torch.tensor(7.0 + seed),
        "rng.torch": torch.get_rng_state(),
        "rng.numpy": torch.arange(4),
        "empty": torch.zeros(0, 3),
    }


def rewrite_hash(checkpoint: Path, name: str) -> None:
    """What someone who changes a file on purpose would do."""
    meta = json.loads((checkpoint / "meta.json").read_text())
    meta["files"][name] = hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
    (checkpoint / "meta.json").write_text(json.dumps(meta))


def test_comes_back_bit_for_bit(tmp_path: Path) -> None:
    saved = tensors()
    values = {"step": 3, "loss": 0.1 + 0.2, "none": None, "nested": {"list": [1, 2]}}
    path = save_checkpoint(tmp_path / "checkpoints", 3, saved, values, keep=2)
    assert path.name == "step-00000003"
    loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    load_tensors(path, loaded)
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    meta = read_meta(path)
    assert {name: meta[name] for name in values} == values


def test_loads_in_place_and_in_part(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, tensors(), {}, keep=1)
    weight = torch.zeros(3, 5, requires_grad=True)
    address = weight.data_ptr()
    load_tensors(path, {"model.weight": weight.detach()})
    assert weight.data_ptr() == address
    assert torch.equal(weight.detach(), tensors()["model.weight"])


def test_newest_are_kept_in_order(tmp_path: Path) -> None:
    for step in (1, 5, 30, 200):
        save_checkpoint(tmp_path, step, tensors(), {}, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000030", "step-00000200"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000030", "step-00000200"]
    with pytest.raises(FileExistsError):
        save_checkpoint(tmp_path, 200, tensors(), {}, keep=2)


class _Death(BaseException):
    """Stands for the end of the process: nothing in the code under test may catch it."""


def test_killed_while_writing_leaves_the_old_or_the_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing ends at each call that flushes or renames; the one checkpoint to keep is the old or the new, and whole."""
    newest: list[int] = []
    for moment in range(1, 99):
        folder = tmp_path / str(moment)
        save_checkpoint(folder, 2, {"a": torch.full((9,), 2.0)}, {}, keep=1)
        calls = iter(range(1, 999))

        def dying(real: Callable[..., Any], calls: Iterator[int] = calls, moment: int = moment) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                if next(calls) == moment:
                    raise _Death
                return real(*args)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", dying(os.fsync))
            patch.setattr(Path, "rename", dying(Path.rename))
            try:
                save_checkpoint(folder, 3, {"a": torch.full((9,), 3.0)}, {}, keep=1)
                survived = True
            except (_Death, CheckpointException):  # PyTorch wraps what ends its own writing
                survived = False
        found = list_checkpoints(folder)
        newest.append(int(found[-1].name[-1]))
        loaded = {"a": torch.zeros(9)}
        load_tensors(found[-1], loaded)
        assert torch.equal(loaded["a"], torch.full((9,), float(newest[-1])))
        if survived:
            break
    assert len(newest) >= 6
    assert newest == sorted(newest)
    assert (newest[0], newest[-1]) == (2, 3)


def test_unfinished_ones_are_never_seen_and_then_removed(tmp_path: Path) -> None:
    (tmp_path / ".unfinished-step-00000009").mkdir(parents=True)
    (tmp_path / ".unfinished-step-00000009" / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "step-x").mkdir()
    assert list_checkpoints(tmp_path) == []
    save_checkpoint(tmp_path, 1, tensors(), {}, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-x"]


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damage_is_noticed(tmp_path: Path, damage: str) -> None:
    path = save_checkpoint(tmp_path, 1, tensors(), {}, keep=1)
    file = next(path.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(bytes(content) if damage == "flip" else bytes(content[:-1]))
    with pytest.raises(ValueError, match=r"path must hold an undamaged checkpoint.*Remove this folder"):
        load_tensors(path, tensors())


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.weight", torch.zeros(3, 6), r"hold model\.weight as \(3, 6\) torch\.float32"),
        ("model.weight", torch.zeros(3, 5, dtype=torch.float64), r"hold model\.weight as \(3, 5\) torch\.float64"),
        ("model.other", torch.zeros(1), r"hold model\.other as \(1,\) torch\.float32, got None"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, name: str, tensor: Tensor, message: str) -> None:
    path = save_checkpoint(tmp_path, 1, tensors(), {}, keep=1)
    with pytest.raises(ValueError, match=message):
        load_tensors(path, {name: tensor})


def test_no_checkpoint_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="be a complete checkpoint"):
        read_meta(tmp_path / "step-00000001")


class _Harmful:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (self.command,)


def test_code_in_the_index_does_not_run(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, tensors(), {}, keep=1)
    (path / ".metadata").write_bytes(pickle.dumps(_Harmful(f"touch {tmp_path}/ran")))
    rewrite_hash(path, ".metadata")
    with pytest.raises(pickle.UnpicklingError, match=r"must not name posix\.system"):
        load_tensors(path, tensors())
    assert not (tmp_path / "ran").exists()


def test_code_in_a_tensor_file_does_not_run(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, {"a": torch.zeros(4)}, {}, keep=1)
    file = next(path.glob("*.distcp"))
    content = pickle.dumps(_Harmful(f"touch {tmp_path}/ran"), protocol=2)
    file.write_bytes(content.ljust(file.stat().st_size, b"\0"))
    rewrite_hash(path, file.name)
    with pytest.raises(CheckpointException, match="Weights only load failed"):
        load_tensors(path, {"a": torch.zeros(4)})
    assert not (tmp_path / "ran").exists()
