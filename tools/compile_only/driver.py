"""Compile-only driver for Triton: launches compile for an NVIDIA GPU, and nothing runs."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
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
    """Buffers that an asynchronous product of Hopper may read while a copy overwrites them.

    A product that nothing in the loop's body waits for may run while the copy for a later step
    begins. That needs one slot more than there are copies before the loop, which Triton (3.6, 3.7)
    does not reserve for a tile that is also loaded into registers.
    """
    buffers, slots, copies = dict[str, str](), dict[str, int](), Counter[str]()
    running, found, seen = set[str](), set[str](), set[tuple[str, str]]()
    for number, line in enumerate(ttgir.splitlines()):  # names are those of the region
        if made := re.search(r"(%[\w#]+) = ttg.local_alloc : \(\) -> !ttg.memdesc<(\d+)x", line):
            buffers[made[1]] = buffer = f"{made[1]}, line {number}"
            slots[buffer] = int(made[2])
        elif view := re.search(r"(%[\w#]+) = ttg.memdesc_\w+ (%[\w#]+)(?:\[(%c\d+_i32)\])?", line):
            buffers[view[1]] = buffer = buffers.get(view[2], "")
            copies[buffer] += bool(view[3]) and (buffer, view[3]) not in seen
            seen.add((buffer, view[3]))
        elif product := re.search(r"warp_group_dot (%[\w#]+), (%[\w#]+),.*isAsync = true", line):
            running |= {buffers.get(product[1], ""), buffers.get(product[2], "")}
        elif "pendings = 0" in line:
            running.clear()
        elif "scf.yield" in line:
            found |= {buffer for buffer in running if slots.get(buffer, 2**31) <= copies[buffer]}
    return sorted(found)


@contextmanager
def kernels_take_cpu_tensors() -> Iterator[None]:
    """Context manager in which ``backend="triton"`` is allowed for CPU tensors."""
    with mock.patch("nsa.ops._backend.kernels_run_on_cpu", return_value=True):
        yield
