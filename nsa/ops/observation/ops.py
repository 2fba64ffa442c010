"""``nsa::observe``, registered with PyTorch: it adds to its sums and gives nothing back.

Triton is loaded when it runs.
"""

from __future__ import annotations

from torch import Tensor

from nsa.ops._register import register
from nsa.ops._sequences import Sequences
from nsa.ops.observation.reference import ON, observe_reference


def _observe(
    gates: Tensor,
    block_indices: Tensor | None,
    tile_stats: Tensor | None,
    sums: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    num_sequences: int,
    len_q: int,
    len_k: int,
    block_size: int,
    scattered: float,
    columns: list[int],
    backend: str,
) -> None:
    if gates.shape[0] == 0:  # nothing to look at: a call without a token does not count
        return
    if backend == "triton":
        from nsa.ops._triton.layout import Layout
        from nsa.ops.observation.triton_fwd import observe_kernels

        layout = Layout(cu_q, cu_k, num_sequences, len_q, len_k)
        observe_kernels(
            gates, block_indices, tile_stats, sums, layout, block_size, scattered, columns
        )
    elif sums.device.type != "cpu" or sums[ON] != 0:  # a look at the CPU's memory waits for nothing
        offsets = None if cu_q is None or cu_k is None else (cu_q, cu_k)
        sequences = Sequences(offsets, num_sequences, len_q, len_k, gates.device)
        observe_reference(gates, block_indices, sums, sequences, block_size, columns)


def _fake(*_: object) -> None:
    return None


# Opaque to compilers on both backends: what is switched off most of the time is not to be fused
# into what always runs.
observe_op = register(
    "observe",
    "(Tensor gates, Tensor? block_indices, Tensor? tile_stats, Tensor(a!) sums, Tensor? cu_q, "
    "Tensor? cu_k, SymInt num_sequences, SymInt len_q, SymInt len_k, int block_size, "
    "float scattered, int[] columns, str backend) -> ()",
    _observe,
    _fake,
)
