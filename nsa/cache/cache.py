"""Decode caches of a model and of its layers: memory, lengths, steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.attention import AttentionInputs
from nsa.cache.chunk import Chunk, Step, new_tokens
from nsa.cache.pages import Pages
from nsa.config import NSAConfig
from nsa.errors import check
from nsa.ops._backend import choose_backend
from nsa.ops._checks import check_cu_seqlens_contents
from nsa.ops._packed import integers, lengths
from nsa.ops._sequences import Sequences
from nsa.ops.decode import MOST_QUERIES, CacheTensors
from nsa.rope import Rope


class OnDevice(NamedTuple):
    """State of a cache that kernels read, on one of the devices of its layers.

    Attributes:
        lengths: cached tokens of each sequence, int32 ``[B]``, without the current step.
        tables: selection blocks of each sequence in the pages, int32 ``[B, max blocks]``, by their
            size.
    """

    lengths: Tensor
    tables: dict[int, Tensor]


class NSACache:
    """Decode cache of a model: one :class:`LayerCache` per layer, and their common lengths.

    All layers must process the new tokens of a step, in any order, before the next step.

    Args:
        config: the sparse pattern, or one of each layer.
        num_layers: layers of the model.
        batch_size: sequences decoded together; their lengths may differ.
        max_tokens: maximum length of a sequence, tokens.
        num_pages: pages of ``block_size`` tokens, the largest of the layers, shared by all
            sequences; None means enough for ``max_tokens`` of each.

    Attributes:
        rollback: tokens by which :meth:`truncate` can shorten a sequence, 8 or more. It may be
            changed before the first tokens. The rings of each sequence have as many extra rows.

    Raises:
        ValueError: a number is not positive.
    """

    def __init__(
        self,
        config: NSAConfig | Sequence[NSAConfig],
        num_layers: int,
        batch_size: int = 1,
        *,
        max_tokens: int,
        num_pages: int | None = None,
    ) -> None:
        check(num_layers > 0, "num_layers", "be positive", num_layers)
        if isinstance(config, NSAConfig):
            config = [config.for_layer(layer) for layer in range(num_layers)]
        rule = f"have a pattern for each of {num_layers} layers"
        check(len(config) == num_layers, "config", rule, len(config))
        page_size = max(pattern.block_size for pattern in config)
        self._pages_each = -(-max_tokens // page_size)
        num_pages = batch_size * self._pages_each if num_pages is None else num_pages
        sizes = {"batch_size": batch_size, "max_tokens": max_tokens, "num_pages": num_pages}
        for name, size in sizes.items():
            check(size > 0, name, "be positive", size)
        self.batch_size, self.max_tokens = batch_size, max_tokens
        self.rollback = MOST_QUERIES
        self._pages = Pages(num_pages, page_size, batch_size)
        self._lengths = [0] * batch_size
        # Largest length written to the rings, where later tokens overwrite earlier ones.
        self._written = [0] * batch_size
        self._step: Step | None = None
        self._on_devices: dict[torch.device, OnDevice] = {}
        self.layers = [LayerCache(pattern, self, n) for n, pattern in enumerate(config)]

    @property
    def lengths(self) -> list[int]:
        """Number of cached tokens of each sequence."""
        return list(self._lengths)

    def ring_rows(self, size: int) -> int:
        """Rows of a ring from which the next tokens read the last ``size`` tokens."""
        # A ring of max_tokens rows is never overwritten.
        return size + (MOST_QUERIES if size >= self.max_tokens else self.rollback)

    @property
    def num_free_pages(self) -> int:
        """Number of pages that no sequence uses."""
        return self._pages.num_free

    def reserve(self, counts: Sequence[int]) -> None:
        """Reserve pages for ``counts[b]`` more tokens of each sequence b.

        Steps call this themselves. Call it before replaying a CUDA graph of a step.

        Raises:
            ValueError: the cache is full, or a step that raised has overwritten cached tokens that
                a sequence needs. The cache is unchanged.
        """
        for b, (length, count) in enumerate(zip(self._lengths, counts, strict=True)):
            rule = f"be at least {length + count} for the new tokens of sequence {b}"
            check(length + count <= self.max_tokens, "max_tokens", rule, self.max_tokens)
            has_past = length == 0 or length >= self._written[b] - self.rollback
            rule = "hold what its next tokens need, which a step that raised has overwritten"
            hint = f"Call truncate({b}, 0) and give it all of its tokens again."
            check(has_past, f"sequence {b}", rule, f"{length} tokens", hint)
        copies = self._pages.prepare(self._lengths, counts)
        for layer in self.layers:
            layer.copy_pages(copies)
        self._write_table()

    def advance(self, counts: Sequence[int]) -> None:
        """Add the tokens that a replayed CUDA graph of a step appended to the lengths."""
        self._step = None
        self._lengths = [n + count for n, count in zip(self._lengths, counts, strict=True)]
        self._written = [max(pair) for pair in zip(self._written, self._lengths, strict=True)]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager: capture a step in a CUDA graph, without counting its tokens."""
        before = self._lengths, self._written
        try:
            yield
        finally:
            self._lengths, self._written = before
            self._step = None

    def truncate(self, sequence: int, length: int) -> None:
        """Truncate a sequence to its first ``length`` tokens and free the other pages.

        This also discards a step that raised. A step with at most 8 tokens of each sequence can be
        repeated after ``truncate(b, lengths[b])``. Longer chunks overwrite tokens that a repetition
        needs: truncate every sequence that had new tokens to 0.

        Args:
            sequence: index of the sequence.
            length: 0, or at most ``rollback`` below the largest length so far, the limit of the
                rings.

        Raises:
            ValueError: the length is out of range.
        """
        self._check_sequence("sequence", sequence)
        have, least = self._lengths[sequence], self.least_length(sequence)
        rule = f"be 0 or from {least} to {have}" if least <= have else "be 0"
        check(length == 0 or least <= length <= have, "length", rule, length)
        self._pages.truncate(sequence, length)
        self._set_length(sequence, length, length if length == 0 else self._written[sequence])

    def least_length(self, sequence: int) -> int:
        """Smallest length, other than 0, to which :meth:`truncate` can shorten a sequence."""
        return max(self._written[sequence] - self.rollback, 0)

    def free(self, sequence: int) -> None:
        """Remove all tokens of a sequence, so that its row can be used again."""
        self.truncate(sequence, 0)

    def fork(self, source: int, target: int) -> None:
        """Copy a sequence into an empty one; whole pages are shared, not copied.

        Raises:
            ValueError: there is no such sequence, or ``target`` is not empty.
        """
        self._check_sequence("source", source)
        self._check_sequence("target", target)
        check(self._lengths[target] == 0, "target", "be empty", self._lengths[target])
        self._pages.fork(source, target, self._lengths[source])
        for layer in self.layers:
            layer.copy_rings(source, target)
        self._set_length(target, self._lengths[source], self._written[source])

    def reorder(self, indices: Sequence[int]) -> None:
        """Replace each sequence b by a copy of ``indices[b]``; whole pages are shared.

        Beam search calls this after each step.

        Args:
            indices: index of the source of each sequence; duplicates are allowed.

        Raises:
            ValueError: the number of indices is not the batch size, or an index is out of range.
        """
        count = self.batch_size
        check(len(indices) == count, "indices", f"be {count} numbers", len(indices))
        for source in indices:
            self._check_sequence("indices", source)
        if list(indices) == list(range(count)):
            return
        self._pages.reorder(indices, self._lengths)
        for layer in self.layers:
            layer.reorder_rings(indices)
        self._step = None
        self._lengths = [self._lengths[source] for source in indices]
        self._written = [self._written[source] for source in indices]
        self._write_table()
        self._write_lengths(self._lengths)

    def begin(self, layer: int, sequences: Sequences, num_tokens: int) -> Step:
        """Begin a step of ``num_tokens`` new tokens, or return the current one for its next layer.

        Raises:
            ValueError: the tokens do not fit the cache, or the layer already received them. The
                cache is unchanged.
        """
        step = self._step
        if step is None or (not step.taken and step.sequences is not sequences):
            counts = self._counts(sequences, num_tokens)
            self.on_device(sequences.device)
            self.reserve(counts)
            step = self._step = Step(sequences, self.lengths, counts, set())
        elif step.sequences is not sequences:
            counts = self._counts(sequences, num_tokens)
            rule = f"be {step.counts} for the sequences, as in the other layers"
            check(counts == step.counts, "new tokens", rule, counts)
        rule = "receive the tokens of a step once"
        hint = "Call each layer once a step. After a step that raised, truncate(b, lengths[b])."
        check(layer not in step.taken, f"layers[{layer}]", rule, "them again", hint)
        return step

    def writes(self, step: Step) -> None:
        """Record that the step's tokens are being written to rings, even if the step fails."""
        self._written = [max(pair) for pair in zip(self._written, step.after, strict=True)]

    def finish(self, layer: int) -> None:
        """Record that a layer has finished the step; the last layer ends it."""
        step = self._step
        assert step is not None
        step.taken.add(layer)
        if len(step.taken) < len(self.layers):
            return
        if len({*step.counts}) == 1:
            for state in self._on_devices.values():
                state.lengths.add_(step.counts[0])
        else:
            self._write_lengths(step.after)
        self.advance(step.counts)

    def on_device(self, device: torch.device) -> OnDevice:
        """Lengths and page table on a device of the layers."""
        if device not in self._on_devices:
            with torch.inference_mode(False):
                other = next(iter(self._on_devices.values()), None)
                if other is not None:
                    tables = {size: table.to(device) for size, table in other.tables.items()}
                    state = OnDevice(other.lengths.to(device), tables)
                else:
                    lengths = torch.zeros(self.batch_size, dtype=torch.int32, device=device)
                    tokens = self._pages_each * self.page_size
                    sizes = {layer.config.block_size for layer in self.layers}
                    tables = {n: lengths.new_zeros(self.batch_size, tokens // n) for n in sizes}
                    state = OnDevice(lengths, tables)
            self._on_devices[device] = state
        return self._on_devices[device]

    @property
    def device_lengths(self) -> Tensor:
        """:attr:`lengths` on the first layer's device, int32 ``[B]``, without the current step."""
        return next(iter(self._on_devices.values())).lengths

    @property
    def num_pages(self) -> int:
        """Number of pages, shared by all sequences."""
        return len(self._pages.uses)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self._pages.page_size

    def _counts(self, sequences: Sequences, num_tokens: int) -> list[int]:
        batch = sequences.num_sequences
        rule = f"describe {self.batch_size} sequences"
        check(batch == self.batch_size, "cu_seqlens", rule, batch)
        if sequences.offsets is None:
            return [sequences.len_q] * batch
        check_cu_seqlens_contents("cu_seqlens", sequences.offsets[0], num_tokens)
        return lengths(sequences.offsets[0]).tolist()

    def _write_table(self) -> None:
        """Write the changed entries of the page tables; entries of freed pages are never read."""
        changed = self._pages.changed
        if not changed or not self._on_devices:
            return
        for device, (_, tables) in self._on_devices.items():
            for size, table in tables.items():
                parts, width = self.page_size // size, table.shape[1]
                entries = [
                    (b * width + place * parts + part, page * parts + part)
                    for (b, place), page in changed.items()
                    for part in range(parts)
                ]
                index, blocks = integers(chain(*zip(*entries, strict=True)), device).view(2, -1)
                table.view(-1)[index] = blocks.int()
        changed.clear()

    def _write_lengths(self, values: Sequence[int]) -> None:
        for device, state in self._on_devices.items():
            state.lengths.copy_(integers(values, device, torch.int32))

    def _set_length(self, sequence: int, length: int, written: int) -> None:
        self._step = None  # discards a step that raised
        self._lengths[sequence], self._written[sequence] = length, written
        self._write_table()
        for state in self._on_devices.values():
            state.lengths[sequence].fill_(length)  # fill_: assignment synchronises

    def _check_sequence(self, argument: str, sequence: int) -> None:
        rule = f"be from 0 to {self.batch_size - 1}"
        check(0 <= sequence < self.batch_size, argument, rule, sequence)


class LayerCache:
    """Decode cache of one attention layer, made by :class:`NSACache`.

    Args:
        config: the sparse pattern of the layer.
        cache: cache of the model.
        layer: index of the layer.

    Attributes:
        tensors: the layer's memory, reserved at its first tokens.
        block_indices: block indices of the last tokens, None if no blocks were selected.
        has_kernels: whether decode kernels score the blocks. Steps with scores in two stages or
            random ones run the training operators, which cannot be captured in a CUDA graph.
        reads: counter of keys read, or None, see ``nsa.ops.decode.launch.attend``.
    """

    def __init__(self, config: NSAConfig, cache: NSACache, layer: int) -> None:
        self.config, self._cache, self._layer = config, cache, layer
        self.tensors: CacheTensors | None = None
        self.block_indices: Tensor | None = None
        self.reads: Tensor | None = None
        self.has_kernels = config.coarse_block_size is None and config.scores != "random"

    def lengths(self, sequences: Sequences, num_tokens: int) -> Tensor:
        """Cached tokens of each sequence before ``num_tokens`` new ones, int32 ``[B]``.

        Raises:
            ValueError: the tokens do not fit the cache, which is unchanged.
        """
        self._cache.begin(self._layer, sequences, num_tokens)
        return self._cache.on_device(sequences.device).lengths

    @torch.no_grad()
    def attend(
        self,
        inputs: AttentionInputs,
        *,
        rope: Rope,
        sequences: Sequences,
        alone: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """Append new tokens, without gradients, and return their attention output ``[T, Hq, Dv]``.

        Used for prefill, chunks of a prompt and decode steps. On a GPU, steps with the same number
        of new tokens for each sequence, at most 8, run the decode kernels, which split the keys
        among programs and have the same launch grid for all lengths.

        Args:
            inputs: packed inputs, see ``native_sparse_attention``.
            rope: rotates the compressed keys.
            sequences: the sequences of the new tokens.
            alone: computes the output if no sequence has cached tokens; None means the library's
                operators.
        """
        backend = choose_backend("auto", inputs.q)
        step = self._cache.begin(self._layer, sequences, inputs.q.shape[0])
        tensors = self._tensors(inputs)
        is_short = sequences.offsets is None and 0 < sequences.len_q <= MOST_QUERIES
        if backend == "triton" and is_short and self.has_kernels:
            self._cache.writes(step)
            out = self._decode(inputs, rope, sequences.len_q, tensors)
        else:
            chunk = Chunk(self.config, tensors, step, sequences, backend)
            out, self.block_indices = chunk.attend(inputs, rope, alone)
            self._write_rings(chunk, step)
        self._cache.finish(self._layer)
        return out

    @torch.no_grad()
    def append(
        self, inputs: AttentionInputs | None, *, rope: Rope, sequences: Sequences, num_tokens: int
    ) -> None:
        """Append new tokens without computing attention.

        Args:
            inputs: see :meth:`attend`; None stores nothing: if all branches are windows, and at
                least a ring of later tokens follows, nobody reads these.
            rope: rotates the compressed keys.
            sequences: the sequences of the new tokens.
            num_tokens: number of the new tokens.
        """
        step = self._cache.begin(self._layer, sequences, num_tokens)
        if inputs is not None:
            backend = choose_backend("auto", inputs.q)
            chunk = Chunk(self.config, self._tensors(inputs), step, sequences, backend)
            chunk.write(inputs, rope)
            self._write_rings(chunk, step)
        self._cache.finish(self._layer)

    def _write_rings(self, chunk: Chunk, step: Step) -> None:
        self._cache.writes(step)
        chunk.write_rings()

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy pages, ``(from, to)`` each."""
        if copies and self.tensors is not None:
            sources, targets = zip(*copies, strict=True)
            for pool in self._of_kind("slc", "cmp", "idx"):
                pages = pool.unflatten(0, (self._cache.num_pages, -1))
                pages[list(targets)] = pages[list(sources)]

    def copy_rings(self, source: int, target: int) -> None:
        """Copy the rings of a sequence."""
        for ring in self._of_kind("win", "raw"):
            rings = ring.unflatten(0, (self._cache.batch_size, -1))
            rings[target] = rings[source]

    def reorder_rings(self, indices: Sequence[int]) -> None:
        """Replace the rings of each sequence b by a copy of those of ``indices[b]``."""
        for ring in self._of_kind("win", "raw"):
            rings = ring.unflatten(0, (self._cache.batch_size, -1))
            rings.copy_(rings[integers(indices, ring.device)])

    def _of_kind(self, *kinds: str) -> list[Tensor]:
        if self.tensors is None:
            return []
        names = [f"{x}_{kind}" for kind in kinds for x in "kv"]
        found = [getattr(self.tensors, name, None) for name in names]  # no values of an index
        return [x for x in found if x is not None]

    def _tensors(self, inputs: AttentionInputs) -> CacheTensors:
        """The layer's memory."""
        k = inputs.q
        if self.tensors is None:
            self.tensors = self._reserve(k)
        kept = next(x for x in self.tensors if x is not None)
        check(k.dtype == kept.dtype, "tokens", f"stay {kept.dtype}", k.dtype)
        check(k.device == kept.device, "tokens", f"be on {kept.device}", k.device)
        return self.tensors

    @torch.inference_mode(False)  # steps in and outside inference mode write to them
    def _reserve(self, k: Tensor) -> CacheTensors:
        """The layer's memory for heads like ``k``."""
        config, cache = self.config, self._cache
        tokens, has_cmp = cache.num_pages * cache.page_size, config.compresses_keys
        rows = {
            "slc": tokens * ("slc" in config.branches),
            "win": cache.batch_size
            * cache.ring_rows(config.window_size)
            * ("win" in config.branches),
            "raw": cache.batch_size * cache.ring_rows(config.compress_block_size) * has_cmp,
            "cmp": tokens // config.compress_stride * has_cmp,
        }
        stored = dict[str, Any]()
        for kind, number in rows.items():
            # Compressed keys that are only scored have no values.
            has_values = kind in ("slc", "win") or "cmp" in config.branches
            for x, size in (("k", config.head_dim), ("v", config.value_dim)):
                shape = (number, config.num_kv_heads, size)
                is_on = number > 0 and (x == "k" or has_values)
                stored[f"{x}_{kind}"] = k.new_zeros(shape) if is_on else None
        index = config.scoring
        shape = (tokens, index.num_kv_heads, index.head_dim)
        stored["k_idx"] = k.new_zeros(shape) if config.has_index else None
        # counters for the last-block reduction over programs that share a query
        most = cache.batch_size * config.num_heads * MOST_QUERIES
        counters = k.new_zeros(2, most, dtype=torch.int32)
        state = cache.on_device(k.device)
        table = state.tables[config.block_size]
        return CacheTensors(**stored, table=table, lengths=state.lengths, counters=counters)

    def _decode(
        self, inputs: AttentionInputs, rope: Rope, queries: int, tensors: CacheTensors
    ) -> Tensor:
        from nsa.ops.decode.launch import append, attend

        config = self.config
        append(new_tokens(inputs, tensors), tensors, inputs.phi, rope, config, queries)
        others = (inputs.q_cmp, inputs.q_idx, inputs.gates)
        q_cmp, q_idx, gates = (None if x is None else x.contiguous() for x in others)
        heads = (inputs.q.contiguous(), q_cmp, q_idx, gates)
        out, self.block_indices = attend(*heads, tensors, config, queries, self.reads)
        return out
