"""What a user is told where memory is not enough: what was in use, which settings help, and what cannot fit at all."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from nsa.errors import UserError, check
from nsa.lm.config import LMConfig
from nsa.lm.model import LanguageModel
from nsa.train.checkpoint import list_checkpoints
from nsa.train.config import TrainConfig
from nsa.train.run_folder import RunFolder

_GIB = 2**30
# Logits of a vocabulary from this size on may be most of what a step needs.
_LARGE_VOCABULARY = 4096
_LOSS_CHUNK = 1024
# Of libraries that ask the driver for memory themselves.
_OTHER_WORDS = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


@contextmanager
def explained(function: str, what: str, hint: Callable[[], str]) -> Iterator[None]:
    """Within, running out of GPU memory is a mistake of the user that can be put right.

    Args:
        function: the command.
        what: what did not fit.
        hint: makes sentences that say what to do; called where it is needed alone.

    Raises:
        UserError: the memory is not enough.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(function, what, "fit into GPU memory", memory_use(error), hint()) from error


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error is, or comes from, a lack of GPU memory.

    The capture of a CUDA graph in which memory ends is closed with an error of its own.
    """
    for one in _chain(error):
        if isinstance(one, torch.OutOfMemoryError):
            return True
        if any(words in str(one) for words in _OTHER_WORDS):
            return True
    return False


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, the one that it came from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def memory_use(error: BaseException) -> str:
    """What the device has, what this process holds and what it asked for, as far as is known."""
    asked = _asked_for(error)
    end = f"; {asked} more were asked for" if asked else ""
    if not torch.cuda.is_available():
        return f"out of memory{end}"
    free, total = (size / _GIB for size in torch.cuda.mem_get_info())
    tensors = torch.cuda.max_memory_allocated() / _GIB
    held = torch.cuda.memory_reserved() / _GIB
    gpu = f"{torch.cuda.get_device_name()} with {total:.1f} GiB"
    here = f"{held:.1f} GiB held by PyTorch, at most {tensors:.1f} GiB in tensors"
    return f"out of memory on {gpu}: {here}, {free:.1f} GiB free{end}"


def _asked_for(error: BaseException) -> str:
    """What PyTorch's allocator says that it was asked for; empty if it says nothing."""
    texts = "\n".join(str(one) for one in _chain(error))
    found = re.search(r"Tried to allocate ([\d.]+ \w+)", texts)
    return found[1] if found else ""


def smaller_micro_batch(config: TrainConfig) -> int | None:
    """At most half of the windows, of which a step is a whole number; None if one is left."""
    size = config.micro_batch
    return max((part for part in range(1, size // 2 + 1) if size % part == 0), default=None)


def remedies(config: TrainConfig, *, resumed: bool) -> str:
    """Settings that need less memory and train the same, as words of the command line.

    Args:
        config: the run.
        resumed: leaves out what a resumed run may not change.
    """
    found = []
    micro_batch = smaller_micro_batch(config)
    if micro_batch is not None:
        accumulation = config.accumulation * config.micro_batch // micro_batch
        found.append(f"--micro-batch {micro_batch} --accumulation {accumulation}")
    if config.checkpointing.policy != "full":
        found.append("--checkpointing.policy full (slower)")
    if not resumed and config.loss_chunk == 0 and config.model.vocab_size >= _LARGE_VOCABULARY:
        found.append(f"--loss-chunk {_LOSS_CHUNK} (logits of a large vocabulary)")
    return " or ".join(found)


def hint_for_run(config: TrainConfig, folder: RunFolder) -> str:
    """What to do about a run that did not fit: give it other settings, or resume it with them."""
    checkpoints = list_checkpoints(folder.checkpoints)
    words = remedies(config, resumed=bool(checkpoints))
    if checkpoints:
        return _resumption(checkpoints[-1], folder, words)
    if not words:
        return "Take a smaller model, a shorter --seq-len or a GPU with more memory."
    return f"Give {words}; `nsa plan` says what a run needs."


def _resumption(checkpoint: Path, folder: RunFolder, words: str) -> str:
    last = f"The last checkpoint is {checkpoint}."
    if not words:
        return f"{last} It needs a GPU with more memory."
    return f"{last} Go on with: nsa train --resume {folder.path} {words}"


# Bytes a parameter: fp32 weights, and in training as much for gradients and each of two moments.
_WEIGHT_BYTES, _TRAINING_BYTES = 4, 16
_CGROUP = Path("/sys/fs/cgroup")


def check_run_fits(function: str, config: TrainConfig, device: torch.device) -> None:
    """As :func:`check_fits`, of a run, whose processes may divide the model among them."""
    check_fits(
        function,
        config.model,
        device,
        shares=config.world_size if config.parallel.strategy == "fsdp" else 1,
    )


def check_fits(
    function: str, config: LMConfig, device: torch.device, *, training: bool = True, shares: int = 1
) -> None:
    """Refuse a model that cannot fit before anything is begun: its weights and what training keeps beside them.

    What fits by this may still be too large, for nothing is said of activations; ``nsa plan``
    counts a whole step.

    Args:
        function: the command.
        config: the model.
        device: where it is to compute.
        training: whether gradients and moments are needed too.
        shares: processes that divide the model among them.

    Raises:
        UserError: the memory that is free does not suffice.
    """
    with torch.device("meta"):
        parameters = LanguageModel(config).num_parameters()["total"]
    needed = parameters * (_TRAINING_BYTES if training else _WEIGHT_BYTES) / shares
    free = free_memory(device)
    beside = " with their gradients and moments" if training else ""
    found = f"{parameters / 1e9:.2f}B parameters, which take {needed / _GIB:.1f} GiB{beside}, and {free / _GIB:.1f} GiB free"
    hint = (
        "`nsa plan` says what a run needs."
        if training
        else "Give --device cpu, or end what else takes memory."
    )
    check(
        needed <= free,
        function,
        "the model",
        f"fit into the memory of the {device.type} device",
        found,
        hint,
    )


def free_memory(device: torch.device) -> float:
    """Bytes that this process may still take; infinite where the system does not tell."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return float(
            free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        )
    try:
        available = re.search(
            r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii")
        )
    except OSError:  # another system than Linux
        available = None
    return min(1024 * float(available[1]) if available else math.inf, _left_in_cgroup())


def _left_in_cgroup() -> float:
    """Bytes below the limit of the container, files that it has cached counted as free; infinite without a limit."""
    try:
        limit, used, stat = (
            (_CGROUP / f"memory.{name}").read_text(encoding="ascii")
            for name in ("max", "current", "stat")
        )
    except OSError:
        return math.inf
    files = re.search(r"^file (\d+)$", stat, re.MULTILINE)
    return (
        math.inf
        if limit.strip() == "max"
        else float(limit) - float(used) + float(files[1] if files else 0)
    )
