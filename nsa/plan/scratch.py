"""What kernels need inside an operator, beyond its inputs and results, by shapes alone.

The figures follow the launchers (``nsa/ops/*/triton_launch.py``). Buffers that are small beside these are left out: a test
holds the sum against what the launchers allocate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nsa.config import NSAConfig
from nsa.ops.selected.algorithm import always_tiled

_NUM_INPUTS, _NUM_WHERE = 9, 9  # of nsa::attention and its backward: the tensors first, the layout last
# Rows and keys of a tile, as the tuned tables have them; only the number of chunks depends on them.
TILE_ROWS = TILE_KEYS = 64


def scratch_bytes(name: str, arguments: Sequence[Any]) -> int:
    """Most bytes that exist inside an operator and are not among its results, when its results are not all there yet either.

    Args:
        name: of the operator, for example ``nsa.attention.default``.
        arguments: its positional arguments; of tensors shape and dtype count.
    """
    if name.startswith("nsa.attention."):
        return _Attention.read(arguments).forward()
    if name.startswith("nsa.attention_backward."):
        return _Attention.read(arguments).backward()
    if ("_scaled_dot_product" in name or "_varlen_attn" in name) and "backward" in name:
        return _dense_backward(*arguments[1:4])
    return 0


@dataclass(frozen=True)
class _Attention:
    """Sizes of one call of ``nsa::attention``; T queries and as many keys."""

    config: NSAConfig
    tokens: int
    num_sequences: int
    len_q: int
    len_k: int
    element: int
    packed: bool
    algorithm: str

    @classmethod
    def read(cls, arguments: Sequence[Any]) -> _Attention:
        q: Tensor = arguments[0]
        cu_q, _, _, num_sequences, len_q, len_k, text, _, algorithm = arguments[-_NUM_WHERE:]
        lengths = (int(num_sequences), int(len_q), int(len_k))
        return cls(NSAConfig.from_text(text), q.shape[0], *lengths, q.element_size(), cu_q is not None, algorithm)

    @property
    def entries(self) -> int:
        """(query, head, slot) triples of the choice."""
        return self.tokens * self.config.num_kv_heads * self.config.num_selected_blocks

    @property
    def tiled(self) -> bool:
        pattern = self.config
        lengths = (self.len_q, self.len_k, pattern.block_size)
        return always_tiled(self.algorithm, pattern.group_size, pattern.num_selected_blocks, *lengths)

    def queries(self, size: int) -> int:
        """Bytes of one number a query head and element of a head of ``size``, in the precision of the inputs."""
        return self.tokens * self.config.num_heads * size * self.element

    def keys(self) -> int:
        """Bytes of the gradients of one branch's keys and values."""
        return self.tokens * self.config.num_kv_heads * (self.config.head_dim + self.config.value_dim) * self.element

    def statistics(self) -> int:
        """Bytes of one fp32 number a query head."""
        return 4 * self.tokens * self.config.num_heads

    def forward(self) -> int:
        """The selected branch, when the window's output and the gated sum are still to come."""
        pattern = self.config
        if "slc" not in pattern.branches:
            return 0
        needed = 8 * self.entries  # lists by tile
        if not self.tiled:
            rows = -(-self.tokens // self.segments(pattern.value_dim))
            needed += 2 * self.key_bytes(pattern.value_dim)  # of all entries, and of those that are not near
            needed += rows * pattern.num_heads * self.slots * (pattern.value_dim * self.element + 4)
        later = self.queries(pattern.value_dim)
        if "win" in pattern.branches:
            later += self.queries(pattern.value_dim) + self.statistics()
        return max(0, needed - later)

    def backward(self) -> int:
        """The branch that needs most when its keys' turn comes; gradients of the keys of later ones are still to come."""
        branches, most = self.config.branches, 0
        left = {"slc": self.keys(), "cmp": self.keys() // self.config.compress_stride, "win": self.keys()}
        ranges = 2 * self.statistics() * sum(branch != "slc" for branch in branches)  # kept to the end
        for branch in [name for name in tuple(left) if name in branches]:
            del left[branch]
            later = sum(size for name, size in left.items() if name in branches)
            needed = ranges - later
            if branch == "slc":
                needed += 2 * self.statistics() + self.selected_backward()
            else:
                needed += self.range_backward(branch == "win")
            most = max(most, needed)
        return most

    def selected_backward(self) -> int:
        """Lists, index and chunks' sums; where choices may scatter, rows of slots for dQ."""
        from nsa.ops.selected.launch import BACKWARD_CHUNK, DQ_CHUNK, LONG, chunk_size

        pattern = self.config
        needed = 8 * self.entries + self.key_bytes(pattern.head_dim) + (4 * self.entries if self.tiled else 0)
        needed_without_dq = self.sums(self.chunk_limit(1, chunk_size(self.entries)) * pattern.block_size)
        if self.tiled:
            return needed + needed_without_dq
        segments = self.segments(pattern.head_dim)
        rows = -(-self.tokens // segments)
        slots = rows * pattern.num_heads * self.slots * pattern.head_dim * self.element
        size = DQ_CHUNK if self.len_k <= LONG else BACKWARD_CHUNK
        partial = self.sums(self.chunk_limit(segments, size) * pattern.block_size)
        whole = self.sums(self.tokens * pattern.num_kv_heads) if segments > 1 else 0
        return needed + slots + whole + max(needed_without_dq, partial)  # both ways to dK and dV share the chunks' sums

    def range_backward(self, window: bool) -> int:
        """Sums of dK and dV over chunks of queries."""
        from nsa.ops._triton.range_launch import chunks_of

        pattern = self.config
        stride, most = (1, min(self.len_q, pattern.window_size)) if window else (pattern.compress_stride, self.len_q)
        num_keys = self.tokens // stride
        programs = max(1, num_keys // TILE_KEYS) * pattern.num_kv_heads
        chunks, _ = chunks_of(self.len_q, most, window, programs, TILE_ROWS)
        return self.sums(chunks * num_keys * pattern.num_kv_heads) if chunks > 1 else 0

    @property
    def slots(self) -> int:
        """Rows of slots of a query head."""
        return self.config.num_selected_blocks * max(1, self.config.block_size // TILE_KEYS)

    def segments(self, size: int) -> int:
        """As ``Call.num_segments`` has them."""
        from nsa.ops.selected.launch import HELD_SLOTS, SMALL

        row = self.config.num_heads * size * self.element
        return max(1, min(self.tokens, -(-self.slots // HELD_SLOTS), -(-self.tokens * self.slots * row // SMALL)))

    @property
    def num_blocks(self) -> int:
        size = self.config.block_size
        if self.packed:
            return self.tokens // size + self.num_sequences
        return self.num_sequences * -(-self.len_k // size)

    def key_bytes(self, size: int) -> int:
        """Keys of the inverse index."""
        segments = 1 if self.tiled else self.segments(size)
        short = self.config.num_kv_heads * self.num_blocks * segments < 2**15 - 1
        return self.entries * (2 if short else 4)

    def chunk_limit(self, segments: int, size: int) -> int:
        """Chunks of any segment, at most."""
        return self.entries // segments // size + self.config.num_kv_heads * self.num_blocks

    def sums(self, rows: int) -> int:
        """Bytes of so many rows of fp32 dK and dV."""
        return 4 * rows * (self.config.head_dim + self.config.value_dim)


def _dense_backward(q: Tensor, k: Tensor, v: Tensor) -> int:
    """dQ is summed in fp32, and each query head gets a dK and dV of its own before those of a group are added.

    So it is in cuDNN and FlashAttention; heads are the second dimension of a batch and of packed tokens.
    """
    expanded = q.shape[:-1].numel() * (q.shape[-1] + v.shape[-1]) * q.element_size() if k.shape[1] < q.shape[1] else 0
    return 4 * q.numel() + expanded
