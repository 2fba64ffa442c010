"""Checkpoints: whole or absent, verified, and nothing in them runs."""

from __future__ import annotations

import errno
import itertools
import os
import pickle
import shutil
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from nsa.train import checkpoint
from nsa.train.checkpoint import (
    CheckpointWriter,
    best_checkpoint,
    clean_checkpoints,
    find_checkpoint,
    list_checkpoints,
    load_tensors,
    read_meta,
    save_checkpoint,
)
from tests.train.cases import all_equal, rewrite_hashes, run_meta


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model.weight": torch.randn(3, 5, generator=generator),
        "model.tied": torch.randn(2, generator=generator, dtype=torch.float64),
        "optimizer.weight.step": torch.tensor(7.0),
        "rng.torch": torch.get_rng_state(),
        "rng.numpy": torch.arange(4),
        "empty": torch.zeros(0, 3),
    }


def save(folder: Path, step: int = 1, keep: int = 1, **meta: Any) -> Path:
    path = save_checkpoint(folder, step, tensors(), run_meta(**meta))
    assert clean_checkpoints(folder, keep) == ""
    return path


def steps(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in list_checkpoints(folder)]


def test_comes_back_bit_for_bit_in_place_and_in_part(tmp_path):
    data = {"loss": 0.1 + 0.2, "none": None, "nested": [1, 2]}
    path = save(tmp_path / "checkpoints", 3, data=data)
    assert path.name == "step-00000003"
    assert len({file.stat().st_mode for file in path.iterdir()}) == 1  # all can be read, or none
    assert read_meta(path)["data"] == data
    for names in (tensors(), ("model.weight", "model.tied")):
        loaded = {name: torch.zeros_like(tensors()[name]) for name in names}
        load_tensors(path, loaded)
        assert all_equal([tensors()[name] for name in names], loaded.values())


def test_newest_are_kept_in_order(tmp_path):
    (tmp_path / ".unfinished-step-00000009").mkdir(parents=True)  # of a process that was killed
    (tmp_path / ".unfinished-step-00000009" / "tensors.safetensors").write_bytes(b"half")
    assert steps(tmp_path) == []
    for step in (1, 5, 30, 200):
        save(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000030", "step-00000200"]
    assert steps(tmp_path) == [30, 200]
    with pytest.raises(OSError, match="step-00000200 exists already"):
        save(tmp_path, 200)
    assert find_checkpoint(tmp_path, "30").name == "step-00000030"
    with pytest.raises(ValueError, match="be last, best or one of 30, 200, got 31"):
        find_checkpoint(tmp_path, "31")
    with pytest.raises(ValueError, match="be the folder of a checkpoint"):
        read_meta(tmp_path / "step-00000001")


class _Death(BaseException):
    """In place of the end of the process; nothing in the code under test may catch it."""


def test_killed_while_writing_leaves_the_old_or_the_new(tmp_path, monkeypatch):
    """Writing ends at each call that flushes or renames; the checkpoint to keep is whole."""
    newest = list[int]()

    def dying(real):
        def call(*args):
            if next(calls) == len(newest):
                raise _Death
            return real(*args)

        return call

    survived = False
    while not survived:
        folder, calls = tmp_path / str(len(newest)), itertools.count()
        save_checkpoint(folder, 2, {"a": torch.full((9,), 2.0)}, run_meta())
        with monkeypatch.context() as patch, suppress(_Death):
            patch.setattr(os, "fsync", dying(os.fsync))
            patch.setattr(Path, "rename", dying(Path.rename))
            save_checkpoint(folder, 3, {"a": torch.full((9,), 3.0)}, run_meta())
            clean_checkpoints(folder, 1)
            survived = True
        newest.append(steps(folder)[-1])
        loaded = {"a": torch.zeros(9)}
        load_tensors(list_checkpoints(folder)[-1], loaded)
        assert torch.equal(loaded["a"], torch.full((9,), float(newest[-1])))
    assert len(newest) >= 6
    assert newest == sorted(newest)
    assert set(newest) == {2, 3}


@pytest.mark.parametrize("name", ["tensors.safetensors", "meta.json", "SHA256SUMS"])
@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_damage_is_noticed(tmp_path, damage, name):
    path = save(tmp_path)
    file = path / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.unlink()
    if damage == "flip":
        file.write_bytes(content)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    message = rf"must contain an undamaged checkpoint, got .*{name} missing or .*Remove this folder"
    with pytest.raises(ValueError, match=message):
        load_tensors(path, loaded)
    assert not any(tensor.any() for tensor in loaded.values())


def test_hashes_are_those_of_the_usual_program(tmp_path):
    command = ["sha256sum", "-c", "SHA256SUMS"]
    done = subprocess.run(command, cwd=save(tmp_path), capture_output=True, text=True, check=True)
    assert done.stdout == "tensors.safetensors: OK\nmeta.json: OK\n"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.weight", torch.zeros(3, 6), r"contain model\.weight as \(3, 6\) torch\.float32"),
        ("model.other", torch.zeros(1), r"contain model\.other as \(1,\) torch\.float32, got None"),
        ("model.weight", torch.zeros(3, 5), r"no model\.tied, got one\. It is .*step-00000001"),
    ],
)
def test_another_model_is_refused(tmp_path, name, tensor, message):
    with pytest.raises(ValueError, match=message):
        load_tensors(save(tmp_path), {name: tensor})
    assert not tensor.any()


