"""A decode step by kernels on one case, against fp64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from nsa import NSACache, Rope, Sequences
from nsa.attention import AttentionInputs
from nsa.cache import cache
from nsa.testing import PackedInputs, packed_offsets
from nsa.testing.sampled import Phi, Sample, check_sampled, sampled_selection, sampled_values
from tests.ops.public import Case, agree, every, named_tensors, parameters_of, phi_of

RAW = ("k_cmp_raw", "v_cmp_raw", "k_slc", "v_slc", "k_win", "v_win")


@dataclass
class Decoded:
    """A cache that contains all tokens of a case but its queries.

    Attributes:
        case: with as many queries for each sequence, up to 8, the last of its tokens.
        x: all tokens.
        cache: of one layer; its memory was NaN before.
    """

    case: Case
    x: PackedInputs
    cache: NSACache

    @classmethod
    def of(
        cls, case: Case, num_chunks: int = 1, steps: Sequence[int] = (), poisoned: int | None = None
    ) -> Decoded:
        """Fill a cache with the tokens before the queries.

        Args:
            case: the case.
            num_chunks: chunks of the first tokens.
            steps: tokens of each sequence in each decode step after them.
            poisoned: a sequence whose tokens are NaN.
        """
        most = -(-max(case.lengths_k) // 64) * 64
        whole = NSACache(case.config, 1, len(case.lengths_k), max_tokens=most)
        decoded, layer = cls(case, case.inputs(), whole), whole.layers[0]
        some = [min(n, 100) for n in case.lengths_k]
        decoded.take(decoded.rows([0] * len(some), some), some)
        assert layer.tensors is not None
        for pool in layer.tensors[:9]:
            if pool is not None:
                pool.fill_(torch.nan)
        for b in range(len(some)):
            whole.free(b)
        if poisoned is not None:
            start, end = decoded.x.cu_seqlens_k.tolist()[poisoned : poisoned + 2]
            for name in (*RAW, *["k_idx"] * case.config.has_index):
                getattr(decoded.x, name)[start:end] = torch.nan
        first = [n - sum(steps) for n in decoded.before]
        for i in range(num_chunks):
            begin, end = ([n * j // num_chunks for n in first] for j in (i, i + 1))
            counts = [b - a for a, b in zip(begin, end, strict=True)]
            if any(counts):
                decoded.take(decoded.rows(begin, counts), counts)
        for count in steps:
            counts = [count] * len(first)
            decoded.take(decoded.rows(first, counts), counts, is_step=True)
            first = [n + count for n in first]
        num_groups = len(first) * case.config.num_kv_heads
        layer.reads = torch.zeros(num_groups, 4, dtype=torch.int64, device=case.device)
        return decoded

    @property
    def count(self) -> int:
        """Queries of each sequence."""
        return self.case.queries[0]

    @property
    def before(self) -> list[int]:
        """Tokens of each sequence before the queries."""
        return [n - self.count for n in self.case.lengths_k]

    def rows(self, first: list[int], counts: list[int]) -> Tensor:
        """Packed rows of ``counts`` tokens of each sequence from ``first`` on."""
        starts = self.x.cu_seqlens_k.tolist()
        return torch.cat(
            [torch.arange(n) + a + s for a, n, s in zip(first, counts, starts[:-1], strict=True)]
        ).to(self.case.device)

    def take(
        self, rows: Tensor, counts: list[int], q: Tensor | None = None, *, is_step: bool = False
    ) -> Tensor:
        """Give the layer tokens, with random queries unless they are given.

        A step is one of decode kernels: all sequences have as many tokens. What other tokens attend
        to is not looked at, and takes the interpreter long.
        """
        case, config, x = self.case, self.case.config, self.x
        gates, q_cmp, q_idx = x.gates, self.q_cmp, x.q_idx
        if q is None:
            q = case.normal(len(rows), config.num_heads, config.head_dim, seed=8)
            gates = q.new_ones(len(rows), config.num_heads, 3)
            q_cmp = q if config.compress_rope == "none" else None
            sizes = config.scoring.num_heads, config.scoring.head_dim
            q_idx = case.normal(len(rows), *sizes, seed=9) if config.has_index else None
        k_idx = None if x.k_idx is None else x.k_idx[rows]
        phi = phi_of(parameters_of(case))
        heads = (getattr(x, name)[rows] for name in RAW)
        inputs = AttentionInputs._make((q, *heads, gates, phi, q_cmp, q_idx, k_idx))
        if is_step:
            sequences = Sequences(None, len(counts), counts[0], counts[0], q.device)
        else:
            offsets = packed_offsets(counts, q.device)
            sequences = Sequences.packed(offsets, max(counts), num_tokens=len(rows))
        backend = "triton" if is_step or case.device != "cpu" else "reference"
        with mock.patch.object(cache, "choose_backend", return_value=backend):
            return self.cache.layers[0].attend(
                inputs, rope=Rope.from_config(config), sequences=sequences
            )

    @property
    def q_cmp(self) -> Tensor | None:
        """Queries of the compressed branch, where they are others."""
        if self.case.config.compress_rope != "none":
            return None
        return self.case.normal(*self.x.q.shape, seed=9)

    def step(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """The queries' outputs, selected blocks and keys read."""
        layer, counts = self.cache.layers[0], [self.count] * len(self.before)
        assert layer.reads is not None
        layer.reads.zero_()
        out = self.take(self.rows(self.before, counts), counts, self.x.q, is_step=True)
        assert layer.tensors is not None
        assert not bool(layer.tensors.counters.any())
        return out, layer.block_indices, layer.reads.clone()

    def take_back(self) -> None:
        """Forget the queries' tokens."""
        for b, n in enumerate(self.before):
            self.cache.truncate(b, n)

    def check(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """A step against fp64, its selection by the compressed keys as stored; its reads.

        Returns the step.
        """
        case, config, x = self.case, self.case.config, self.x
        out, ids, reads = found = self.step()
        phi_k, phi_v = phi_of(parameters_of(case)) or (None, None)
        phi = Phi(phi_k, phi_v, Rope.from_config(config))
        by_token, inputs = config.scores != "compressed", named_tensors(x)
        scored, stored = x.q, x.k_slc
        if x.q_idx is not None and x.k_idx is not None:
            scored, stored = x.q_idx, x.k_idx
        if self.q_cmp is not None:
            inputs["q_cmp"] = self.q_cmp
            scored = scored if by_token else self.q_cmp
        sample = Sample(every(x.q), every(x.q)[:0], x.cu_seqlens_q, x.cu_seqlens_k)

        def values(name: str, given: dict[str, Tensor], rows: Sample) -> Any:
            return partial(sampled_values, name, given, rows, config, phi=phi)

        more = case.dtype, "decode", case.factor
        if config.compresses_keys:
            k_cmp = self.compressed_keys()
            of_blocks = sample._replace(queries=every(k_cmp))
            check_sampled(values("compress", {"x": x.k_cmp_raw}, of_blocks), {"y": k_cmp}, *more)
            stored = stored if by_token else k_cmp
        assert (ids is None) == ("slc" not in config.branches)
        if ids is not None:
            inputs["block_indices"] = ids
            agree(sampled_selection(scored, stored, sample, config).agreement(ids))
        check_sampled(values("attention", inputs, sample), {"out": out}, *more)
        assert reads.tolist() == self.expected_reads(ids).tolist()
        return found

    def compressed_keys(self) -> Tensor:
        """Compressed keys in the cache, packed."""
        config, tensors = self.case.config, self.cache.layers[0].tensors
        assert tensors is not None
        assert tensors.k_cmp is not None
        size, stride = config.compress_block_size, config.compress_stride
        parts = []
        for b, length in enumerate(self.case.lengths_k):
            row = torch.arange(max(length - size + stride, 0) // stride, device=self.case.device)
            row, per_page = row + size // stride - 1, config.block_size // stride
            page = tensors.table[b].long()[row // per_page]
            parts.append(tensors.k_cmp[page * per_page + row % per_page])
        return torch.cat(parts)

    def expected_reads(self, ids: Tensor | None) -> Tensor:
        """num_cmp(t), tokens of the selected blocks, min(w, t + 1), scored ones, ``[B * Hkv, 4]``.

        Of several queries all but the second count once.
        """
        config, count = self.case.config, self.count
        size, stride, block = config.compress_block_size, config.compress_stride, config.block_size
        found = []
        for b, before in enumerate(self.before):
            for h in range(config.num_kv_heads):
                selected = [
                    min(block, before + i + 1 - j * block)
                    for i in range(0 if ids is None else count)
                    for j in ids[b * count + i, h].tolist()  # type: ignore[index]
                    if j >= 0
                ]
                num_cmp = max(before + count - size + stride, 0) // stride * config.compresses_keys
                window = (min(before, config.window_size - 1) + count) * ("win" in config.branches)
                by_token = ids is not None and config.scoring.scores == "token_max"
                scored = (before + count) * (by_token and h < config.scoring.num_kv_heads)
                found.append([num_cmp, sum(selected), window, scored])
        return torch.tensor(found)
