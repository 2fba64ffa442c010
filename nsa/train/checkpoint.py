"""Checkpoints on disk: whole or absent, verified, and loaded without running any code from the file.

A checkpoint is a folder ``step-00001000`` with ``tensors.safetensors`` (every tensor), ``meta.json`` (all that is not a tensor)
and ``SHA256SUMS`` (hashes of the two, as ``sha256sum -c`` reads them). It is written under another name, flushed to the disk
and only then renamed, so that a folder of this name is complete.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nsa.errors import UserError, check, fail
from nsa.train.distributed.sharding import gather, put
from nsa.train.environment import version
from nsa.train.run_folder import flush_folder, write_flushed

logger = logging.getLogger(__name__)

FORMAT = 2
TENSORS, META, SUMS = "tensors.safetensors", "meta.json", "SHA256SUMS"
_SUMS_TEXT = re.compile("".join(rf"([0-9a-f]{{64}})  {re.escape(name)}\n" for name in (TENSORS, META)).encode())
# Of what a run writes into meta.json.
_KINDS: dict[str, Any] = {
    "step": int, "progress": dict, "sampler": dict, "rng": dict, "config": dict, "data": dict,
    "val_bits_per_byte": float | int | None,
}  # fmt: skip
_NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED = ".unfinished-"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "U8": torch.uint8,
}


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies or will lie."""
    return folder / f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in ``folder``, oldest first."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def best_checkpoint(folder: Path) -> Path | None:
    """The checkpoint with the lowest held-out figure of its own step; None where no step with one was evaluated."""
    figures: dict[Path, float] = {}
    for path in list_checkpoints(folder):
        try:
            figure = read_meta(path).get("val_bits_per_byte")
        except UserError:  # damaged: whoever wants to load it is told
            continue
        if figure is not None:
            figures[path] = figure
    return min(figures, key=lambda path: figures[path], default=None)


def find_checkpoint(function: str, folder: Path, which: str) -> Path:
    """The checkpoint that the user means.

    Args:
        function: the command, for messages.
        folder: folder of all checkpoints of a run.
        which: ``last``, ``best`` (the lowest held-out figure), or a number of optimizer steps.

    Raises:
        ValueError: there is none.
    """
    found = {int(path.name.removeprefix("step-")): path for path in list_checkpoints(folder)}
    check(bool(found), function, "RUN", "hold a checkpoint", folder.parent)
    if which == "last":
        return found[max(found)]
    if which == "best":
        best = best_checkpoint(folder)
        hint = "Of no step that was evaluated there is one."
        check(best is not None, function, "--checkpoint", "be last or a step", which, hint)
        assert best is not None
        return best
    steps = ", ".join(map(str, found))
    exists = which.isdecimal() and int(which) in found
    check(exists, function, "--checkpoint", f"be last, best or one of {steps}", which)
    return found[int(which)]


def save_checkpoint(folder: Path, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], *, keep: int) -> Path:
    """Write a checkpoint, then remove all but the newest ``keep`` and the best.

    Args:
        folder: folder of all checkpoints of a run; made if need be.
        step: optimizer steps done, for the name.
        tensors: everything that is a tensor, by name.
        meta: everything else, as JSON; ``val_bits_per_byte`` is what :func:`best_checkpoint` compares.
        keep: newest checkpoints that stay, this one included.

    Returns:
        The folder of this checkpoint.

    Raises:
        FileExistsError: there is a checkpoint of this step.
        OSError: it could not be written; what was there before is untouched.
    """
    target = checkpoint_path(folder, step)
    if target.exists():
        raise FileExistsError(f"{target} exists already")
    folder.mkdir(parents=True, exist_ok=True)
    _remove_unfinished(folder)  # of a process that was killed here
    unfinished = folder / f"{_UNFINISHED}{target.name}"
    try:
        _write_files(unfinished, tensors, meta)
    except OSError:
        _remove_unfinished(folder)  # a full disk needs the room
        raise
    unfinished.rename(target)
    flush_folder(folder)
    best = best_checkpoint(folder)
    for old in list_checkpoints(folder)[:-keep]:
        if old != best:
            old.rename(folder / f"{_UNFINISHED}{old.name}")  # never half of a checkpoint under a valid name
    _remove_unfinished(folder)
    return target


