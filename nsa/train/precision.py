"""Device and numeric precision of a run."""

from __future__ import annotations

import torch

from nsa.errors import check


def choose_device(name: str) -> torch.device:
    """The device that ``device`` of a configuration means.

    Args:
        name: ``auto`` (a CUDA GPU where there is one), ``cpu`` or ``cuda``.

    Raises:
        ValueError: ``cuda`` without a usable GPU.
    """
    available = torch.cuda.is_available()
    check(
        name != "cuda" or available,
        "choose_device", "device", "be cpu or auto where PyTorch finds no CUDA GPU", name,
    )  # fmt: skip
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def autocast(device: torch.device, compute_dtype: str) -> torch.autocast:
    """Context in which a forward pass runs.

    Args:
        device: where the model is.
        compute_dtype: ``bf16`` runs matrix products and attention in bf16 while parameters stay fp32; ``fp32`` changes nothing.
    """
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=compute_dtype == "bf16")


def set_tf32(enabled: bool) -> None:
    """Whether fp32 matrix products may round their inputs to TF32 on NVIDIA GPUs; holds for the whole process."""
    torch.set_float32_matmul_precision("high" if enabled else "highest")
