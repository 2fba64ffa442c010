"""Device and numeric precision of a run."""

from __future__ import annotations

import torch

from nsa.errors import check
from nsa.ops._backend import check_kernels_run


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """The device for the setting ``device`` of a configuration.

    Args:
        name: ``auto`` (a CUDA GPU if there is one), ``cpu`` or ``cuda``.
        local_rank: rank of this process on its machine; the index of its GPU.

    Raises:
        ValueError: ``cuda`` without a usable GPU, a GPU that is too old for the kernels, or fewer
            GPUs than processes.
    """
    available = torch.cuda.is_available()
    rule = "be cpu or auto where PyTorch finds no CUDA GPU"
    check(name != "cuda" or available, "device", rule, name)
    if name == "cpu" or not available:
        return torch.device("cpu")
    count = torch.cuda.device_count()
    rule = f"be below the number of GPUs ({count})"
    check(local_rank < count, "local_rank", rule, local_rank)
    check_kernels_run("device", local_rank, "Give --device cpu.")
    return torch.device("cuda", local_rank)


def autocast(device: torch.device, compute_dtype: str) -> torch.autocast:
    """Context manager of a forward pass.

    Args:
        device: device of the model.
        compute_dtype: ``bf16`` runs matrix products and attention in bf16 while parameters stay
            fp32; ``fp32`` changes nothing.
    """
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=compute_dtype == "bf16")
