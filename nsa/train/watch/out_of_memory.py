"""Out-of-memory errors: memory in use, settings that help, and checks before a run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from nsa.errors import UserError, check
from nsa.lm.baseline import parameters_by_part
from nsa.train.checkpoint import list_checkpoints
from nsa.train.config import TrainConfig
from nsa.train.run_folder import RunFolder

_GIB = 2**30
# Errors of libraries that allocate memory themselves, and of PyTorch on a CPU.
_OTHER_WORDS = (
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "Storage size calculation overflowed",
)


@contextmanager
def explained(what: str, hint: Callable[[], str]) -> Iterator[None]:
    """Context manager: turn an out-of-memory error into a :class:`UserError` with advice.

    Args:
        what: subject of the message, for example ``the run``.
        hint: function that returns advice.

    Raises:
        UserError: memory ran out.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(what, "fit into memory", memory_use(error), hint()) from error


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error is, or was caused by, a lack of memory.

    If memory runs out during the capture of a CUDA graph, the end of the capture raises another
    error.
    """
    return any(
        isinstance(one, torch.OutOfMemoryError | MemoryError)
        or any(words in str(one) for words in _OTHER_WORDS)
        for one in _chain(error)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def memory_use(error: BaseException) -> str:
    """Memory of the device, of this process and of the failed allocation, as far as known."""
    asked = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", "\n".join(map(str, _chain(error))))
    end = f"; {asked[1]} more were asked for" if asked else ""
    if not torch.cuda.is_available():
        return f"out of memory{end}"
    free, total = (size / _GIB for size in torch.cuda.mem_get_info())
    tensors = torch.cuda.max_memory_allocated() / _GIB
    reserved = torch.cuda.memory_reserved() / _GIB
    gpu = f"{torch.cuda.get_device_name()} with {total:.1f} GiB"
    here = f"{reserved:.1f} GiB reserved by PyTorch, at most {tensors:.1f} GiB in tensors"
    return f"out of memory on {gpu}: {here}, {free:.1f} GiB free{end}"


def smaller_micro_batch(config: TrainConfig) -> int | None:
    """Largest divisor of the micro-batch up to its half; None for a micro-batch of 1."""
    size = config.micro_batch
    return max((part for part in range(1, size // 2 + 1) if size % part == 0), default=None)


def hint_for_run(config: TrainConfig, folder: RunFolder) -> str:
    """Advice for a run that did not fit: options that need less memory and train the same."""
    words = "--checkpointing.policy full"
    if size := smaller_micro_batch(config):
        accumulation = config.accumulation * config.micro_batch // size
        words = f"--micro-batch {size} --accumulation {accumulation} or {words} (slower)"
    if checkpoints := list_checkpoints(folder.checkpoints):
        how = f"Continue with: nsa train --resume {folder.path} {words}"
        return f"The last checkpoint is {checkpoints[-1]}. {how}"
    return f"Give {words}; `nsa plan` says what a run needs."


# Bytes per parameter: fp32 weights, gradients and two moments.
_TRAINING_BYTES = 16
_MEMORY = Path("/proc/meminfo")


def check_run_fits(config: TrainConfig, device: torch.device) -> None:
    """Check that weights, gradients, moments and a few activations fit into the free memory.

    The activations are one residual stream and the logits. A run that passes may still be too
    large; ``nsa plan`` counts a whole step.

    Args:
        config: the run.
        device: device of the run.

    Raises:
        UserError: the free memory is not enough.
    """
    model, tokens = config.model, config.micro_batch * config.seq_len
    parts = config.world_size if config.parallel.strategy == "fsdp" else 1
    logits = min(config.loss_chunk or tokens, tokens) * model.vocab_size
    parameters = parameters_by_part(model)["total"]
    needed = parameters * _TRAINING_BYTES / parts + 4 * tokens * model.width + 8 * logits
    free = free_memory(device)
    found = f"{parameters / 1e9:.2f}B parameters, which take at least {needed / _GIB:.1f} GiB"
    rule = f"fit into the {free / _GIB:.1f} GiB of free memory of the {device.type} device"
    check(needed <= free, "the model", rule, found, "`nsa plan` says what a run needs.")


def free_memory(device: torch.device) -> float:
    """Bytes that this process may still allocate; infinite if the system does not report them."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + unused)
    found = re.search(r"MemAvailable: +(\d+) kB", _MEMORY.read_text()) if _MEMORY.exists() else None
    return 1024.0 * int(found[1]) if found else math.inf
