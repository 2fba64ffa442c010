from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa.train.config import DataConfig
from nsa.train.data import ByteTokenizer, make_tokenizer
from nsa.train.data.documents import SIDES, side_of
from nsa.train.data.tokenise import tokenise
from tests.train.data.data_sets import make_texts

ROWS = st.lists(st.binary(max_size=12) | st.sampled_from([b"", b"a\0b", b"\xff"]), max_size=30)


def kind_of(row: bytes, fraction: float) -> str:
    if not row:
        return "empty"
    is_text = b"\0" not in row and row.decode("utf-8", "ignore").encode() == row
    return side_of(row, fraction) if is_text else "unreadable"


@given(rows=ROWS, fraction=st.sampled_from([0.01, 0.3, 0.5]))
def test_rows_become_documents_of_their_side(rows: list[bytes], fraction: float) -> None:
    for sides in (SIDES, SIDES[:1], SIDES[1:]):
        made, tokens = tokenise(ByteTokenizer(), fraction, sides, rows)
        kinds = [kind_of(row, fraction) for row in rows]
        pairs = zip(rows, kinds, strict=True)
        texts = [text + b"\0" if kind in sides else b"" for text, kind in pairs]
        assert [row.kind for row in made] == kinds
        assert [row.num_tokens for row in made] == list(map(len, texts))
        assert [row.num_bytes for row in made] == list(map(len, rows))
        assert tokens.tobytes() == b"".join(texts)
        assert tokens.dtype == np.uint8


def test_the_side_is_the_hash() -> None:
    """Fixed for ever: a data set prepared again must hold the same validation documents."""
    text = b"a document"
    share = int(hashlib.sha256(text).hexdigest(), 16) / 2**256
    assert (side_of(text, share * 0.999), side_of(text, share * 1.001)) == SIDES
    found = sum(side_of(b"%d" % i, 0.1) == "validation" for i in range(20_000))
    assert found / 20_000 == pytest.approx(0.1, abs=4 * (0.1 * 0.9 / 20_000) ** 0.5)


def test_gpt2_tokens() -> None:
    tokenizer = make_tokenizer(DataConfig(tokenizer="gpt2"), ())
    texts = [text.encode() for text in make_texts(20)]
    rows, tokens = tokenise(tokenizer, 1e-9, SIDES, texts)
    assert tokens.dtype == np.uint16
    assert tokenizer.decode(tokens) == b"".join(texts)
    ends = np.cumsum([row.num_tokens for row in rows])
    assert np.array_equal(np.flatnonzero(tokens == tokenizer.separator_id) + 1, ends)
