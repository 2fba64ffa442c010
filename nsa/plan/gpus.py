"""GPUs that a run may be planned for, and the CPU of this machine."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch

from nsa.errors import fail
from nsa.train.environment import cpu

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, or a CPU.

    Attributes:
        name: as its driver gives it; ``CPU``.
        memory_gib: as PyTorch reports it, which is less than on the data sheet.
    """

    name: str
    memory_gib: float


CPU = "CPU"
KNOWN = {
    "b200": Gpu("NVIDIA B200", 178.4),
    "h200": Gpu("NVIDIA H200", 139.8),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 79.2),
    "h100-pcie": Gpu("NVIDIA H100 PCIe", 79.2),
    "h100-nvl": Gpu("NVIDIA H100 NVL", 93.1),
    "a100": Gpu("NVIDIA A100-SXM4-80GB", 79.2),
    "a100-40": Gpu("NVIDIA A100-SXM4-40GB", 39.4),
    "a100-pcie": Gpu("NVIDIA A100 80GB PCIe", 79.2),
    "a100-pcie-40": Gpu("NVIDIA A100-PCIE-40GB", 39.4),
    "l40s": Gpu("NVIDIA L40S", 44.4),
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", 23.5),
}
# Words of a GPU's name that distinguish none of these: maker, socket, kind of memory, and its size
# where there is one size.
_NO_DIFFERENCE = re.compile(
    r"nvidia|geforce|tesla|gpu|sxm\d?|hbm\d?e?|(24|48|80|94|141|180|192)(g|gi?b)?|gi?b",
)


def _words(name: str) -> set[str]:
    """What distinguishes a GPU: ``{h100, pcie}`` of ``NVIDIA H100 PCIe``."""
    named = name.lower().replace("rtx", " ")
    joined = re.sub(r"(?<![a-z0-9])([abhl])[ _-]?(100|200|40s)", r"\1\2 ", named)  # h-100sxm
    words = (word.removesuffix("gb") for word in re.findall(r"[a-z0-9]+", joined))
    return {word for word in words if word and not _NO_DIFFERENCE.fullmatch(word)}


def find_gpu(name: str | None, memory_gib: float | None) -> Gpu | None:
    """What to plan for: the GPU named, or the CPU or GPU of this machine; None where there is none.

    Args:
        name: of a GPU of ``KNOWN`` in any usual spelling, ``cpu``, or None.
        memory_gib: counts in place of the device's own; alone it stands for a GPU of unknown speed.

    Raises:
        ValueError: the name is unknown.
    """
    found = None
    if name is not None:
        found = _named(name)
    elif torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found = Gpu(properties.name, properties.total_memory / GIB)
    if memory_gib:
        return Gpu(found.name if found else "a GPU", memory_gib)
    return found


def _named(name: str) -> Gpu:
    if _words(name) == {"cpu"}:
        return Gpu(CPU, cpu()["memory_gib"] or math.inf)  # the system may not tell
    for key, gpu in KNOWN.items():
        if _words(key) == _words(name):
            return gpu
    rule = f"be one of {', '.join(KNOWN)}, cpu"
    fail("nsa plan", "--gpu", rule, repr(name), "For another one give --memory-gib alone.")
