"""GPUs that a run may be planned for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nsa.errors import check, fail
from nsa.train.throughput import peak_of

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        name: as its driver gives it.
        memory_gib: as PyTorch reports it, which is less than on the data sheet.
    """

    name: str
    memory_gib: float

    @property
    def peak_flops(self) -> float | None:
        """Dense bf16 matrix products, operations a second; None where it is not known."""
        return peak_of(self.name)


KNOWN = {
    "b200": Gpu("NVIDIA B200", 178.4),
    "h200": Gpu("NVIDIA H200", 139.8),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 79.2),
    "h100-pcie": Gpu("NVIDIA H100 PCIe", 79.2),
    "h100-nvl": Gpu("NVIDIA H100 NVL", 93.1),
    "a100": Gpu("NVIDIA A100-SXM4-80GB", 79.2),
    "a100-40": Gpu("NVIDIA A100-SXM4-40GB", 39.4),
    "l40s": Gpu("NVIDIA L40S", 44.4),
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", 23.5),
}


def find_gpu(name: str | None, memory_gib: float | None) -> Gpu | None:
    """The GPU to plan for: the one named, or that of this machine; None where there is neither.

    Args:
        name: a key of ``KNOWN``, or None.
        memory_gib: counts in place of the GPU's own; alone it stands for a GPU of unknown speed.

    Raises:
        ValueError: the name is unknown, or the memory is not positive.
    """
    check(memory_gib is None or memory_gib > 0, "nsa plan", "--memory-gib", "be positive", memory_gib)
    if name is not None:
        if name not in KNOWN:
            fail("nsa plan", "--gpu", f"be one of {', '.join(KNOWN)}", repr(name), "For another one give --memory-gib.")
        found: Gpu | None = KNOWN[name]
    elif torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found = Gpu(properties.name, properties.total_memory / GIB)
    else:
        found = None
    if memory_gib is None:
        return found
    return Gpu("a GPU" if found is None else found.name, memory_gib)
