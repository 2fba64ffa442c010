"""Validation never overlaps training."""

from __future__ import annotations

import hashlib
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nsa.train.data import ByteTokenizer, Document
from nsa.train.data.documents import (
    SIDES,
    corpus_files,
    num_bytes,
    side_of,
    split_documents,
    tokenise,
)

NUMBER = 6  # bytes of one marked line
SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=30)
FRACTIONS = st.floats(0.02, 0.5)


def marked_documents(sizes: list[int]) -> list[Document]:
    """Documents whose lines of ``NUMBER`` bytes are unique, so that a leak is visible."""
    documents, place = [], 0
    for i, size in enumerate(sizes):
        text = "".join(f"{place + k:0{NUMBER - 1}d}\n" for k in range(size))
        documents.append(Document(f"{i}.txt", text.encode()))
        place += size
    return documents


@given(SIZES, FRACTIONS)
def test_each_byte_is_in_one_split(sizes, fraction):
    assume(fraction * NUMBER * sum(sizes) >= 2)  # less is too little to divide
    documents = marked_documents(sizes)
    split = split_documents(documents, fraction)
    assert split.test == []
    for document in documents:
        parts = [p.text for part in split[:2] for p in part if p.name == document.name]
        assert b"".join(parts) == document.text
    for text in ([], [b"a"], [b"same", b"same"]):
        with pytest.raises(ValueError, match="too little text to divide"):
            split_documents([Document("a", each) for each in text], 0.1)


@given(
    st.lists(st.sampled_from([b"a", b"a\n", b"bb", b"ccc\n", b"dddd"]) | st.binary(min_size=1)),
    st.floats(0.02, 0.3),
    st.floats(0.02, 0.2),
)
def test_no_document_is_in_two_splits(texts, validation, test):
    """Whole, cut, or copied; and validation does not depend on the test."""
    documents = [Document(str(i), text * (1 + i % 3)) for i, text in enumerate(texts)]
    try:
        split = split_documents(documents, validation, test)
    except ValueError:
        assume(False)
    parts = [{document.identity for document in part} for part in split[:3]]
    assert all(parts)
    assert sum(map(len, parts)) == len(set.union(*parts))
    assert split.validation == split_documents(documents, validation).validation
    for document in documents:
        found = [p.text for part in split[:3] for p in part if p.name == document.name]
        assert sum(map(len, found)) <= len(document.text), "no byte is in two splits"


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.2, 0.4])
def test_the_fractions_are_kept(fraction):
    rng = random.Random(7)
    many = marked_documents([rng.randint(5, 80) for _ in range(400)])
    cases = {"documents": many, "tail": marked_documents([5000]), "": corpus_files().documents}
    for rule, documents in cases.items():
        split = split_documents(documents, fraction, 0.1)
        assert split.rule == (rule or split.rule)
        for found, wanted in ((split.validation, fraction), (split.test, 0.1)):
            assert 0.8 * wanted <= num_bytes(found) / num_bytes(documents) <= 1.001 * wanted


@pytest.mark.parametrize("num_documents", [2, 5, 300])
def test_membership_follows_content_and_copies_count_once(num_documents):
    documents = marked_documents([20 + i % 13 for i in range(num_documents)])
    copies = [Document(f"copy of {document.name}", document.text) for document in documents]
    alone = split_documents(documents, 0.25)
    doubled = split_documents(documents + copies, 0.25)
    assert doubled == alone._replace(num_duplicates=num_documents)
    if alone.rule == "documents":
        random.Random(3).shuffle(copies)
        found, other = (
            [document.sha256 for document in part]
            for part in (alone.validation, split_documents(copies, 0.25).validation)
        )
        assert found == other == sorted(found)  # so the first sequences are from all documents


def test_training_document_equal_to_a_cut_off_tail_is_left_out():
    large = marked_documents([550])[0]
    tail = Document("copy of the tail", large.text[2796:])
    last = Document("last", b"last one\n" * 55)
    # 0.7 of the share fits first, and then no other document does: validation takes the tail, one
    # whole document and a cut one.
    candidates = (Document("first", b"%03d\n" % i * 175) for i in range(1000))
    least = min(tail.sha256, last.sha256)
    first = next(candidate for candidate in candidates if candidate.sha256 < least)
    split = split_documents([first, tail, large, last], 0.2)
    assert (split.rule, split.num_duplicates) == ("tail", 1)
    assert split.validation == [Document(large.name, tail.text), last]
    assert [document.name for document in split.train] == ["first", large.name]


def test_cut_falls_after_a_line_or_else_between_characters():
    lines = Document("lines", b"".join(b"%04d some words\n" % i for i in range(500)))
    split = split_documents([lines], 0.1)
    assert split.train[0].text.endswith(b"\n")
    assert split.validation[0].text[:4].isdigit()
    unbroken = Document("unbroken", "é漢🙂".encode() * 300)
    for fraction in (0.1, 0.101, 0.102, 0.103, 0.104):
        split = split_documents([unbroken], fraction)
        assert all(part.text.decode() for part in (*split.train, *split.validation))


@pytest.mark.parametrize("ends", [("", "\n"), ("\n", "\n\n"), ("", "\r\n")])
def test_documents_that_differ_by_final_newlines_are_one(ends):
    texts = [f"text {number} of a few words" for number in range(40)]
    documents = [Document(text, (text + end).encode()) for text in texts for end in ends]
    split = split_documents(documents, 0.3)
    assert (split.num_duplicates, split.rule) == (40, "documents")
    sides = ({document.text.strip() for document in side} for side in split[:2])
    assert not set.intersection(*sides)
    for text in texts:
        for share in (0.1, 0.5):
            assert len({side_of((text + end).encode(), share) for end in ends}) == 1


# --- data sets: by hash ---------------------------------------------------------------------------
def test_rows_become_documents_of_their_split():
    texts = [b"a document", b"", b"a\0b", b"\xff", b"another"]
    kinds = [side_of(texts[0], 0.3, 0.2), "empty", "unreadable", "unreadable", "train"]
    rows = tokenise(ByteTokenizer(), (0.3, 0.2), ["train"], False, texts)
    assert [row.kind for row in rows] == kinds
    assert [row.num_bytes for row in rows] == list(map(len, texts))
    assert [row.tokens.tobytes() for row in rows] == [b"", b"", b"", b"", b"another\0"]


def test_the_split_is_the_hash():
    """Fixed for ever: a data set prepared again must have the same validation documents."""
    text = b"a document"
    share = int(hashlib.sha256(text).hexdigest(), 16) / 2**256
    below, above = share * 0.999, share * 1.001
    assert side_of(text, above) == side_of(text, above, 0.1) == "validation"
    assert side_of(text, below) == side_of(text, below / 2, below / 2) == "train"
    assert side_of(text, below, 0.1) == side_of(text, below / 2, above - below / 2) == "test"
    found = [side_of(b"%d" % i, 0.1, 0.2) for i in range(20_000)]
    fractions = [found.count(side) / 20_000 for side in SIDES]
    assert fractions == pytest.approx([0.7, 0.1, 0.2], abs=0.013)
