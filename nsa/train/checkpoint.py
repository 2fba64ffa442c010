"""Checkpoints on disk: complete or absent, verified, and loaded without running code from a file.

A checkpoint is a folder ``step-00001000`` with the tensors in safetensors files, ``meta.json`` with
everything else, and ``SHA256SUMS`` (hashes of the other files in the format of ``sha256sum``).
Replicas write one file, ``tensors.safetensors``. With FSDP2 every process writes its own file,
``tensors-00001-of-00004.safetensors``: a tensor in several files is split along its first
dimension, in the order of the files, so any number of processes can read its rows. The folder is
written under another name, flushed to the disk and then renamed.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from nsa.errors import UserError, check, fail
from nsa.files import FileErrors, file_digest, flush, write_flushed
from nsa.train.distributed.processes import Processes, first_row, is_sharded, own_part
from nsa.train.environment import version

logger = logging.getLogger(__name__)

FORMAT = 3
META, SUMS = "meta.json", "SHA256SUMS"
_NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED = ".unfinished-"


def checkpoint_path(folder: Path, step: int) -> Path:
    """Path of the checkpoint of a step."""
    return folder / f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in ``folder``, oldest first."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """Optimizer steps done, from the name of a checkpoint."""
    return int(checkpoint.name.removeprefix("step-"))


def best_checkpoint(folder: Path, *, skip_damaged: bool = True) -> Path | None:
    """Return the checkpoint with the lowest validation loss, None if no loss is known.

    Raises:
        UserError: a checkpoint is damaged and ``skip_damaged`` is false.
        OSError: a checkpoint cannot be read and ``skip_damaged`` is false.
    """
    losses = {}
    for path in list_checkpoints(folder):
        with suppress(UserError, OSError) if skip_damaged else nullcontext():
            losses[path] = read_meta(path)["val_bits_per_byte"]
    known = {path: loss for path, loss in losses.items() if loss is not None}
    return min(known, key=known.__getitem__, default=None)


def find_checkpoint(folder: Path, which: str) -> Path:
    """Return the checkpoint that the user asks for.

    Args:
        folder: folder of all checkpoints of a run.
        which: ``last``, ``best`` (the lowest validation loss), or a number of optimizer steps.

    Raises:
        ValueError: there is none, or the best is unknown because one is damaged.
    """
    found = {str(step_of(path)): path for path in list_checkpoints(folder)}
    check(bool(found), "RUN", "contain a checkpoint", folder.parent)
    if which == "last":
        return list(found.values())[-1]
    if which == "best":
        if best := best_checkpoint(folder, skip_damaged=False):
            return best
        hint = "None of them belongs to a step that was evaluated."
        fail("--checkpoint", "be last or a step", which, hint)
    step, rule = which.lstrip("0") or "0", f"be last, best or one of {', '.join(found)}"
    check(step in found, "--checkpoint", rule, which)
    return found[step]


# --- writing --------------------------------------------------------------------------------------
def save_checkpoint(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    *,
    writers: Processes | None = None,
) -> Path:
    """Write a checkpoint, which exists as soon as its folder is renamed.

    Args:
        folder: folder of all checkpoints of a run; created if missing.
        step: optimizer steps done, for the name.
        tensors: tensors that this process writes, by name: its rows of sharded tensors, and in the
            main process also the other tensors.
        meta: everything else, as JSON; :func:`best_checkpoint` reads ``val_bits_per_byte``.
        writers: processes that write one file each and call this together; None for one process.

    Returns:
        The folder of this checkpoint.

    Raises:
        OSError: there is a checkpoint of this step, a process could not write its file, or a tensor
            is not finite. Older checkpoints are unchanged.
    """
    writers = writers or Processes()
    names, target = _tensor_files(writers.world_size), checkpoint_path(folder, step)
    try:
        unfinished = _on_all(writers, lambda: _new_folder(target) if writers.is_main else target)[0]
        file = unfinished / names[writers.rank]
        digests = _on_all(writers, lambda: _write_tensors(file, tensors))
        if not writers.is_main:
            return target
        versions = {"format": FORMAT, "nsa": version("nsa"), "torch": torch.__version__}
        write_flushed(unfinished / META, json.dumps({**versions, **meta}, indent=1))
        for name in names:  # safetensors makes them readable for their owner only
            shutil.copymode(unfinished / META, unfinished / name)
        sums = zip((*names, META), (*digests, file_digest(unfinished / META)), strict=True)
        write_flushed(unfinished / SUMS, _sums_text(dict(sums)))
        flush(unfinished)
        unfinished.rename(target)
    except OSError:
        if writers.is_main:
            _remove_unfinished(folder)  # a full disk needs the room
        raise
    return target


def _new_folder(target: Path) -> Path:
    """Make the folder that becomes ``target`` when it is complete."""
    if target.exists():
        raise FileExistsError(f"{target} exists already")
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_unfinished(target.parent)  # of a killed process
    new = target.with_name(f"{_UNFINISHED}{target.name}")
    while new.exists():  # of another user, not removable
        new = new.with_name(f"{new.name}-")
    new.mkdir()
    return new


def clean_checkpoints(folder: Path, keep: int) -> str:
    """Remove unfinished checkpoints and all but the newest ``keep`` and the best.

    Returns:
        The error if one could not be removed, otherwise an empty string.
    """
    try:
        flush(folder)  # the new one first
    except OSError as error:
        return str(error)
    best, reason = best_checkpoint(folder), ""
    for old in list_checkpoints(folder)[:-keep]:
        try:
            (old / META).read_bytes()  # an unreadable one may be the best
            if old != best:  # renamed first: a valid name always has a complete checkpoint
                old.rename(folder / f"{_UNFINISHED}{old.name}")
        except OSError as error:
            reason = str(error)
    return _remove_unfinished(folder) or reason


def _on_all(writers: Processes, action: Callable[[], Any]) -> list[Any]:
    """Return the results of ``action`` on all processes; an OSError on one is raised on all."""
    try:
        outcome = action(), ""
    except OSError as error:
        outcome = None, str(error)
    outcomes = writers.all_of(outcome)
    for _, text in outcomes:
        if text:
            raise OSError(text)
    return [result for result, _ in outcomes]


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write one file, flush it and return its hash; a tensor that is not finite is an OSError."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise OSError(f"{name} is not finite")
    with FileErrors(path):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    flush(path)
    return file_digest(path)


def _remove_unfinished(folder: Path) -> str:
    """Remove unfinished checkpoints; return the error if one could not be removed."""
    reason = ""
    for leftover in folder.glob(f"{_UNFINISHED}*"):
        try:
            shutil.rmtree(leftover)
        except OSError as error:
            reason = str(error)
    return reason


def _tensor_files(number: int) -> list[str]:
    if number == 1:
        return ["tensors.safetensors"]
    return [f"tensors-{part:05d}-of-{number:05d}.safetensors" for part in range(1, number + 1)]


def _sums_text(sums: Mapping[str, str]) -> str:
    return "".join(f"{digest}  {name}\n" for name, digest in sums.items())


# --- reading --------------------------------------------------------------------------------------
def read_meta(path: Path) -> dict[str, Any]:
    """Read everything of a checkpoint that is not a tensor.

    Raises:
        ValueError: ``path`` is not an undamaged checkpoint of a known format; the message names the
            file.
    """
    is_one = _NAME.fullmatch(path.name) is not None and path.is_dir()
    check(is_one, "path", "be the folder of a checkpoint, step-<number>", path)
    _check_undamaged(path, META)
    meta = json.loads((path / META).read_text(encoding="utf-8"))
    found = f"format {meta['format']} of nsa {meta.get('nsa')} in {path}"
    rule, hint = f"contain a checkpoint of format {FORMAT}", "That version of nsa can read it."
    check(meta["format"] == FORMAT, "path", rule, found, hint)
    return {"tokenizer": None, **meta}  # the text of tokenizer.json, added after format 2


def load_tensors(
    path: Path, tensors: Mapping[str, Tensor], optional: Iterable[str] = ()
) -> list[str]:
    """Read tensors of a checkpoint into existing tensors on any device.

    Args:
        path: folder of a checkpoint.
        tensors: destinations by name; each process reads its rows of a sharded tensor. The part
            before the first dot of a name is its group; of each group, the checkpoint must contain
            exactly these names.
        optional: names that the checkpoint may lack.

    Returns:
        The optional names that it lacks, whose tensors are unchanged.

    Raises:
        ValueError: the checkpoint is damaged (the message names the file), or contains other
            tensors (the message names the first difference). Nothing has been loaded then.
    """
    read_meta(path)
    names = [name for name in _read_sums(path) if name != META]
    for name in names:
        _check_undamaged(path, name)
    with ExitStack() as files:
        stored: dict[str, list[Any]] = {}
        for name in names:
            file = files.enter_context(safe_open(path / name, framework="pt"))
            for key in file.keys():  # noqa: SIM118 (a file, not a dictionary)
                stored.setdefault(key, []).append(file.get_slice(key))
        absent = [name for name in optional if name not in stored]
        wanted = {name: x for name, x in tensors.items() if name not in absent}
        _check_same(path, stored, wanted)
        for key, tensor in wanted.items():
            read_into(tensor, stored[key])
    return absent


def _check_same(path: Path, stored: Mapping[str, list[Any]], tensors: Mapping[str, Tensor]) -> None:
    hint, groups = f"It is {path}.", {name.partition(".")[0] for name in tensors}
    for name, tensor in tensors.items():
        wanted = f"{tuple(tensor.shape)} {tensor.dtype}"
        found = _described(stored.get(name, []))
        check(found == wanted, "path", f"contain {name} as {wanted}", found, hint)
    for name in sorted(stored.keys() - tensors.keys()):
        is_extra = name.partition(".")[0] in groups
        check(not is_extra, "path", f"contain no {name}", "one", hint)


def _described(parts: Sequence[Any]) -> str | None:
    """Shape and dtype of a tensor from its parts in several files; None without parts."""
    if not parts:
        return None
    shape = parts[0].get_shape()
    if shape:
        shape[0] = sum(part.get_shape()[0] for part in parts)
    first = parts[0][:0] if shape else parts[0][...]
    return f"{tuple(shape)} {first.dtype}"


def read_into(target: Tensor, parts: Sequence[Any]) -> None:
    """Copy this process's rows of a tensor that is split into ``parts``."""
    own = own_part(target)
    if own.ndim == 0:
        own.copy_(parts[0][...])
        return
    begin = -first_row(target)  # first row of the part, counted from the first row of ``own``
    for part in parts:
        end = begin + part.get_shape()[0]
        first, last = max(begin, 0), min(end, own.shape[0])
        if first < last:
            own[first:last].copy_(part[first - begin : last - begin])
        begin = end


