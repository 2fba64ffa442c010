"""Loss in bits per byte: of a split, by document, by position, and of two models compared.

:func:`evaluate` sums on the device, for training. :func:`measure` returns sums for every document
and position, for ``nsa eval``. :func:`repeated_passages` makes text that a model has to repeat.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import NormalDist, fmean, stdev
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nsa.config import NSAConfig
from nsa.errors import check
from nsa.lm.model import LanguageModel
from nsa.module import NativeSparseAttention
from nsa.ops.attention import BranchInputs
from nsa.ops.index_loss import block_recall
from nsa.train.data import IGNORED_TARGET, Batch, TextSource, TokenSource, collate, spread
from nsa.train.data.batch import pack
from nsa.train.data.tokenizer import Ids
from nsa.train.execution.precision import autocast
from nsa.train.loss import NextTokenLoss, cross_entropy_of_tokens

Sums = NDArray[np.float64]  # [N, 3]: summed loss in nats, targets, bytes of text that they spell
RECALL_QUERIES = 64  # about as many of a batch, evenly spread
_RESAMPLES, _SEED = 10_000, 0  # of the bootstrap over documents
# 97.5% quantiles of Student's t for 1 to 9 degrees of freedom.
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@torch.no_grad()
def evaluate(
    loss: NextTokenLoss,
    batches: Iterable[Batch],
    *,
    compute_dtype: str = "fp32",
    sum_processes: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, float]:
    """Loss over validation text.

    Args:
        loss: the language model with its loss, on any device.
        batches: from :func:`nsa.train.data.validation_batches`, on any device.
        compute_dtype: ``bf16`` or ``fp32``, as in training.
        sum_processes: sums a tensor over the processes that share the batches; None where there is
            one.

    Returns:
        ``loss_nats``, mean over the targets; ``bits_per_byte``, the summed loss in bits over the
        bytes of text that the targets spell; ``num_targets`` and ``num_bytes``.

    Raises:
        ValueError: the batches contain no target.
    """
    device = loss.model.embedding.weight.device
    total = torch.zeros(3, dtype=torch.float64, device=device)  # nats, targets, bytes
    with _evaluating(loss.model):
        for batch in batches:
            local = batch.to(device)
            with autocast(device, compute_dtype):
                total[0] += loss(local.tokens, local.targets, local.cu_seqlens, local.max_seqlen)[0]
            total[1] += batch.num_targets
            total[2] += batch.num_bytes
    total = total if sum_processes is None else sum_processes(total)
    _check_bytes("batches", float(total[1]), float(total[2]))
    return figures_of(*total.tolist())


def _check_bytes(argument: str, num_targets: float, num_bytes: float) -> None:
    rule = "contain targets that spell at least one byte of text"
    found = f"{num_targets:,.0f} targets of {num_bytes:,.0f} bytes"
    check(num_bytes > 0, argument, rule, found)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


class SelectionRecall:
    """Recall of the layers that select by tokens or an index, see :func:`block_recall`.

    Args:
        model: the language model.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._layers = {
            number: layer.attention
            for number, layer in enumerate(model.decoder_layers())
            if isinstance(layer.attention, NativeSparseAttention)
            and layer.attention.config.scores in ("token_max", "index")
            and "slc" in layer.attention.config.branches
        }
        shape, device = (len(self._layers), 2), model.embedding.weight.device
        self._sums = torch.zeros(shape, dtype=torch.float64, device=device)

    def observed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches of an evaluation; the pass over the first one is measured."""
        try:
            for number, batch in enumerate(batches):
                for sums, layer in zip(self._sums, self._layers.values(), strict=True):
                    observer = partial(_add_recall, sums, layer.config, batch.cu_seqlens)
                    layer.observer = None if number else observer
                yield batch
        finally:
            for layer in self._layers.values():
                layer.observer = None

    def row(self, sum_processes: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Metrics ``selected_recall``, also by layer; empty without such a layer.

        Args:
            sum_processes: sums a tensor over the processes that share the evaluation.
        """
        sums = sum_processes(self._sums).tolist() if self._layers else []
        parts = zip(self._layers, sums, strict=True)
        row = {f"selected_recall_layer_{n}": kept / best for n, (kept, best) in parts if best}
        return {"selected_recall": fmean(row.values()), **row} if row else {}