def _write_files(folder: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    folder.mkdir()
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / TENSORS)
    except SafetensorError as error:  # its form of an OSError
        raise OSError(f"{folder / TENSORS}: {error}") from error
    with (folder / TENSORS).open("rb") as file:
        os.fsync(file.fileno())
    write_flushed(
        folder / META, json.dumps({"format": FORMAT, "nsa": version("nsa"), "torch": torch.__version__, **meta}, indent=1)
    )
    shutil.copymode(folder / META, folder / TENSORS)  # which safetensors lets nobody but its owner read
    write_flushed(folder / SUMS, "".join(f"{_sha256(folder / name)}  {name}\n" for name in (TENSORS, META)))
    flush_folder(folder)


def _remove_unfinished(folder: Path) -> None:
    for leftover in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(leftover)


def read_meta(path: Path) -> dict[str, Any]:
    """Everything of a checkpoint that is not a tensor.

    Raises:
        ValueError: no complete, undamaged checkpoint of this format is there; the message names the file.
    """
    check(
        _NAME.fullmatch(path.name) is not None and path.is_dir(),
        "read_meta",
        "path",
        "be the folder of a checkpoint, step-<number>",
        path,
    )
    if not (path / SUMS).exists():  # format 1 kept its hashes elsewhere
        _check_format(path, _parse_meta(path))
    _verify(path, META)
    meta = _parse_meta(path)
    check(isinstance(meta, dict), "read_meta", "path", "hold a checkpoint with JSON in meta.json", path)
    assert isinstance(meta, dict)
    _check_format(path, meta)
    for name, kind in _KINDS.items():
        fits = name not in meta or isinstance(meta[name], kind)
        check(fits, "read_meta", "path", f"have a {name} of its kind in meta.json", f"{meta.get(name)!r:.60} in {path}")
    return meta


def _parse_meta(path: Path) -> Any:
    """What stands in meta.json; None where it is missing or no JSON."""
    try:
        return json.loads((path / META).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError):
        return None


def _check_format(path: Path, meta: Any) -> None:
    if isinstance(meta, dict) and meta.get("format") != FORMAT:
        made = meta.get("nsa", "0.0, before the first release")
        found = f"format {meta.get('format')} of nsa {made} in {path}"
        fail("read_meta", "path", f"hold a checkpoint of format {FORMAT}", found, "That version of nsa can read it.")


def read_run_meta(path: Path) -> dict[str, Any]:
    """:func:`read_meta` of a checkpoint that a run wrote: what a run is continued from is there.

    Raises:
        ValueError: as of :func:`read_meta`, or something is missing.
    """
    meta = read_meta(path)
    missing = [name for name in _KINDS if name not in meta]
    check(not missing, "read_meta", "path", f"hold {', '.join(missing)} in meta.json", f"none in {path}")
    return meta


