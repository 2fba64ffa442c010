"""GPUs that a run may be planned for, and the CPU of this machine."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from nsa.errors import check, fail
from nsa.train.environment import cpu
from nsa.train.telemetry.throughput import peak_of

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

    @property
    def peak_flops(self) -> float | None:
        """Dense bf16 matrix products, operations a second; None where it is not known."""
        return peak_of(self.name)


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
# Words of a GPU's name that distinguish none of these: maker, socket, kind of memory, and its size where there is one size.
_NO_DIFFERENCE = re.compile(r"nvidia|geforce|tesla|gpu|sxm\d?|hbm\d?e?|(24|48|80|94|141|180|192)(g|gi?b)?|gi?b")


def key_of(name: str) -> str:
    """A GPU's name as a key of ``KNOWN``, if it is one of them: ``NVIDIA A100-PCIE-40GB`` is ``a100-pcie-40``."""
    joined = re.sub(r"\b(?:rtx[ _-]?)?4090\b", "rtx4090", name.lower())
    joined = re.sub(r"(?<![a-z0-9])([abhl])[ _-]?(100|200|40s)", r"\1\2 ", joined)  # h-100sxm
    words = [word.removesuffix("gb") for word in re.findall(r"[a-z0-9]+", joined)]
    return "-".join(sorted((word for word in words if word and not _NO_DIFFERENCE.fullmatch(word)), key=_place))


def _place(word: str) -> int:
    """Where a word stands in a key: the model, how it is connected, its memory."""
    return {"pcie": 1, "nvl": 1, "40": 2}.get(word, 0)


def find_gpu(name: str | None, memory_gib: float | None) -> Gpu | None:
    """What to plan for: the GPU named, the CPU of this machine, or the GPU of this machine; None where there is none.

    Args:
        name: of a GPU of ``KNOWN`` in any usual spelling, ``cpu``, or None.
        memory_gib: counts in place of the device's own; alone it stands for a GPU of unknown speed.

    Raises:
        ValueError: the name is unknown, or the memory is not positive.
    """
    check(memory_gib is None or memory_gib > 0, "nsa plan", "--memory-gib", "be positive", memory_gib)
    found = _named(name, memory_gib) if name is not None else _of_this_machine()
    if memory_gib is None:
        return found
    return Gpu("a GPU" if found is None else found.name, memory_gib)


def _named(name: str, memory_gib: float | None) -> Gpu:
    key = key_of(name)
    if key == "cpu":
        memory = cpu()["memory_gib"] if memory_gib is None else memory_gib
        check(memory is not None, "nsa plan", "--memory-gib", "be given where the system does not tell its memory", None)
        return Gpu(CPU, memory)
    if key not in KNOWN:
        fail("nsa plan", "--gpu", f"be one of {', '.join(KNOWN)}, cpu", repr(name), "For another one give --memory-gib alone.")
    return KNOWN[key]


def _of_this_machine() -> Gpu | None:
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Gpu(properties.name, properties.total_memory / GIB)
