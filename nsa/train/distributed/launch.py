"""Launch of this process: the only module that reads or sets environment variables."""

from __future__ import annotations

import os
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


def read_launch() -> Launch:
    """Return the launch by torchrun; without torchrun, a single process.

    Raises:
        UserError: a variable that torchrun sets is not a whole number.
    """
    environment = os.environ

    def number(name: str, default: int = 0) -> int:
        text, hint = environment.get(name, str(default)), "torchrun sets it."
        check(text.isdecimal(), name, "be a whole number from 0", repr(text), hint)
        return int(text)

    former = environment.get("PYTORCH_CUDA_ALLOC_CONF", "")
    return Launch(
        rank=number("RANK"),
        local_rank=number("LOCAL_RANK"),
        world_size=number("WORLD_SIZE", 1),
        launcher="RANK" in environment,
        agent=os.getppid() if "TORCHELASTIC_RUN_ID" in environment else 0,
        restart=number("TORCHELASTIC_RESTART_COUNT"),
        allocator=environment.get("PYTORCH_ALLOC_CONF", former),
    )


def check_launch(config: TrainConfig, launch: Launch) -> None:
    """Refuse a launch that is not the one that the configuration is meant for.

    Raises:
        ValueError: the platform is Windows, or the number of processes differs from ``world_size``.
    """
    check_platform()
    ours, launched = config.world_size, launch.world_size
    command = f"torchrun --standalone --nproc-per-node {ours} -m nsa train ..."
    rule = f"equal the number of processes launched ({launched})"
    check(ours == launched, "world_size", rule, ours, f"Start it with: {command}")


def check_platform() -> None:
    """Refuse Windows, which lacks the signals and locks of files that runs need.

    Raises:
        ValueError: the platform is Windows.
    """
    hint = "Use WSL; operators, models and their reference work here too."
    check(sys.platform != "win32", "the platform", "be Linux or macOS", "Windows", hint)


def communication_settings() -> dict[str, str]:
    """Environment variables that NCCL and gloo read."""
    prefixes = ("NCCL_", "TORCH_NCCL_", "GLOO_")
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}
