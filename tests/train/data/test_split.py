"""Validation never overlaps training: shown on the split, and on the windows that come out of it."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nsa.train.data import ByteTokenizer, Document, Piece, Split, TextSource, check_disjoint, corpus_files, split_documents
from nsa.train.data.tokenise import side_of

NUMBER = 6  # bytes of one marked place


def marked_documents(sizes: list[int]) -> list[Document]:
    """Documents in which every place of ``NUMBER`` bytes is unique across all of them, so that a leak shows in the content."""
    documents, place = [], 0
    for i, size in enumerate(sizes):
        text = "".join(f"{place + k:0{NUMBER - 1}d}\n" for k in range(size))
        documents.append(Document(f"{i}.txt", text.encode()))
        place += size
    return documents


def places(piece: Piece) -> set[bytes]:
    assert piece.text == piece.document.text[piece.start : piece.stop]
    return set(piece.text.split())


def assert_partition(documents: list[Document], split: Split) -> None:
    """Every byte of every distinct document is on exactly one side."""
    covered: dict[str, list[tuple[int, int]]] = {}
    for piece in (*split.train, *split.validation):
        covered.setdefault(piece.document.sha256, []).append((piece.start, piece.stop))
    for document in documents:
        stretches = sorted(covered[document.sha256])
        assert stretches[0][0] == 0
        assert stretches[-1][1] == len(document.text)
        assert all(left[1] == right[0] for left, right in itertools.pairwise(stretches))


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=30),
    st.floats(0.02, 0.5),
    st.integers(1, 2000),
)
def test_no_window_of_training_holds_or_targets_validation_text(sizes: list[int], fraction: float, seq_len: int) -> None:
    documents = marked_documents(sizes)
    assume(fraction * NUMBER * sum(sizes) >= 2)  # less is too little to divide
    split = split_documents(documents, fraction)
    assert_partition(documents, split)
    held_out = set().union(*map(places, split.validation))
    assert not held_out & set().union(*map(places, split.train))

    tokenizer = ByteTokenizer()
    train, validation = (
        TextSource(tokenizer.encode_batch([piece.text for piece in pieces]), 0, tokenizer.token_bytes)
        for pieces in (split.train, split.validation)
    )
    seen: dict[str, set[bytes]] = {"train": set(), "validation": set()}
    for side, source in (("train", train), ("validation", validation)):
        for i in range(source.num_windows(seq_len)):
            text = source.window(seq_len, i).astype("uint8").tobytes()
            for line in text.replace(b"\0", b"\n").split(b"\n"):
                seen[side] |= {line} if len(line) == NUMBER - 1 else set()  # whole places only
    assert not seen["train"] & held_out
    assert not seen["train"] & seen["validation"]


def test_places_are_seen_when_sides_do_overlap() -> None:
    """The check above can fail: the same text on both sides shows."""
    document = marked_documents([10])[0]
    whole, tail = Piece(document, 0, 60), Piece(document, 30, 60)
    assert places(whole) & places(tail)


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.1, 0.2, 0.35, 0.5])
def test_share_is_close_to_the_fraction(fraction: float) -> None:
    rng = random.Random(7)
    many = marked_documents([rng.randint(5, 80) for _ in range(400)])
    cases = {
        "many": many,
        "one": marked_documents([5000]),
        "two": marked_documents([2000, 2000]),
        "corpus": list(corpus_files()),
    }
    for name, documents in cases.items():
        split = split_documents(documents, fraction)
        assert 0.8 * fraction <= split.validation_share <= fraction * 1.001, name
        if name == "many":
            assert split.rule == "documents"
            assert split.validation_share > 0.97 * fraction
        if name == "one":
            assert split.rule == "tail"
            assert len(split.train) == len(split.validation) == 1


def test_corpus_holds_out_one_whole_play() -> None:
    split = split_documents(corpus_files(), 0.1)
    assert split.rule == "documents"
    assert [piece.name for piece in split.validation] == ["macbeth.txt"]
    assert len(split.train) == 7


def test_membership_follows_content_not_names_or_order() -> None:
    documents = marked_documents([20 + 7 * i % 31 for i in range(200)])
    renamed = [Document(f"other/{i}", document.text) for i, document in enumerate(documents)]
    random.Random(3).shuffle(renamed)
    held_out = [piece.sha256 for piece in split_documents(documents, 0.1).validation]
    assert held_out == [piece.sha256 for piece in split_documents(renamed, 0.1).validation]
    assert held_out == sorted(held_out)  # the first windows of validation sample all documents, not the first folder


@pytest.mark.parametrize("num_documents", [2, 5, 300])
def test_copies_of_a_document_count_once(num_documents: int) -> None:
    documents = marked_documents([20 + i % 13 for i in range(num_documents)])
    copies = [Document(f"copy of {document.name}", document.text) for document in documents]
    alone, doubled = split_documents(documents, 0.25), split_documents(documents + copies, 0.25)
    assert doubled.num_duplicates == num_documents
    assert [piece.sha256 for piece in doubled.train] == [piece.sha256 for piece in alone.train]
    assert [piece.sha256 for piece in doubled.validation] == [piece.sha256 for piece in alone.validation]


def test_training_document_equal_to_a_cut_off_tail_is_left_out() -> None:
    large = marked_documents([550])[0]
    tail = Document("copy of the tail", large.text[2796:])
    last = Document("last", b"last one\n" * 55)
    # 0.7 of the share fits first, and then no other document does: the tail is held out, one whole document and a cut one.
    candidates = (Document("first", b"%03d\n" % i * 175) for i in range(1000))
    first = next(candidate for candidate in candidates if candidate.sha256 < min(tail.sha256, last.sha256))
    split = split_documents([first, tail, large, last], 0.2)
    assert split.rule == "tail"
    assert [(piece.name, piece.text) for piece in split.validation] == [(large.name, tail.text), ("last", last.text)]
    assert [piece.name for piece in split.train] == ["first", large.name]
    assert split.num_duplicates == 1


def test_cut_falls_after_a_line_or_else_between_characters() -> None:
    lines = Document("lines", b"".join(b"%04d some words\n" % i for i in range(500)))
    split = split_documents([lines], 0.1)
    assert split.train[0].text.endswith(b"\n")
    assert split.validation[0].text[:4].isdigit()
    unbroken = Document("unbroken", "é漢🙂".encode() * 300)
    for fraction in (0.1, 0.101, 0.102, 0.103, 0.104):
        split = split_documents([unbroken], fraction)
        assert (split.train[0].text.decode("utf-8") + split.validation[0].text.decode("utf-8")).encode() == unbroken.text


def test_too_little_text_is_an_error() -> None:
    for documents in ([], [Document("a", b"a")], [Document("a", b"same"), Document("b", b"same")][:1]):
        with pytest.raises(ValueError, match="too little text to divide"):
            split_documents(documents, 0.1)


def test_an_overlapping_split_cannot_be_made() -> None:
    first, second = marked_documents([50, 50])
    a, b = Piece(first, 0, 300), Piece(second, 0, 300)
    Split((a,), (b,), "documents")
    Split((Piece(first, 0, 120),), (Piece(first, 120, 300),), "tail")
    with pytest.raises(ValueError, match=r"share no bytes with training, got bytes 119 to 120 of 0\.txt"):
        Split((Piece(first, 0, 120),), (Piece(first, 119, 300),), "tail")
    with pytest.raises(ValueError, match=r"share no text with training, got 0\.txt"):
        Split((a, b), (a,), "documents")
    copy = Document("copy", second.text)
    with pytest.raises(ValueError, match="share no text with training, got copy"):
        check_disjoint([a, b], [Piece(copy, 0, 300)])
    with pytest.raises(ValueError, match="share no bytes with training, got bytes 0 to 60 of copy"):
        check_disjoint([a, b], [Piece(copy, 0, 60)])
    with pytest.raises(ValueError, match="validation must hold text"):
        Split((a,), (), "documents")


@pytest.mark.parametrize("ends", [("", "\n"), ("\n", "\n\n"), ("", "\r\n")])
def test_documents_that_differ_by_final_newlines_are_one(ends: tuple[str, str]) -> None:
    texts = [f"text {number} of a few words" for number in range(40)]
    documents = [Document(f"{number}{end!r}", (text + end).encode()) for number, text in enumerate(texts) for end in ends]
    split = split_documents(documents, 0.3)
    assert (split.num_duplicates, split.rule) == (40, "documents")
    sides = [{piece.text.strip() for piece in side} for side in (split.train, split.validation)]
    assert not sides[0] & sides[1]
    for text in texts:
        for share in (0.1, 0.5):
            assert len({side_of((text + end).encode(), share) for end in ends}) == 1
