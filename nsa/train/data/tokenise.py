"""From the texts of a data set's rows to tokens, with a side for each document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from nsa.train.data.documents import Side, fault_of_text, side_of
from nsa.train.data.source import joined
from nsa.train.data.tokenizer import Tokenizer, Tokens

Kind = Literal["train", "validation", "empty", "unreadable"]


class Row(NamedTuple):
    """A row of a data set.

    Attributes:
        kind: the side of its document, or why there is none: ``empty``, or ``unreadable`` for text
            that is not UTF-8 or holds a NUL byte.
        num_tokens: of the document, separator included; 0 where there is no document of the sides
            that were asked for.
        num_bytes: of the text.
    """

    kind: Kind
    num_tokens: int
    num_bytes: int


def tokenise(
    tokenizer: Tokenizer,
    validation_fraction: float,
    sides: Sequence[Side],
    texts: Sequence[bytes],
) -> tuple[list[Row], Tokens]:
    """Rows in the order of their texts, and the tokens of all their documents.

    Args:
        tokenizer: with a separator.
        validation_fraction: see :func:`nsa.train.data.documents.side_of`.
        sides: those of which tokens are wanted.
        texts: empty for a row without one.
    """
    kinds = [kind_of(text, validation_fraction) for text in texts]
    wanted = [text for text, kind in zip(texts, kinds, strict=True) if kind in sides]
    encoded = tokenizer.encode_batch(wanted)
    sizes = (len(ids) + 1 for ids in encoded)
    rows = []
    for text, kind in zip(texts, kinds, strict=True):
        rows.append(Row(kind, next(sizes) if kind in sides else 0, len(text)))
    return rows, joined(encoded, tokenizer.separator_id, tokenizer.vocab_size)


def kind_of(text: bytes, validation_fraction: float) -> Kind:
    """See :class:`Row`."""
    if not text:
        return "empty"
    return "unreadable" if fault_of_text(text) else side_of(text, validation_fraction)