def _add_recall(
    sums: Tensor,
    config: NSAConfig,
    cu_seqlens: Tensor,
    inputs: BranchInputs,
    blocks: Tensor | None,
) -> None:
    """Add the mass that the selected blocks keep, and the largest, of some queries of a pass."""
    q, k = inputs.q, inputs.k_slc
    assert k is not None
    assert blocks is not None
    rows = torch.arange(0, len(q), max(1, len(q) // RECALL_QUERIES), device=q.device)
    cu = cu_seqlens.to(q.device)
    kept, best = block_recall(q, k, blocks, config, rows, cu_seqlens_q=cu)
    sums += torch.stack((kept.sum(), best.sum()))


def figures_of(nats: float, num_targets: float, num_bytes: float) -> dict[str, float]:
    """Return sums as :func:`evaluate` does; without ``bits_per_byte`` if there are no bytes."""
    bits = {"bits_per_byte": nats / math.log(2) / num_bytes} if num_bytes else {}
    counts = {"num_targets": int(num_targets), "num_bytes": int(num_bytes)}
    return {"loss_nats": nats / num_targets, **bits, **counts}


@dataclass(frozen=True)
class Measurement:
    """Sums over the targets of an evaluation, see ``Sums`` for the columns.

    Attributes:
        documents: fp64 ``[num_documents, 3]``, by the document that a target belongs to; zeros for
            a document without measured targets.
        positions: fp64 ``[seq_len, 3]``, by position in the sequence: a target in row p was
            predicted from p + 1 tokens.
        contexts: fp64 ``[num_bins, num_documents, 3]``, by bin of :meth:`by_position` and document;
            None in files of earlier versions.
    """

    documents: Sums
    positions: Sums
    contexts: Sums | None = None

    def beyond(self, context: int) -> Measurement:
        """Sums of the targets that were predicted from at least so many tokens.

        Args:
            context: tokens, a power of two below the length of a sequence; 1 for all targets.
        """
        if context == 1:
            return self
        assert self.contexts is not None, "a file of an earlier version"
        first = context.bit_length() - 1
        positions = self.positions * (np.arange(len(self.positions)) + 1 >= context)[:, None]
        return Measurement(self.contexts[first:].sum(axis=0), positions)

    def figures(self) -> dict[str, float]:
        """Figures of :func:`evaluate` over all targets."""
        return figures_of(*self.documents.sum(axis=0).tolist())

    def by_position(self) -> list[dict[str, float]]:
        """Figures by tokens of context in bins 1, 2 to 3, 4 to 7, .. up to ``seq_len``.

        Returns:
            One dictionary for each bin with targets: ``first`` and ``last``, tokens of context, and
            the figures of :func:`figures_of`.
        """
        seq_len = len(self.positions)
        first = [2**k for k in range(seq_len.bit_length())]
        last = [*(edge - 1 for edge in first[1:]), seq_len]
        sums = np.add.reduceat(self.positions, np.array(first) - 1, axis=0).tolist()
        bins = zip(first, last, sums, strict=True)
        return [{"first": f, "last": to, **figures_of(*bin)} for f, to, bin in bins if bin[1]]


def measure(
    loss: NextTokenLoss,
    text: EvaluationText,
    micro_batch: int,
    num_sequences: int,
    *,
    compute_dtype: str = "fp32",
) -> Measurement:
    """Loss of each document and at each position.

    Args:
        loss: the language model with its loss, on any device.
        text: the sequences.
        micro_batch: sequences computed at a time.
        num_sequences: sequences to measure, at most as many as there are.
        compute_dtype: ``bf16`` or ``fp32``, as in training.

    Raises:
        ValueError: the sequences contain no target.
    """
    model, device = loss.model, loss.model.embedding.weight.device
    contexts = np.zeros((text.seq_len.bit_length(), text.num_documents, 3))
    positions = np.zeros((text.seq_len, 3))
    with torch.no_grad(), _evaluating(model):
        for batch, document in text.batches(micro_batch, num_sequences):
            local = batch.to(device)
            with autocast(device, compute_dtype):
                hidden = model.hidden_states(local.tokens, local.cu_seqlens, local.max_seqlen)
                nats = cross_entropy_of_tokens(hidden, model.head.weight, local.targets, loss.chunk)
            targets, starts = batch.targets.numpy(), batch.cu_seqlens.numpy()
            counted = targets != IGNORED_TARGET
            position = np.arange(len(targets)) - np.repeat(starts[:-1], np.diff(starts))
            sizes = text.token_bytes[targets[counted]]
            losses = nats.double().cpu().numpy()[counted]
            values = np.column_stack((losses, np.ones(len(losses)), sizes))
            bins = np.frexp(position[counted] + 1)[1] - 1
            np.add.at(contexts, (bins, document[counted]), values)
            np.add.at(positions, position[counted], values)
    _check_bytes("text", *positions[:, 1:].sum(axis=0).tolist())
    return Measurement(contexts.sum(axis=0), positions, contexts)


def paired_difference(
    first: Sequence[Measurement],
    second: Sequence[Measurement],
) -> dict[str, Any]:
    """Difference of two models in bits per byte, with its 95% intervals.

    Over documents: the bootstrap's percentile interval (Efron and Tibshirani 1993, chapter 13).
    Documents are drawn with replacement, as many as there are and the same for all models, and the
    difference of bits per byte is computed for each draw; with several pairs, trained with
    different seeds, for their mean. Over seeds: Student's t over the pairs, for these documents.
    Over both: Student's t with the sum of both variances and Satterthwaite's degrees of freedom;
    an interaction of documents and seeds counts twice. Only the last interval generalises to other
    seeds and other documents.

    Args:
        first: a model on some sequences, or several.
        second: the same number of other models on the same sequences.

    Returns:
        ``difference_bits_per_byte``, first minus second; ``difference_low`` and
        ``difference_high``, the interval over documents, None for one document;
        ``num_documents``, ``resamples`` and ``seed``. Of several pairs also ``differences`` of
        each, ``seeds_low`` and ``seeds_high``, ``both_low`` and ``both_high``.

    Raises:
        ValueError: the targets are not the same.
    """
    rule = "have the targets of the first in each document"
    expected = first[0].documents
    for x in (*first, *second):
        same = np.array_equal(expected[:, 1:], x.documents[:, 1:])
        check(same, "second", rule, f"{x.documents[:, 1].sum():.0f} others")
    counted = expected[:, 1] > 0
    pairs = zip(first, second, strict=True)
    bits = [(x.documents - y.documents)[counted, 0] / math.log(2) for x, y in pairs]
    mean, sizes, number = np.mean(bits, axis=0), expected[counted, 2], int(counted.sum())
    generator, sums = np.random.default_rng(_SEED), np.empty((_RESAMPLES, 2))
    for row in sums:
        drawn = generator.integers(number, size=number)
        row[:] = mean[drawn].sum(), sizes[drawn].sum()
    drawn_bits, drawn_sizes = sums[sums[:, 1] > 0].T  # a draw of separators alone has no bytes
    drawn = drawn_bits / drawn_sizes
    low, high = np.quantile(drawn, (0.025, 0.975)).tolist() if number > 1 else (None, None)
    differences = [float(x.sum() / sizes.sum()) for x in bits]
    return {
        "difference_bits_per_byte": float(mean.sum() / sizes.sum()),
        "difference_low": low,
        "difference_high": high,
        "num_documents": number,
        "resamples": _RESAMPLES,
        "seed": _SEED,
        **(_over_seeds(differences, float(drawn.var()), number) if len(bits) > 1 else {}),
    }


def interval(found: dict[str, Any], name: str) -> str:
    """Format an interval of :func:`paired_difference`, such as ``-0.0110 to -0.0062``.

    Args:
        found: result of the function.
        name: ``difference``, ``seeds`` or ``both``.
    """
    low, high = found.get(f"{name}_low"), found.get(f"{name}_high")
    return "" if low is None or high is None else f"{low:+.4f} to {high:+.4f}"


def in_words(found: dict[str, Any]) -> str:
    """Format the result of :func:`paired_difference`: the difference and its intervals."""
    number, pairs = found["num_documents"], len(found.get("differences", [0]))
    kinds = {"difference": f"{number:,} documents", "seeds": f"{pairs} seeds", "both": "both"}
    intervals = [
        f"{words} over {kind}" for name, kind in kinds.items() if (words := interval(found, name))
    ]
    known = "95% interval " + ", ".join(intervals) if intervals else "no interval: one document"
    return f"difference: {found['difference_bits_per_byte']:+.4f} bits per byte, {known}"


def _over_seeds(differences: list[float], variance: float, num_documents: int) -> dict[str, Any]:
    """Differences of several pairs, and the 95% intervals of their mean.

    Args:
        differences: of each pair.
        variance: variance of their mean over documents.
        num_documents: number of documents.
    """
    number, middle = len(differences), fmean(differences)
    of_seeds = stdev(differences) ** 2 / number
    both, freedom = of_seeds + variance, number - 1.0
    if both > 0:
        parts = of_seeds**2 / (number - 1) + variance**2 / max(num_documents - 1, 1)
        freedom = both**2 / parts
    found: dict[str, Any] = {"differences": differences}
    for name, square, degrees in (("seeds", of_seeds, number - 1.0), ("both", both, freedom)):
        error = math.sqrt(square) * student_t(degrees)
        found |= {f"{name}_low": middle - error, f"{name}_high": middle + error}
    return found


def student_t(freedom: float) -> float:
    """97.5% quantile of Student's t, to 3%.

    Args:
        freedom: degrees of freedom, at least 1.
    """
    if freedom < len(STUDENT_T):  # its logarithm is nearly linear in their reciprocal
        below = int(freedom)
        first, second = STUDENT_T[below - 1 : below + 1]
        share = (1 / below - 1 / freedom) / (1 / below - 1 / (below + 1))
        return first ** (1 - share) * second**share
    z = NormalDist().inv_cdf(0.975)  # Abramowitz and Stegun 1964, 26.7.5
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + terms[0] / freedom + terms[1] / freedom**2


class SplitSequences:
    """Sequences of a split as in training, across documents.

    A synthetic task has no documents: each sequence counts as one.

    Attributes:
        seq_len: tokens of a sequence, at most.
        num_documents: documents of the text.
        token_bytes: int64 ``[vocab_size]``, bytes of text that each token spells.

    Args:
        source: the split.
        seq_len: tokens of a sequence.
        document_mask: see :func:`nsa.train.data.collate`.
    """

    def __init__(self, source: TokenSource, seq_len: int, *, document_mask: bool) -> None:
        self.seq_len, self.token_bytes = seq_len, source.token_bytes
        self._source, self._document_mask = source, document_mask
        if isinstance(source, TextSource):
            self._starts = source.document_starts()
        else:  # at the first target of each sequence
            self._starts = np.arange(len(self)) * seq_len + 1
        self.num_documents = len(self._starts)

    def __len__(self) -> int:
        """Number of sequences."""
        return self._source.num_sequences(self.seq_len)

    def batches(self, micro_batch: int, num_sequences: int) -> Iterator[tuple[Batch, Ids]]:
        """Yield evenly spaced sequences, see :func:`nsa.train.data.spread`.

        Args:
            micro_batch: sequences of a batch.
            num_sequences: at most as many as there are.

        Yields:
            A batch, and the number of the document of each of its targets: int64 ``[T]``.
        """
        for indices in _chunks(spread(num_sequences, len(self)), micro_batch):
            batch = collate(self._source, indices, self.seq_len, document_mask=self._document_mask)
            first = np.array(indices)[:, None] * self.seq_len + 1
            positions = (first + np.arange(self.seq_len)).reshape(-1)  # of the targets in the text
            yield batch, np.searchsorted(self._starts, positions, side="right") - 1


class RollingSequences:
    """Sequences of whole documents in which each token is a target once.

    They are the windows of lm-eval's rolling log-likelihood at ``max_length = seq_len``: a
    document's first token is predicted from a separator, and each later sequence begins with the
    last target of the one before. The last one reaches back to be as long as the others. See
    :class:`SplitSequences`.

    Args:
        source: the documents.
        seq_len: tokens of a sequence, at most.
    """

    def __init__(self, source: TextSource, seq_len: int) -> None:
        assert source.separator_id is not None, "documents without a separator"
        # The separator before a document is the one that ends the document before.
        self._tokens = np.append(source.separator_id, source.tokens.astype(np.int64))
        self.token_bytes, self.seq_len = source.token_bytes, seq_len
        separators = np.flatnonzero(self._tokens == source.separator_id).tolist()
        self.num_documents = len(separators) - 1
        self._parts = [
            (document, separator, start, min(start + seq_len, end))
            for document, (separator, end) in enumerate(pairwise(separators))
            for start in range(separator + 1, end, seq_len)
        ]

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self._parts)

    def batches(self, micro_batch: int, num_sequences: int) -> Iterator[tuple[Batch, Ids]]:
        """See :class:`SplitSequences`."""
        for indices in _chunks(spread(num_sequences, len(self)), micro_batch):
            tokens, targets = zip(*map(self._sequence, indices), strict=True)
            lengths = [*map(len, tokens)]
            borders = np.cumsum([0, *lengths])
            arrays = np.concatenate(tokens), np.concatenate(targets), borders
            documents = np.array([self._parts[index][0] for index in indices])
            yield pack(*arrays, self.seq_len, self.token_bytes), documents.repeat(lengths)

    def _sequence(self, index: int) -> tuple[Ids, Ids]:
        """Tokens and targets; -100 for targets of an earlier sequence."""
        _, separator, start, end = self._parts[index]
        first = max(separator, end - 1 - self.seq_len)
        tokens = self._tokens[first:end]
        targets = tokens[1:].copy()
        targets[: start - 1 - first] = IGNORED_TARGET
        return tokens[:-1], targets


EvaluationText = SplitSequences | RollingSequences


def _chunks(indices: list[int], size: int) -> Iterator[list[int]]:
    return (indices[begin : begin + size] for begin in range(0, len(indices), size))


class RepeatedPassages(TokenSource):
    """Sequences of one document whose last tokens repeat those ``distance`` tokens before.

    A model that finds the earlier passage predicts them with nearly no loss; otherwise the loss is
    that of new text. Heads that do this are the induction heads of Olsson et al., arXiv:2209.11895.
    Targets are the second half of the passage, where the model can know that the text repeats, and
    the same tokens where they first occur.

    Args:
        source: the text.
        seq_len: tokens of a sequence; it has sequences of no other length.
        length: tokens of the passage.
        distance: tokens from the passage to its repetition.
    """

    def __init__(self, source: TextSource, seq_len: int, length: int, distance: int) -> None:
        self.separator_id, self.token_bytes = None, source.token_bytes
        self._source, self._length, self._distance = source, length, distance
        ends = np.append(source.document_starts()[1:], source.num_tokens) - 1  # separators
        first = np.arange(source.num_sequences(seq_len)) * seq_len
        before, upto = np.searchsorted(ends, first), np.searchsorted(ends, first + seq_len, "right")
        self._indices = np.flatnonzero(before == upto)
        half = length // 2
        self.again = slice(seq_len - half, seq_len)  # rows of targets
        self.at_first = slice(seq_len - half - distance, seq_len - distance)

    def sequences(self, seq_len: int) -> SplitSequences:
        """Sequences to measure; each counts as a document."""
        return SplitSequences(self, seq_len, document_mask=False)

    def num_sequences(self, seq_len: int) -> int:
        """Number of sequences that are inside one document."""
        return len(self._indices)

    def sequence(self, seq_len: int, index: int) -> Ids:
        """See :class:`TokenSource`."""
        tokens = self._source.sequence(seq_len, self._indices[index])
        begin = len(tokens) - self._length
        tokens[begin:] = tokens[begin - self._distance :][: self._length].copy()
        return tokens

    def target_mask(self, seq_len: int, index: int) -> NDArray[np.bool_]:
        """See :class:`TokenSource`."""
        mask = np.zeros(seq_len, dtype=bool)
        mask[self.again] = mask[self.at_first] = True
        return mask

    def figures(self, measured: Measurement) -> dict[str, Any]:
        """Figures of the repetition, and of the first occurrence as ``first_*``."""

        def of(rows: slice) -> dict[str, float]:
            sums: Sums = measured.positions[rows]
            return figures_of(*sums.sum(axis=0).tolist())

        first = {f"first_{name}": value for name, value in of(self.at_first).items()}
        del first["first_num_targets"], first["first_num_bytes"]
        return {"distance": self._distance, **of(self.again), **first}


def repeated_passages(source: TokenSource, seq_len: int, length: int) -> list[RepeatedPassages]:
    """Make repetitions at distances ``length``, twice as far and so on, up to the whole sequence.

    Args:
        source: the text.
        seq_len: tokens of a sequence.
        length: tokens of the passage.

    Raises:
        ValueError: a sequence has no room for the passage twice, no document fills a sequence, or
            there are no documents.
    """
    rule = f"be from 2 to {seq_len // 2}, half of a sequence"
    check(2 <= length <= seq_len // 2, "--repeat", rule, length)
    is_text = isinstance(source, TextSource)
    check(is_text, "--repeat", "be left out for a synthetic task", length)
    assert isinstance(source, TextSource)
    furthest = seq_len - length
    doubled = [length << k for k in range(seq_len.bit_length())]
    distances = [*(distance for distance in doubled if distance < furthest), furthest]
    found = [RepeatedPassages(source, seq_len, length, distance) for distance in distances]
    rule = f"be left out, as no document of the text has a whole sequence of {seq_len} tokens"
    check(found[0].num_sequences(seq_len) > 0, "--repeat", rule, length)
    return found
