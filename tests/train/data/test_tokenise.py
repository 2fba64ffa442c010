from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa.train.config import DataConfig
from nsa.train.data import ByteTokenizer, make_tokenizer
from nsa.train.data.tokenise import SIDES, Texts, Tokenise, side_of
from tests.train.data.data_sets import make_texts

ROWS = st.lists(st.binary(max_size=12) | st.sampled_from([b"", b"a\0b", b"\xff", "é".encode()[:1]]), max_size=30)


def texts_of(rows: list[bytes]) -> Texts:
    return Texts(b"".join(rows), np.array([len(row) for row in rows], dtype=np.int64))


def is_good(row: bytes) -> bool:
    return row != b"" and b"\0" not in row and row.decode("utf-8", "ignore").encode() == row


@given(rows=ROWS, fraction=st.sampled_from([0.01, 0.3, 0.5]))
def test_rows_become_documents_of_their_side(rows: list[bytes], fraction: float) -> None:
    made = Tokenise(ByteTokenizer(), fraction)(texts_of(rows))
    for side in SIDES:
        expected = [row for row in rows if is_good(row) and side_of(row, fraction) == side]
        assert made.tokens[side].dtype == np.uint8
        assert made.tokens[side].tobytes() == b"".join(row + b"\0" for row in expected)
        lengths = made.lengths[made.is_of(side)]
        assert lengths[lengths > 0].tolist() == [len(row) + 1 for row in expected]
    assert made.empty.tolist() == [row == b"" for row in rows]
    assert made.unreadable.tolist() == [row != b"" and not is_good(row) for row in rows]
    assert made.num_bytes.tolist() == [len(row) if is_good(row) else 0 for row in rows]


@given(rows=ROWS, data=st.data())
def test_head_is_what_the_first_rows_give(rows: list[bytes], data: st.DataObject) -> None:
    tokenise = Tokenise(ByteTokenizer(), 0.4)
    number = data.draw(st.integers(0, len(rows) + 2))
    head, expected = tokenise(texts_of(rows)).head(number), tokenise(texts_of(rows[:number]))
    for side in SIDES:
        assert np.array_equal(head.tokens[side], expected.tokens[side])
    for name in ("lengths", "held_out", "num_bytes", "empty", "unreadable"):
        assert np.array_equal(getattr(head, name), getattr(expected, name))


@pytest.mark.parametrize("side", SIDES)
def test_documents_of_the_other_side_are_rows_without_tokens(side) -> None:
    texts = texts_of([text.encode() for text in make_texts(60)])
    both = Tokenise(ByteTokenizer(), 0.3)(texts)
    one = Tokenise(ByteTokenizer(), 0.3, sides=(side,))(texts)
    assert set(one.tokens) == {side}
    assert np.array_equal(one.tokens[side], both.tokens[side])
    assert np.array_equal(one.lengths, np.where(both.is_of(side), both.lengths, 0))


def test_the_side_is_the_hash() -> None:
    """Fixed for ever: data prepared today and tomorrow must hold the same documents out."""
    text = b"a document"
    share = int(hashlib.sha256(text).hexdigest(), 16) / 2**256
    assert (side_of(text, share * 0.999), side_of(text, share * 1.001)) == ("train", "validation")
    held_out = sum(side_of(b"%d" % i, 0.1) == "validation" for i in range(20_000))
    assert abs(held_out / 20_000 - 0.1) < 4 * (0.1 * 0.9 / 20_000) ** 0.5


def test_gpt2_tokens() -> None:
    tokenizer = make_tokenizer(DataConfig(tokenizer="gpt2"), ())
    rows = [text.encode() for text in make_texts(20)]
    made = Tokenise(tokenizer, 1e-9)(texts_of(rows))
    assert made.tokens["train"].dtype == np.uint16
    assert tokenizer.decode(made.tokens["train"]) == b"".join(rows)
    ends = np.flatnonzero(made.tokens["train"] == tokenizer.separator_id)
    assert np.array_equal(ends + 1, np.cumsum(made.lengths))
