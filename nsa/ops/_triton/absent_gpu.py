"""An NVIDIA GPU that is not there: Triton compiles kernels for it, and nothing runs."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class AbsentGPU(DriverBase):
    """An NVIDIA GPU of one compute capability, as far as Triton asks before it runs a kernel.

    Args:
        arch: compute capability, major and minor as two digits.
    """

    serials = itertools.count()

    def __init__(self, arch: int) -> None:
        super().__init__()
        self.arch = arch
        # Triton keeps compiled kernels by device: with a number of its own, no GPU finds those of
        # another one.
        self.serial = next(self.serials)

    @classmethod
    def is_active(cls) -> bool:
        """Always: no hardware is needed."""
        return True

    def get_current_target(self) -> GPUTarget:
        """Return the target of the compiler."""
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        """Number of this GPU."""
        return self.serial

    def get_current_stream(self, device: int) -> int:
        """The default stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Return the device of the tensors."""
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Not asked for: there is no launcher to build."""
        raise NotImplementedError

    def get_benchmarker(self) -> Any:
        """Not asked for: nothing runs."""
        raise NotImplementedError
