"""Errors where memory is not enough: what was in use, which settings help, what cannot fit."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from nsa.errors import UserError, check
from nsa.lm.baseline import parameters_by_part
from nsa.lm.config import LMConfig
from nsa.train.checkpoint import list_checkpoints
from nsa.train.config import TrainConfig
from nsa.train.run_folder import RunFolder

_GIB = 2**30
# Logits of a vocabulary from this size on may be most of what a step needs.
_LARGE_VOCABULARY = 4096
_LOSS_CHUNK = 1024
# Of libraries that ask the driver for memory themselves, and of PyTorch on a CPU.
_OTHER_WORDS = (
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "Storage size calculation overflowed",
)


@contextmanager
def explained(function: str, what: str, hint: Callable[[], str]) -> Iterator[None]:
    """Context manager: turn a lack of memory into a :class:`UserError` with advice.

    Args:
        function: the command.
        what: what did not fit.
        hint: makes sentences that say what to do; called where it is needed alone.

    Raises:
        UserError: the memory is not enough.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(function, what, "fit into memory", memory_use(error), hint()) from error


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error is, or comes from, a lack of memory.

    The capture of a CUDA graph in which memory runs out is closed with an error of its own.
    """
    return any(
        isinstance(one, torch.OutOfMemoryError | MemoryError)
        or any(words in str(one) for words in _OTHER_WORDS)
        for one in _chain(error)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, the one that it came from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def memory_use(error: BaseException) -> str:
    """What the device has, what this process holds and what it asked for, as far as is known."""
    asked = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", "\n".join(map(str, _chain(error))))
    end = f"; {asked[1]} more were asked for" if asked else ""
    if not torch.cuda.is_available():
        return f"out of memory{end}"
    free, total = (size / _GIB for size in torch.cuda.mem_get_info())
    tensors = torch.cuda.max_memory_allocated() / _GIB
    held = torch.cuda.memory_reserved() / _GIB
    gpu = f"{torch.cuda.get_device_name()} with {total:.1f} GiB"
    here = f"{held:.1f} GiB held by PyTorch, at most {tensors:.1f} GiB in tensors"
    return f"out of memory on {gpu}: {here}, {free:.1f} GiB free{end}"


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
        how = f"Go on with: nsa train --resume {folder.path} {words}"
        if not words:
            how = "It needs a GPU with more memory."
        return f"The last checkpoint is {checkpoints[-1]}. {how}"
    if not words:
        return "Take a smaller model, a shorter --seq-len or a GPU with more memory."
    return f"Give {words}; `nsa plan` says what a run needs."


# Bytes a parameter: fp32 weights; in training as many for gradients and for each of two moments.
_WEIGHT_BYTES, _TRAINING_BYTES = 4, 16
_MACHINE, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def check_run_fits(function: str, config: TrainConfig, device: torch.device) -> None:
    """Apply :func:`check_fits` to a run, whose processes may divide the model among them.

    Of its activations one residual stream and the logits are counted.
    """
    model, tokens = config.model, config.micro_batch * config.seq_len
    shares = config.world_size if config.parallel.strategy == "fsdp" else 1
    logits = min(config.loss_chunk or tokens, tokens) * model.vocab_size
    activations = 4 * tokens * model.width + 2 * logits
    check_fits(function, model, device, shares=shares, activations=activations)


def check_fits(
    function: str,
    config: LMConfig,
    device: torch.device,
    *,
    training: bool = True,
    shares: int = 1,
    activations: int = 0,
) -> None:
    """Refuse a model that cannot fit before anything is begun: its weights and what trains them.

    What fits by this may still be too large; ``nsa plan`` counts a whole step.

    Args:
        function: the command.
        config: the model.
        device: where it is to compute.
        training: whether gradients and moments are needed too.
        shares: processes that divide the model among them.
        activations: bytes needed beside the model.

    Raises:
        UserError: the memory that is free does not suffice.
    """
    parameters = parameters_by_part(config)["total"]
    needed, free = parameters * _WEIGHT_BYTES / shares, free_memory(device)
    what, hint = "", "Give --device cpu, or end what else takes memory."
    if training:
        needed = parameters * _TRAINING_BYTES / shares + activations
        what = " with their gradients and moments"
        what += f" and {activations / _GIB:.1f} GiB of activations" * (activations > 0)
        hint = "`nsa plan` says what a run needs."
    taken = f"which take {needed / _GIB:.1f} GiB{what}, and {free / _GIB:.1f} GiB free"
    found = f"{parameters / 1e9:.2f}B parameters, {taken}"
    rule = f"fit into the memory of the {device.type} device"
    check(needed <= free, function, "the model", rule, found, hint)


def free_memory(device: torch.device) -> float:
    """Bytes that this process may still take; infinite where the system does not tell."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + unused)
    return min(1024 * _number_in(_MACHINE, r"MemAvailable: +(\d+) kB"), _left_in_cgroup())


def _left_in_cgroup() -> float:
    """Bytes below the limit of the container, which may drop the files that it has cached."""
    used = _number_in(_CGROUP / "memory.current", r"(\d+)")
    cached = _number_in(_CGROUP / "memory.stat", r"(?m)^file (\d+)$")
    limit = _number_in(_CGROUP / "memory.max", r"(\d+)")
    return math.inf if math.inf in (limit, used, cached) else limit - used + cached


def _number_in(path: Path, pattern: str) -> float:
    """A number in a file of the system; infinite where there is no such file or no number in it."""
    try:
        found = re.search(pattern, path.read_text(encoding="ascii"))
    except OSError:
        return math.inf
    return float(found[1]) if found else math.inf