def test_code_in_a_file_does_not_run(tmp_path):
    path = save(tmp_path)
    (path / "tensors.safetensors").write_bytes(pickle.dumps(os.system, protocol=2))
    rewrite_hashes(path)
    with pytest.raises(SafetensorError):  # it is not taken for a pickle
        load_tensors(path, {"a": torch.zeros(4)})


def test_the_best_stays_beside_the_newest(tmp_path):
    losses, kept = [3.0, None, 2.0, 2.5, 2.6, None, 1.5, 1.7], []
    for step, loss in enumerate(losses, start=1):
        save(tmp_path, step, keep=2, val_bits_per_byte=loss)
        kept.append("".join(map(str, steps(tmp_path))))
    assert kept == ["1", "12", "23", "34", "345", "356", "67", "78"]
    assert best_checkpoint(tmp_path) == tmp_path / "step-00000007"
    (tmp_path / "step-00000007" / "meta.json").write_text("{")  # a damaged one is not the best
    assert best_checkpoint(tmp_path) == tmp_path / "step-00000008"
    with pytest.raises(ValueError, match=r"meta\.json"):  # but may be what a user asks for
        find_checkpoint(tmp_path, "best")
    save(tmp_path, 9, val_bits_per_byte=4.0)
    assert steps(tmp_path) == [8, 9]


# --- the thread that writes -----------------------------------------------------------------------


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """The file has the tensors of the moment; one is written at a time."""
    may_write, threads = threading.Event(), []

    def slow(*args):
        threads.append(threading.current_thread().name)
        assert may_write.wait(20)
        save_file(*args)

    monkeypatch.setattr(checkpoint, "save_file", slow)
    writer, live = CheckpointWriter(tmp_path, keep=3), {"a": torch.ones(1000)}
    writer.submit(1, live, run_meta())
    live["a"].zero_()  # the next optimizer step
    assert (steps(tmp_path), writer.newest_step) == ([], 1)
    second = threading.Thread(target=writer.submit, args=(2, live, run_meta()))
    second.start()
    second.join(0.3)
    assert (second.is_alive(), len(threads)) == (True, 1)
    may_write.set()
    second.join(20)
    writer.close()
    for path, value in zip(list_checkpoints(tmp_path), (1.0, 0.0), strict=True):
        load_tensors(path, live)
        assert torch.equal(live["a"], torch.full((1000,), value))
    assert all(name.startswith("checkpoint") for name in threads)


def test_a_write_that_fails_is_a_warning_and_a_bug_is_not(tmp_path, monkeypatch, caplog):
    writer, live = CheckpointWriter(tmp_path, keep=3), {"a": torch.ones(9)}
    writer.submit(1, live, run_meta())
    writer.wait()
    full, bug = OSError(errno.ENOSPC, "No space left on device"), ZeroDivisionError("a bug")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", Mock(side_effect=[full, bug]))
        writer.submit(2, live, run_meta())
        writer.wait()
        assert "checkpoint of step 2 could not be written" in caplog.text
        assert "the newest is step-00000001" in caplog.text
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
        assert (writer.newest_step, bool(writer.failure)) == (1, True)
        writer.submit(3, live, run_meta())
        with pytest.raises(ZeroDivisionError, match="a bug"):
            writer.wait()
    writer.submit(4, live, run_meta())
    writer.close()
    assert (writer.newest_step, writer.failure) == (4, None)


def test_what_cannot_be_removed_stops_no_checkpoint_and_is_one_warning(
    tmp_path, monkeypatch, caplog
):
    """Files of another owner: two that were left unfinished, and an old checkpoint."""
    others = (".unfinished-x", ".unfinished-step-00000001", "step-00000002")
    for name in others[:2]:
        (tmp_path / name).mkdir(parents=True)

    def owned(real):
        def call(path, *args):
            if Path(path).name in others and threading.current_thread().name != "MainThread":
                raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
            return real(path, *args)

        return call

    monkeypatch.setattr(shutil, "rmtree", owned(shutil.rmtree))
    monkeypatch.setattr(Path, "rename", owned(Path.rename))
    writer, live = CheckpointWriter(tmp_path, keep=1), {"a": torch.ones(9)}
    for step in range(1, 6):
        writer.submit(step, live, run_meta())
        writer.wait()
        assert (writer.newest_step, writer.failure) == (step, None)
    writer.close()
    assert steps(tmp_path) == [2, 5]
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith("checkpoints are written, but old ones stay: [Errno 1]")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_tensor_that_is_not_finite_is_no_checkpoint(tmp_path, value):
    tensors = {"a": torch.ones(3), "b": torch.tensor([1.0, value])}
    with pytest.raises(OSError, match="b is not finite"):
        save_checkpoint(tmp_path, 1, tensors, run_meta())
    assert steps(tmp_path) == []
