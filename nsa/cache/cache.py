"""The cache of a model and of its layers: memory, lengths, steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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

_NAME = "NSACache"


class OnDevice(NamedTuple):
    """State of a cache that kernels read, on one of the devices of its layers.

    Attributes:
        lengths: tokens cached of each sequence, int32 ``[B]``, without a step under way.
        table: pages of every sequence, int32 ``[B, most pages]``.
    """

    lengths: Tensor
    table: Tensor


class NSACache:
    """Decode cache of a model: one :class:`LayerCache` a layer, and the lengths that they share.

    A model takes new tokens through all of its layers, in any order, before it gets the next ones.

    Args:
        config: the sparse pattern.
        num_layers: layers of the model.
        batch_size: sequences decoded together; their lengths may differ.
        max_tokens: tokens that a sequence may come to have.
        num_pages: pages of ``config.block_size`` tokens for all sequences together; None: enough
            for ``max_tokens`` of each.

    Raises:
        ValueError: a number is not positive.
    """

    def __init__(
        self,
        config: NSAConfig,
        num_layers: int,
        batch_size: int = 1,
        *,
        max_tokens: int,
        num_pages: int | None = None,
    ) -> None:
        pages_each = -(-max_tokens // config.block_size)
        num_pages = batch_size * pages_each if num_pages is None else num_pages
        sizes = {"num_layers": num_layers, "batch_size": batch_size}
        for name, size in {**sizes, "max_tokens": max_tokens, "num_pages": num_pages}.items():
            check(size > 0, _NAME, name, "be positive", size)
        self.config, self.batch_size, self.max_tokens = config, batch_size, max_tokens
        self._pages = Pages(num_pages, config.block_size, batch_size)
        self._lengths = [0] * batch_size
        # The most tokens whose traces the rings hold: a ring forgets what they have overwritten.
        self._written = [0] * batch_size
        self._step: Step | None = None
        self._on_devices: dict[torch.device, OnDevice] = {}
        self.layers = [
            LayerCache(config.for_layer(layer), self, layer) for layer in range(num_layers)
        ]

    @property
    def lengths(self) -> list[int]:
        """Tokens cached of each sequence."""
        return list(self._lengths)

    @property
    def num_free_pages(self) -> int:
        """Pages that no sequence holds."""
        return self._pages.num_free

    def reserve(self, counts: Sequence[int]) -> None:
        """Make sure that ``counts[b]`` more tokens of each sequence b have a place.

        Steps do so themselves. A replayed CUDA graph of a step cannot: call it before.

        Raises:
            ValueError: the cache is full, or a step that raised has left a sequence without the
                past that it needs; nothing has changed then.
        """
        for b, (length, count) in enumerate(zip(self._lengths, counts, strict=True)):
            rule = f"be at least {length + count} for the new tokens of sequence {b}"
            check(length + count <= self.max_tokens, _NAME, "max_tokens", rule, self.max_tokens)
            has_past = length == 0 or length >= self._written[b] - MOST_QUERIES
            rule = "hold what its next tokens need, which a step that raised has overwritten"
            hint = f"Call truncate({b}, 0) and give it all of its tokens again."
            check(has_past, _NAME, f"sequence {b}", rule, f"{length} tokens", hint)
        copies = self._pages.prepare(self._lengths, counts)
        for layer in self.layers:
            layer.copy_pages(copies)
        self._write_table()

    def advance(self, counts: Sequence[int]) -> None:
        """Count tokens that a replayed CUDA graph of a step has taken in."""
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
        """Forget the tokens of a sequence behind its first ``length``, and give back their pages.

        A step that raised is dropped, too. With at most 8 tokens of each sequence it can be
        repeated after ``truncate(b, lengths[b])``. Longer chunks overwrite what their repetition
        needs: every sequence that had tokens must then be truncated to 0.

        Args:
            sequence: its number.
            length: 0, or within 8 of the most tokens that it had: the rings hold no more.

        Raises:
            ValueError: the length is out of reach.
        """
        self._check_sequence("truncate", "sequence", sequence)
        have, most = self._lengths[sequence], self._written[sequence]
        least = max(most - MOST_QUERIES, 0)
        rule = f"be 0 or from {least} to {have}" if least <= have else "be 0"
        check(length == 0 or least <= length <= have, "truncate", "length", rule, length)
        self._pages.truncate(sequence, length)
        self._set_length(sequence, length, length if length == 0 else most)

    def free(self, sequence: int) -> None:
        """Forget a sequence; another may take its place."""
        self.truncate(sequence, 0)

    def fork(self, source: int, target: int) -> None:
        """Copy a sequence into an empty one; whole pages are shared, not copied.

        Raises:
            ValueError: there is no such sequence, or ``target`` holds tokens.
        """
        self._check_sequence("fork", "source", source)
        self._check_sequence("fork", "target", target)
        check(self._lengths[target] == 0, "fork", "target", "be empty", self._lengths[target])
        self._pages.fork(source, target, self._lengths[source])
        for layer in self.layers:
            layer.copy_rings(source, target)
        self._set_length(target, self._lengths[source], self._written[source])

    def reorder(self, indices: Sequence[int]) -> None:
        """Replace every sequence b by a copy of ``indices[b]``; whole pages are shared.

        Beam search does so after each step, in which some continuations win over others.

        Args:
            indices: number of a sequence for each sequence; several may have the same.

        Raises:
            ValueError: they are not as many as the sequences, or one of them is not there.
        """
        count = self.batch_size
        check(len(indices) == count, "reorder", "indices", f"be {count} numbers", len(indices))
        for source in indices:
            self._check_sequence("reorder", "indices", source)
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
        """The step that ``num_tokens`` new tokens make, for the next layer that takes them in.

        Raises:
            ValueError: they do not fit the cache, or the layer had them; nothing has changed then.
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
            check(counts == step.counts, _NAME, "new tokens", rule, counts)
        rule = "receive the tokens of a step once"
        hint = "Call each layer once a step. After a step that raised, truncate(b, lengths[b])."
        check(layer not in step.taken, _NAME, f"layers[{layer}]", rule, "them again", hint)
        return step

    def writes(self, step: Step) -> None:
        """The rings of a layer get the step's tokens, whether it ends well or not."""
        self._written = [max(pair) for pair in zip(self._written, step.after, strict=True)]

    def finish(self, layer: int) -> None:
        """A layer has taken in the tokens of the step; the last one ends it."""
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
        """Lengths and pages on a device that layers of the cache are on."""
        if device not in self._on_devices:
            shape = (self.batch_size, -(-self.max_tokens // self.config.block_size))
            with torch.inference_mode(False):
                other = next(iter(self._on_devices.values()), None)
                if other is not None:
                    state = OnDevice(other.lengths.to(device), other.table.to(device))
                else:
                    lengths = torch.zeros(self.batch_size, dtype=torch.int32, device=device)
                    state = OnDevice(lengths, lengths.new_zeros(shape))
            self._on_devices[device] = state
        return self._on_devices[device]

    @property
    def device_lengths(self) -> Tensor:
        """:attr:`lengths` on the first layer's device, int32 ``[B]``, without a step under way."""
        return next(iter(self._on_devices.values())).lengths

    @property
    def num_pages(self) -> int:
        """Pages of all sequences together."""
        return len(self._pages.uses)

    def _counts(self, sequences: Sequences, num_tokens: int) -> list[int]:
        batch = sequences.num_sequences
        rule = f"describe {self.batch_size} sequences"
        check(batch == self.batch_size, _NAME, "cu_seqlens", rule, batch)
        if sequences.offsets is None:
            return [sequences.len_q] * batch
        check_cu_seqlens_contents(_NAME, "cu_seqlens", sequences.offsets[0], num_tokens)
        return lengths(sequences.offsets[0]).tolist()

    def _write_table(self) -> None:
        """Bring the tables up to date; what no sequence holds any more stays, and is not read."""
        changed = self._pages.changed
        if not changed or not self._on_devices:
            return
        for device, (_, table) in self._on_devices.items():
            width = table.shape[1]
            entries = [*(b * width + place for b, place in changed), *changed.values()]
            index, pages = integers(entries, device).view(2, -1)
            table.view(-1)[index] = pages.int()
        changed.clear()

    def _write_lengths(self, values: Sequence[int]) -> None:
        for device, state in self._on_devices.items():
            state.lengths.copy_(integers(values, device, torch.int32))

    def _set_length(self, sequence: int, length: int, written: int) -> None:
        self._step = None  # one that an error has ended half-way is forgotten
        self._lengths[sequence], self._written[sequence] = length, written
        self._write_table()
        for state in self._on_devices.values():
            state.lengths[sequence].fill_(length)  # an assignment waits for the device

    def _check_sequence(self, function: str, argument: str, sequence: int) -> None:
        rule = f"be from 0 to {self.batch_size - 1}"
        check(0 <= sequence < self.batch_size, function, argument, rule, sequence)


class LayerCache:
    """Decode cache of one attention layer, made by :class:`NSACache`.

    Args:
        config: the sparse pattern of the layer.
        cache: the whole.
        layer: number of the layer.

    Attributes:
        tensors: the layer's memory, reserved when its first tokens come.
        block_indices: of the last tokens, where decode kernels or the branches selected blocks.
        is_exact: whether blocks are scored exactly. Approximate scores are those of the operators
            of training, which then run steps too: no CUDA graph can hold these.
        reads: see ``nsa.ops.decode.launch.attend``; keys are counted where it is a tensor.
    """

    def __init__(self, config: NSAConfig, cache: NSACache, layer: int) -> None:
        self.config, self._cache, self._layer = config, cache, layer
        self.tensors: CacheTensors | None = None
        self.block_indices: Tensor | None = None
        self.reads: Tensor | None = None
        self.is_exact = config.coarse_block_size is None and config.score_precision == "exact"

    def lengths(self, sequences: Sequences, num_tokens: int) -> Tensor:
        """Tokens cached of each sequence before ``num_tokens`` new ones, int32 ``[B]``.

        Raises:
            ValueError: the tokens do not fit the cache; nothing has changed then.
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
        """Take in new tokens, without gradients, and return their attention output ``[T, Hq, Dv]``.

        Inputs as of ``native_sparse_attention``. One call serves prefill, chunks of a prompt and
        steps. On a GPU, up to 8 new tokens for every sequence of a batch of equal lengths go
        through decode kernels, which split the keys among programs and launch the same way
        whatever the lengths are.

        Args:
            inputs: packed.
            rope: rotates the compressed keys.
            sequences: where the new tokens lie.
            alone: gives the output of tokens without a past, instead of this project's operators.
        """
        backend = choose_backend(_NAME, "auto", inputs.q)
        step = self._cache.begin(self._layer, sequences, inputs.q.shape[0])
        tensors = self._tensors(inputs)
        is_short = sequences.offsets is None and 0 < sequences.len_q <= MOST_QUERIES
        if backend == "triton" and is_short and self.is_exact:
            self._cache.writes(step)
            out = self._decode(inputs, rope, sequences.len_q, tensors)
        else:
            chunk = Chunk(self.config, tensors, step, sequences, backend)
            out, self.block_indices = chunk.attend(inputs, rope, alone)
            self._cache.writes(step)
            chunk.write_rings()
        self._cache.finish(self._layer)
        return out

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy pages, ``(from, to)`` each."""
        if copies and self.tensors is not None:
            sources, targets = zip(*copies, strict=True)
            for pool in self._of_kind("slc", "cmp"):
                pages = pool.unflatten(0, (self._cache.num_pages, -1))
                pages[list(targets)] = pages[list(sources)]

    def copy_rings(self, source: int, target: int) -> None:
        """Copy the rings of a sequence."""
        for ring in self._of_kind("win", "raw"):
            rings = ring.unflatten(0, (self._cache.batch_size, -1))
            rings[target] = rings[source]

    def reorder_rings(self, indices: Sequence[int]) -> None:
        """Put a copy of the rings of ``indices[b]`` in the place of those of each sequence b."""
        for ring in self._of_kind("win", "raw"):
            rings = ring.unflatten(0, (self._cache.batch_size, -1))
            rings.copy_(rings[integers(indices, ring.device)])

    def _of_kind(self, *kinds: str) -> list[Tensor]:
        if self.tensors is None:
            return []
        names = [f"{x}_{kind}" for kind in kinds for x in "kv"]
        found = [getattr(self.tensors, name) for name in names]
        return [x for x in found if x is not None]

    def _tensors(self, inputs: AttentionInputs) -> CacheTensors:
        """The layer's memory."""
        k = inputs.q
        if self.tensors is None:
            self.tensors = self._reserve(k)
        kept = next(x for x in self.tensors if x is not None)
        check(k.dtype == kept.dtype, _NAME, "tokens", f"stay {kept.dtype}", k.dtype)
        check(k.device == kept.device, _NAME, "tokens", f"be on {kept.device}", k.device)
        return self.tensors

    @torch.inference_mode(False)  # for steps within and outside of it, which write to the tensors
    def _reserve(self, k: Tensor) -> CacheTensors:
        """The layer's memory for heads like ``k``."""
        config, cache = self.config, self._cache
        tokens = cache.num_pages * config.block_size
        rows = {
            "slc": tokens if "slc" in config.branches else 0,
            "win": cache.batch_size * (config.window_size + MOST_QUERIES),
            "raw": cache.batch_size * (config.compress_block_size + MOST_QUERIES),
            "cmp": tokens // config.compress_stride,
        }
        has_values = {"slc": True, "win": True}
        has_values |= dict.fromkeys(("raw", "cmp"), "cmp" in config.branches)
        on = {kind: kind in config.branches for kind in ("slc", "win")}
        on |= dict.fromkeys(("raw", "cmp"), config.scores_blocks)

        def new(kind: str, size: int, is_on: bool) -> Tensor | None:
            return k.new_zeros(rows[kind], config.num_kv_heads, size) if is_on else None

        held = dict[str, Any]()
        for kind in rows:
            held[f"k_{kind}"] = new(kind, config.head_dim, on[kind])
            held[f"v_{kind}"] = new(kind, config.value_dim, on[kind] and has_values[kind])
        # the programs of a step that share a query are counted; a group has up to 64 heads
        most = cache.batch_size * config.num_heads * MOST_QUERIES
        counters = k.new_zeros(2, most, dtype=torch.int32)
        state = cache.on_device(k.device)
        return CacheTensors(**held, table=state.table, lengths=state.lengths, counters=counters)

    def _decode(
        self, inputs: AttentionInputs, rope: Rope, queries: int, tensors: CacheTensors
    ) -> Tensor:
        from nsa.ops.decode.launch import append, attend

        config = self.config
        append(new_tokens(inputs, tensors), tensors, inputs.phi, rope, config, queries)
        q_cmp = None if inputs.q_cmp is None else inputs.q_cmp.contiguous()
        q, gates = inputs.q.contiguous(), inputs.gates.contiguous()
        out, self.block_indices = attend(q, q_cmp, gates, tensors, config, queries, self.reads)
        return out
