"""Launch of this process: the only module that reads or sets environment variables."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass

from nsa.errors import check
from nsa.train.config import TrainConfig


@dataclass(frozen=True)
class Launch:
    """Settings of the launcher.

    Attributes:
        rank: of this process among all.
        local_rank: of this process on its machine.
        world_size: processes of the run.
        launcher: whether torchrun started this process.
        agent: process ID of the torchrun agent that started this process; 0 without torchrun.
        restart: number of restarts by torchrun after a process died.
        allocator: settings of PyTorch's CUDA allocator, as given in the environment; empty means
            its defaults.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    launcher: bool = False
    agent: int = 0
    restart: int = 0
    allocator: str = ""


_SETS = "torchrun sets these variables; a process alone runs without them."


def _number(name: str, default: int | str) -> int:
    """A count in an environment variable."""
    text = os.environ.get(name, str(default))
    is_count = re.fullmatch("[0-9]{1,9}", text) is not None
    check(is_count, "read_launch", name, "be a whole number from 0", repr(text), _SETS)
    return int(text)


def read_launch() -> Launch:
    """The launch as torchrun and the shell describe it; without torchrun, a single process.

    Raises:
        UserError: a variable that torchrun sets has another value.
    """
    environment = os.environ
    rank, world_size = _number("RANK", 0), _number("WORLD_SIZE", 1)
    rule = f"be below WORLD_SIZE ({world_size})"
    check(rank < world_size, "read_launch", "RANK", rule, rank, _SETS)
    if world_size > 1:
        rule = f"be set with WORLD_SIZE {world_size}"
        check("MASTER_ADDR" in environment, "read_launch", "MASTER_ADDR", rule, "nothing", _SETS)
        _number("MASTER_PORT", "")
    former = environment.get("PYTORCH_CUDA_ALLOC_CONF", "")
    return Launch(
        rank=rank,
        local_rank=_number("LOCAL_RANK", 0),
        world_size=world_size,
        launcher="RANK" in environment,
        agent=os.getppid() if "TORCHELASTIC_RUN_ID" in environment else 0,
        restart=_number("TORCHELASTIC_RESTART_COUNT", 0),
        allocator=environment.get("PYTORCH_ALLOC_CONF", former),
    )


def check_launch(config: TrainConfig, launch: Launch) -> None:
    """Refuse a launch that is not the one that the configuration is meant for.

    Raises:
        ValueError: the platform is Windows, or the number of processes differs from ``world_size``.
    """
    check_platform("train")
    ours, launched = config.world_size, launch.world_size
    command = f"torchrun --standalone --nproc-per-node {ours} -m nsa train ..."
    rule = f"equal the number of processes launched ({launched})"
    check(ours == launched, "train", "world_size", rule, ours, f"Start it with: {command}")


def check_platform(function: str) -> None:
    """Refuse Windows, which lacks the signals and locks of files that runs need.

    Args:
        function: the command.

    Raises:
        ValueError: the platform is Windows.
    """
    hint = "Use WSL; operators, models and their reference work here too."
    check(sys.platform != "win32", function, "the platform", "be Linux or macOS", "Windows", hint)


def communication_settings() -> dict[str, str]:
    """Environment variables that NCCL and gloo read."""
    prefixes = ("NCCL_", "TORCH_NCCL_", "GLOO_")
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}


def one_thread_for_tokenizers() -> None:
    """Keep ``tokenizers`` to one thread in this process: processes share the work already."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
