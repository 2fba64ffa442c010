"""From the rows of a data set to documents: tokens, and the side of the split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from nsa.train.data.documents import SIDES, Document, Side, fault_of_text, side_of, split_documents
from nsa.train.data.tokenizer import Tokenizer, Tokens

Kind = Literal["train", "validation", "test", "empty", "unreadable"]
Fractions = tuple[float, float]  # of validation and test, see side_of
_NO_TOKENS = np.empty(0, dtype=np.uint8)


class Row(NamedTuple):
    """A row of a data set.

    Attributes:
        kind: the side of its document, or why there is none: ``empty``, or ``unreadable`` for text
            that is not UTF-8 or holds a NUL byte.
        num_bytes: of the text.
        tokens: of the document, ended by the separator; none if it is not of the sides asked for.
    """

    kind: Kind
    num_bytes: int
    tokens: Tokens


def tokenise(
    tokenizer: Tokenizer,
    fractions: Fractions,
    sides: Sequence[Side],
    texts: Sequence[bytes],
) -> list[Row]:
    """Rows in the order of their texts.

    Args:
        tokenizer: with a separator.
        fractions: of validation and test, see :func:`nsa.train.data.documents.side_of`.
        sides: those whose documents are tokenised.
        texts: empty for a row without one.
    """
    pairs = [(kind_of(text, fractions), text) for text in texts]
    return _rows(tokenizer, sides, pairs)


def tokenise_one(tokenizer: Tokenizer, fractions: Fractions, texts: Sequence[bytes]) -> list[Row]:
    """Rows of a data set that is one text, whose end is set aside; the training text comes last."""
    return _rows(tokenizer, SIDES, divided(texts, fractions))


def divided(texts: Sequence[bytes], fractions: Fractions) -> list[tuple[Kind, bytes]]:
    """Sides of the only text of a data set, cut by ``split_documents``; training text is last."""
    (text,) = texts
    if not text:
        return [("empty", text)]
    split = split_documents([Document("text", text)], *fractions)
    sides: dict[Kind, Sequence[Document]] = {"validation": split.validation, "test": split.test}
    sides["train"] = split.train
    return [(side, document.text) for side, found in sides.items() for document in found]


def _rows(
    tokenizer: Tokenizer, sides: Sequence[Side], pairs: Sequence[tuple[Kind, bytes]]
) -> list[Row]:
    encoded = iter(tokenizer.encode_documents([text for kind, text in pairs if kind in sides]))
    return [
        Row(kind, len(text), next(encoded) if kind in sides else _NO_TOKENS) for kind, text in pairs
    ]


def kind_of(text: bytes, fractions: Fractions) -> Kind:
    """See :class:`Row`."""
    if not text:
        return "empty"
    return "unreadable" if fault_of_text(text) else side_of(text, *fractions)
