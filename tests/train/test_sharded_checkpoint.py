"""Checkpoints that several processes write together: resharded on loading, whole or absent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from nsa.train import checkpoint
from nsa.train.checkpoint import CheckpointWriter, list_checkpoints, load_tensors
from nsa.train.distributed.processes import Processes, gather, own_part
from tests.train.cases import run_meta, stored_tensors

FORKS: Any = multiprocessing.get_context("forkserver")


def _rank(action: Callable[..., None], rank: int, number: int, store: str, args: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=number)
    action(Processes(rank, number), *args)
    dist.destroy_process_group()


def together(action: Callable[..., None], number: int, folder: Path, *args: Any) -> list[int]:
    """Run ``action(processes, folder, *args)`` in so many processes; their exit codes."""
    store = tempfile.mktemp(dir=folder)
    shared = (number, f"file://{store}", (folder, *args))
    each = [FORKS.Process(target=_rank, args=(action, rank, *shared)) for rank in range(number)]
    for process in each:
        process.start()
    try:
        for process in each:
            process.join(60)
        return [process.exitcode for process in each]
    finally:
        for process in each:
            process.kill()


def whole_tensors(step: int) -> dict[str, Tensor]:
    """Some rows divide unevenly among 2, 3 and 4 processes, and of two rows some get none."""
    torch.manual_seed(step)
    return {
        "model.matrix": torch.randn(5, 3),
        "model.short": torch.randn(2),
        "model.half": torch.randn(8, 2).bfloat16(),
        "model.plain": torch.randn(4),  # not sharded
        "optimizer.step": torch.tensor(float(step)),
    }


def sharded(tensors: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (number,))
    whole = ("model.plain", "optimizer.step")
    cut = {name: tensor for name, tensor in tensors.items() if name not in whole}
    return tensors | {name: distribute_tensor(cut[name], mesh, [Shard(0)]) for name in cut}


def _save(processes: Processes, folder: Path, first: int, last: int) -> None:
    writer = CheckpointWriter(folder / "checkpoints", 2, processes.for_thread())
    for step in range(first, last + 1):
        writer.submit(step, sharded(whole_tensors(step), processes.world_size), run_meta())
    writer.close()
    assert (writer.newest_step, writer.failure) == (last, None)


def _load(processes: Processes, folder: Path, step: int) -> None:
    wanted = whole_tensors(step)
    empty = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    targets = sharded(empty, processes.world_size) if processes.world_size > 1 else empty
    load_tensors(list_checkpoints(folder / "checkpoints")[-1], targets)
    for name, tensor in wanted.items():
        assert torch.equal(gather(targets[name]), tensor), name


@pytest.mark.parametrize(("written", "read"), [(1, 3), (3, 2)])
def test_any_number_reads_what_any_number_wrote(tmp_path, written, read):
    assert together(_save, written, tmp_path, 1, 3) == [0] * written
    names = [path.name for path in list_checkpoints(tmp_path / "checkpoints")]
    assert names == ["step-00000002", "step-00000003"]
    newest = tmp_path / "checkpoints" / names[-1]
    assert len(list(newest.glob("*.safetensors"))) == written
    for name, tensor in stored_tensors(newest).items():
        assert torch.equal(tensor, whole_tensors(3)[name]), name
    assert together(_load, read, tmp_path, 3) == [0] * read


def _refused(processes: Processes, folder: Path, message: str) -> None:
    before = torch.full((5, 3), 7.0)
    targets = sharded({**whole_tensors(2), "model.matrix": before}, processes.world_size)
    with pytest.raises(ValueError, match=message):
        load_tensors(list_checkpoints(folder / "checkpoints")[-1], targets)
    assert torch.equal(gather(targets["model.matrix"]), before)


@pytest.mark.parametrize("name", ["tensors-00002-of-00002.safetensors", "SHA256SUMS"])
def test_damage_in_any_file_is_refused_by_every_process(tmp_path, name):
    """A bit of the tensors has changed, or the list lacks a file."""
    together(_save, 2, tmp_path, 2, 2)
    file = tmp_path / "checkpoints" / "step-00000002" / name
    content = bytearray(file.read_bytes())
    if name == "SHA256SUMS":
        del content[: content.index(b"\n") + 1]
    else:
        content[-1] ^= 1
    file.write_bytes(content)
    assert together(_refused, 2, tmp_path, f"undamaged checkpoint, got .*{name}") == [0, 0]


def _one_fails(processes: Processes, folder: Path, how: str, message: str) -> None:
    writer = CheckpointWriter(folder / "checkpoints", 2, processes.for_thread())
    tensors = sharded(whole_tensors(4), processes.world_size)
    if processes.rank == 1 and how == "nan":
        own_part(tensors["model.matrix"])[0, 0] = torch.nan
    if processes.rank == 1 and how in ("no-room", "killed"):

        def fail(*args: Any) -> None:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("No space left on device")

        pytest.MonkeyPatch().setattr(checkpoint, "save_file", fail)
    writer.submit(4, tensors, run_meta())
    writer.close()
    assert message in str(writer.failure)
    assert writer.newest_step == 3


@pytest.mark.parametrize(
    ("how", "message"),
    [("nan", "model.matrix is not finite"), ("no-room", "No space left on device"), ("killed", "")],
)
def test_what_one_cannot_write_is_no_checkpoint(tmp_path, how, message):
    together(_save, 2, tmp_path, 2, 3)
    codes = together(_one_fails, 2, tmp_path, how, message)
    assert codes == [0, 0] if how != "killed" else (codes[0] > 0 and codes[1] == -signal.SIGKILL)
    found = [path.name for path in list_checkpoints(tmp_path / "checkpoints")]
    assert found == ["step-00000002", "step-00000003"]
    left = {path.name for path in (tmp_path / "checkpoints").iterdir() if path.name[0] == "."}
    assert left == ({".unfinished-step-00000004"} if how == "killed" else set())
    if left:
        assert together(_save, 2, tmp_path, 4, 4) == [0, 0]  # the next one removes what is left
        assert not list((tmp_path / "checkpoints").glob(".*"))
        assert together(_load, 2, tmp_path, 4) == [0, 0]
