"""How this process was started: the only place that reads or sets environment variables."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from nsa.errors import check
from nsa.train.config import TrainConfig


@dataclass(frozen=True)
class Launch:
    """What the launcher told this process.

    Attributes:
        rank: of this process among all.
        local_rank: of this process on its machine.
        world_size: processes of the run.
        launcher: whether torchrun started this process.
        restart: how many times torchrun has started the processes anew after one of them died.
        allocator: settings of PyTorch's CUDA allocator, as given in the environment; empty means its defaults.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    launcher: bool = False
    restart: int = 0
    allocator: str = ""


def read_launch() -> Launch:
    """The launch as torchrun and the shell describe it; without torchrun, a single process."""
    return Launch(
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        launcher="RANK" in os.environ,
        restart=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        allocator=os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")),
    )


def check_launch(config: TrainConfig, launch: Launch) -> None:
    """Refuse a launch that is not the one that the configuration is meant for.

    Raises:
        ValueError: the platform is Windows, or the number of processes differs from ``world_size``.
    """
    check_platform("train")
    check(
        config.world_size == launch.world_size,
        "train", "world_size", f"equal the number of processes launched ({launch.world_size})", config.world_size,
        f"Start it with: torchrun --standalone --nproc-per-node {config.world_size} -m nsa train ...",
    )  # fmt: skip


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
    """What the environment tells the libraries through which processes exchange tensors, NCCL and gloo."""
    prefixes = ("NCCL_", "TORCH_NCCL_", "GLOO_")
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}


def one_thread_for_tokenizers() -> None:
    """Keep the ``tokenizers`` library to one thread in this process: processes share the work already."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