def _read_sums(path: Path) -> dict[str, str]:
    """Files of a checkpoint with their hashes: files of tensors in order, then meta.json."""
    text = (path / SUMS).read_bytes().decode(errors="replace") if (path / SUMS).is_file() else ""
    sums = {name: digest for digest, name in re.findall(r"([0-9a-f]{64})  (.+)\n", text)}
    names = [*_tensor_files(len(sums) - 1), META]
    if list(sums) != names or text != _sums_text(sums):
        _fail_damaged(path / SUMS)
    return sums


def _check_undamaged(path: Path, name: str) -> None:
    """Compare a file with its hash."""
    digest, file = _read_sums(path)[name], path / name
    if not (file.is_file() and file_digest(file) == digest):
        _fail_damaged(file)


def _fail_damaged(file: Path) -> NoReturn:
    hint = "Remove this folder to continue from the checkpoint before it."
    found = f"{file} missing or changed"
    fail("path", "contain an undamaged checkpoint", found, hint)


# --- a thread that writes -------------------------------------------------------------------------
class CheckpointWriter:
    """Writes checkpoints in a thread, one at a time.

    A checkpoint that cannot be written, on a full disk for example, is a warning: older checkpoints
    stay and training continues. So is a checkpoint with a weight or moment that is not finite. An
    old checkpoint that cannot be removed is one warning. Any other error is a bug, and the next
    call raises it.

    Args:
        folder: folder of all checkpoints of a run.
        keep: see :func:`clean_checkpoints`.
        writers: see :func:`save_checkpoint`; all processes call every method together.

    Attributes:
        newest_step: step of the newest checkpoint, written or being written; None without one.
        failure: error of the last checkpoint; None if it was written.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        writers: Processes | None = None,
    ) -> None:
        self._folder, self._keep, self._writers = folder, keep, writers or Processes()
        self._has_warned = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        found = list_checkpoints(folder)
        self.newest_step = step_of(found[-1]) if found else None
        self.failure: str | None = None

    def submit(self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Copy the tensors to main memory and start writing; waits for the checkpoint before it.

        Args:
            step: optimizer steps done.
            tensors: all tensors, sharded or whole; later operations on the current stream may
                change them.
            meta: see :func:`save_checkpoint`.
        """
        self.wait()
        copies, stream = dict[str, Tensor](), None
        for name, tensor in tensors.items():
            if self._writers.is_main or is_sharded(tensor):
                own = own_part(tensor.detach())
                copy = torch.empty_like(own, device="cpu", pin_memory=own.is_cuda)
                copies[name] = copy.copy_(own, non_blocking=own.is_cuda)
                if own.is_cuda:
                    stream = torch.cuda.current_stream(own.device)
        copied = None if stream is None else stream.record_event()
        self.newest_step = step
        self._writing = self._thread.submit(self._write, step, copies, copied, meta)

    def poll(self) -> None:
        """Raise the error of a finished write, without waiting."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint is written."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def close(self) -> None:
        """Wait, and end the thread."""
        self._thread.shutdown()
        self.wait()

    def _write(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        copied: torch.cuda.Event | None,
        meta: Mapping[str, Any],
    ) -> None:
        if copied is not None:
            copied.synchronize()
        begin = time.perf_counter()
        try:
            path = save_checkpoint(self._folder, step, tensors, meta, writers=self._writers)
        except OSError as error:
            self.failure = f"checkpoint of step {step} could not be written ({error})"
            kept = list_checkpoints(self._folder)
            self.newest_step = step_of(kept[-1]) if kept else None
            newest = f"the newest is {kept[-1].name}" if kept else "there is none yet"
            self._log(logging.WARNING, "checkpoint failed", f"{self.failure}; {newest}", step)
            return
        self.failure = None
        seconds = time.perf_counter() - begin
        self._log(logging.INFO, "checkpoint", f"checkpoint {path} ({seconds:.1f} s)", step)
        reason = clean_checkpoints(self._folder, self._keep) if self._writers.is_main else ""
        if reason and not self._has_warned:
            text = f"checkpoints are written, but old ones stay: {reason}. Remove them by hand."
            self._log(logging.WARNING, "warning", text, step)
        self._has_warned |= bool(reason)

    def _log(self, level: int, event: str, text: str, step: int) -> None:
        if self._writers.is_main:
            logger.log(level, "%s", text, extra={"event": event, "step": step})
