"""Compile-only driver for Triton: launches compile for an NVIDIA GPU, and nothing runs."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import triton

from nsa.ops._triton.absent_gpu import AbsentGPU

# Bytes of shared memory that one program may have, by compute capability (CUDA C++ Programming
# Guide, technical specifications: maximum amount of shared memory per thread block).
SHARED_MEMORY_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}


@dataclass(frozen=True)
class Usage:
    """Resources of one compiled kernel.

    Attributes:
        kernel: name of the function.
        registers: registers of a thread.
        stack: bytes of a thread in local memory: spilled registers and indexed arrays.
        shared: bytes of a program in shared memory.
        hazards: buffers in shared memory that may be overwritten while a product reads them.
    """

    kernel: str
    registers: int
    stack: int
    shared: int
    hazards: tuple[str, ...] = ()


class NotingGPU(AbsentGPU):
    """Absent GPU that records the resources of each kernel that is loaded on it.

    Args:
        arch: compute capability, major and minor as two digits.
        usages: list to which the resources of each loaded kernel are appended.
    """

    def __init__(self, arch: int, usages: list[Usage]) -> None:
        super().__init__(arch)
        self.usages = usages
        self.utils = self
        self.hazards: tuple[str, ...] = ()

    def launcher_cls(self, src: object, metadata: Any) -> Callable[..., None]:
        """Store the hazards of the compilation; Triton calls this before ``load_binary``."""
        self.hazards = tuple(metadata.hazards)
        return lambda *args, **kwargs: None

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Report no limit: a kernel that needs too much is recorded and judged later."""
        return {"max_shared_mem": 1 << 30}

    def load_binary(
        self, name: str, binary: bytes, shared: int, device: int
    ) -> tuple[int, int, int, int, int]:
        """Record the resources of a kernel.

        Returns:
            Handles of module and function, registers, spilled words, and the maximum of threads.
        """
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary)
            file.flush()
            command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = re.search(r"REG:(\d+) STACK:(\d+) ", text)
        assert found is not None, f"cuobjdump on {name} for sm_{self.arch}: {text!r}"
        # The name without its branch.
        kernel = "".join(name.partition("_kernel")[:2])
        self.usages.append(Usage(kernel, int(found[1]), int(found[2]), shared, self.hazards))
        return 0, 0, int(found[1]), int(found[2]) // 4, 1024


@contextmanager
def absent_gpu(arch: int) -> Iterator[list[Usage]]:
    """Context manager in which a launch takes CPU tensors and compiles for ``sm_<arch>``.

    Nothing runs, and outputs are not written.

    Args:
        arch: a key of ``SHARED_MEMORY_LIMIT``.

    Yields:
        List to which each kernel is appended once, when a launch compiles it or takes it from
        Triton's cache on disk.
    """
    assert not triton.knobs.runtime.interpret, "kernels do not compile under TRITON_INTERPRET=1"
    assert arch in SHARED_MEMORY_LIMIT, arch
    usages: list[Usage] = []
    triton.runtime.driver.set_active(NotingGPU(arch, usages))
    try:
        # With a hook, such as the trainer's, Triton writes the kernel's specialization as JSON.
        hook = mock.patch.object(triton.knobs.runtime, "jit_cache_hook", return_value=False)
        stages = mock.patch.object(
            triton.knobs.runtime, "add_stages_inspection_hook", inspect_stages
        )
        with hook, stages, kernels_take_cpu_tensors():
            yield usages
    finally:
        triton.runtime.driver.set_active(None)


def inspect_stages(
    backend: object = None,
    stages: dict[str, Callable[..., Any]] | None = None,
    *_: object,
) -> tuple[str, str]:
    """Hook of Triton's compiler: store hazards in the kernel's metadata.

    Triton calls it without arguments for the key of its cache.
    """
    if stages is not None:
        lower = stages["llir"]

        def llir(src: object, metadata: dict[str, Any]) -> Any:
            metadata["hazards"] = overwritten_operands(str(src))
            return lower(src, metadata)

        stages["llir"] = llir
    return "hazards", "hazards"


def overwritten_operands(ttgir: str) -> list[str]:
    """Buffers that both an asynchronous product of Hopper and a load into registers read.

    Triton (3.6, 3.7) reserves one buffer too few for such a tile: the copy for a later step of the
    loop overwrites it while the product may still read it.
    """
    buffers = dict(re.findall(r"(%[\w#]+) = ttg\.memdesc_index (%[\w#]+)\[", ttgir))
    products = re.findall(r"ttng\.warp_group_dot (%[\w#]+), (%[\w#]+), .*isAsync = true", ttgir)
    read = {buffers.get(operand) for operands in products for operand in operands}
    loaded = {buffers.get(x) for x in re.findall(r"ttg\.local_load (%[\w#]+)", ttgir)}
    return sorted(x for x in read & loaded if x is not None)


@contextmanager
def kernels_take_cpu_tensors() -> Iterator[None]:
    """Context manager in which ``backend="triton"`` is allowed for CPU tensors."""
    with mock.patch("nsa.ops._backend.kernels_run_on_cpu", return_value=True):
        yield
