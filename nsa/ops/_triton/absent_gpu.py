"""Compile-only Triton driver for an NVIDIA GPU (no hardware needed)."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class AbsentGPU(DriverBase):
    """Driver of one compute capability that supports compilation but not execution.

    Args:
        arch: compute capability, major and minor as two digits.
    """

    serials = itertools.count()

    def __init__(self, arch: int) -> None:
        super().__init__()
        self.arch = arch
        # Triton caches compiled kernels per device: a unique index separates the drivers.
        self.serial = next(self.serials)

    @classmethod
    def is_active(cls) -> bool:
        """Return True: no hardware is needed."""
        return True

    def get_current_target(self) -> GPUTarget:
        """Return the target of the compiler."""
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        """Return the unique index of this driver."""
        return self.serial

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Return the device of the tensors."""
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Not supported: no launcher is built."""
        raise NotImplementedError

    def get_benchmarker(self) -> Any:
        """Not supported: no kernel runs."""
        raise NotImplementedError