def load_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Read tensors of a checkpoint into existing ones, on whatever device they are.

    Args:
        path: folder of a checkpoint.
        tensors: destinations by name, sharded or whole. Names have groups, the part before the first point; of each group that
            is read, the checkpoint must hold exactly these names.

    Raises:
        ValueError: the checkpoint is damaged (the message names the file), or belongs to something else (it names the first
            difference). Nothing has been loaded then.
    """
    read_meta(path)
    _verify(path, TENSORS)
    try:
        with safe_open(path / TENSORS, framework="pt") as file:
            _check_same(path, file, tensors)
            for name, tensor in tensors.items():
                put(tensor, file.get_tensor(name))
    except SafetensorError as error:
        fail("load_tensors", "path", "hold tensors in the format of safetensors", f"{path / TENSORS} ({error})")


def _check_same(path: Path, file: Any, tensors: Mapping[str, Tensor]) -> None:
    groups = {name.partition(".")[0] for name in tensors}
    names = [name for name in file.keys() if name.partition(".")[0] in groups]  # noqa: SIM118 (a file, not a dictionary)
    for name, tensor in tensors.items():
        found = None
        if name in names:
            entry = file.get_slice(name)
            found = f"{tuple(entry.get_shape())} {_DTYPES.get(entry.get_dtype(), entry.get_dtype())}"
        wanted = f"{tuple(tensor.shape)} {tensor.dtype}"
        check(found == wanted, "load_tensors", "path", f"hold {name} as {wanted}", found, f"It is {path}.")
    extra = sorted(set(names) - set(tensors))
    check(not extra, "load_tensors", "path", f"hold no {extra[0] if extra else ''}", "one", f"It is {path}.")


def _verify(path: Path, name: str) -> None:
    """Compare a file with its hash."""
    sums = (path / SUMS).read_bytes() if (path / SUMS).is_file() else b""
    expected = _SUMS_TEXT.fullmatch(sums)
    hint = "Remove this folder to go on from the checkpoint before it."
    found = f"{path / SUMS} missing or changed"
    check(expected is not None, "read_meta", "path", "hold an undamaged checkpoint", found, hint)
    assert expected is not None
    file = path / name
    same = file.is_file() and _sha256(file) == expected[1 + (TENSORS, META).index(name)].decode()
    check(same, "read_meta", "path", "hold an undamaged checkpoint", f"{file} missing or changed", hint)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class CheckpointWriter:
    """Writes checkpoints in a thread of its own while training goes on, one at a time.

    A checkpoint that cannot be written, on a full disk for example, is a warning: the older ones stay and training goes on. So
    is one that nobody could go on from, with a weight or moment that is not finite: it must not push out the older ones. Any
    other error is a bug and comes out of the next call.

    Args:
        folder: folder of all checkpoints of a run.
        keep: see :func:`save_checkpoint`.
        writes: whether this process is the one that writes; the others only hand over their parts of sharded tensors.

    Attributes:
        newest_step: step of the newest checkpoint, written or being written; None without one.
        failure: why the last one could not be written; None if it could.
    """

    def __init__(self, folder: Path, keep: int, *, writes: bool = True) -> None:
        self._folder, self._keep, self._writes = folder, keep, writes
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        found = list_checkpoints(folder)
        self._written = self.newest_step = int(found[-1].name.removeprefix("step-")) if found else None
        self.failure: str | None = None

    def submit(self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Copy the tensors to main memory and start writing; waits for the checkpoint before it.

        Sharded tensors are gathered one at a time; for these all processes must come here together.

        Args:
            step: optimizer steps done.
            tensors: as of :func:`save_checkpoint`. Operations that come later on the current stream may change them.
            meta: as of :func:`save_checkpoint`.
        """
        if not self._writes:
            for tensor in tensors.values():
                gather(tensor)
            return
        self.wait()
        snapshot = _Snapshot.of(tensors)
        self.newest_step = step
        self._writing = self._thread.submit(self._write, step, snapshot, meta)

    def poll(self) -> None:
        """Take note of a finished checkpoint, without waiting."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def close(self) -> None:
        """Wait, and end the thread."""
        self._thread.shutdown()
        self.wait()

    def _write(self, step: int, snapshot: _Snapshot, meta: Mapping[str, Any]) -> None:
        if snapshot.complete is not None:
            snapshot.complete.synchronize()
        begin = time.perf_counter()
        broken = [name for name, largest in snapshot.largest.items() if not largest.isfinite()]
        if broken:
            self._fail(step, f"{broken[0]} is not finite")
            return
        try:
            path = save_checkpoint(self._folder, step, snapshot.copies, meta, keep=self._keep)
        except OSError as error:
            self._fail(step, str(error))
            return
        self._written, self.failure = step, None
        seconds = time.perf_counter() - begin
        logger.info("checkpoint %s (%.1f s)", path, seconds, extra={"event": "checkpoint", "step": step})

    def _fail(self, step: int, why: str) -> None:
        self.failure = f"checkpoint of step {step} could not be written ({why})"
        kept = list_checkpoints(self._folder)
        left = f"the newest is {kept[-1].name}" if kept else "there is none yet"
        logger.warning("%s; %s", self.failure, left, extra={"event": "checkpoint failed", "step": step})
        self.newest_step = self._written


@dataclass(frozen=True)
class _Snapshot:
    """Tensors as they were at one moment.

    Attributes:
        copies: in main memory; from a GPU they go through pinned memory.
        largest: the largest absolute value of each that has one, found where the tensor lies; NaN if there is one among them.
        complete: when both are there; None if they are.
    """

    copies: dict[str, Tensor]
    largest: dict[str, Tensor]
    complete: torch.cuda.Event | None

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> _Snapshot:
        copies, largest = dict[str, Tensor](), dict[str, Tensor]()
        for name, tensor in tensors.items():
            whole = gather(tensor)
            copies[name] = _in_main_memory(whole)
            if whole.is_floating_point() and whole.numel() > 0:
                largest[name] = _in_main_memory(torch.linalg.vector_norm(whole, float("inf")))
        if not any(tensor.is_cuda for tensor in tensors.values()):
            return cls(copies, largest, None)
        complete = torch.cuda.Event()
        complete.record()
        return cls(copies, largest, complete)


def _in_main_memory(tensor: Tensor) -> Tensor:
    """A copy, which from a GPU is there when what the current stream was given so far is done."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=tensor.is_cuda)
