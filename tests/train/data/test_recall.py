"""Inserted lines: independent readings of the text, of its targets and of their distances."""

from __future__ import annotations

import math
import re
from zlib import crc32

import numpy as np
import pytest

from nsa.train.config import DataConfig, RecallConfig
from nsa.train.data import ByteTokenizer, StreamSource, TextSource, collate, open_data
from nsa.train.data.recall import RecallSource
from nsa.train.data.tokenizer import make_tokenizer
from tests.train.cases import write_text

LINE = re.compile(rb"\n(The number of [a-z]+ is|The word for [a-z]+ is|[a-z]+:)( \w+)\.\n")
TEXT = [b"It is a truth, universally acknowledged! " * 2000, b"Once upon " * 9000]
WORD = re.compile(rb"[a-z]{5,7}(?= is$|:$)")


def recall(seed: int = 1, texts: list[bytes] = TEXT, held_out: bool = False, **settings: float):
    tokenizer = ByteTokenizer()
    documents = tokenizer.encode_documents(texts)
    source = TextSource(documents, tokenizer.separator_id, tokenizer.token_bytes)
    return RecallSource(source, tokenizer, RecallConfig(**settings), seed, held_out=held_out)


def text_of(source: RecallSource, seq_len: int, index: int) -> bytes:
    return bytes(source.sequence(seq_len, index).tolist())


@pytest.mark.parametrize("seq_len", [128, 1000, 4096])
def test_repeated_values_are_the_targets(seq_len):
    """Each repeats the earlier ones; new values do not count, nor does the text."""
    source = recall(text_share=0)
    for index in (0, 5, source.num_sequences(seq_len) - 1):
        text, known = text_of(source, seq_len, index), dict[bytes, tuple[bytes, int]]()
        expected, found = np.zeros(seq_len + 1, dtype=bool), []
        for line in LINE.finditer(text):
            (question, value), start = line.groups(), line.start(2)
            if question in known:
                assert known[question][0] == value
                expected[start : start + len(value)] = True
                found.append((start, len(value), start - known[question][1]))
            known[question] = value, start
        assert len(text) == seq_len + 1
        assert source.queries(seq_len, index) == found
        assert source.target_mask(seq_len, index).tolist() == expected[1:].tolist()
        assert LINE.sub(b"", text).replace(b"\n", b"\0") in b"\0".join([*TEXT, b""])
    assert found


def test_other_targets_count_by_their_share():
    """New values, which cannot be known, never do."""
    seq_len, share = 65_536, 0.25
    source = recall(text_share=share)
    text, counted = text_of(source, seq_len, 3), source.target_mask(seq_len, 3)
    values, known = np.zeros(seq_len + 1, dtype=bool), set[bytes]()
    for line in LINE.finditer(text):
        values[slice(*line.span(2))] = True
        is_new = line[1] not in known
        assert (counted[line.start(2) - 1 : line.end(2) - 1] != is_new).all()
        known.add(line[1])
    others = counted[~values[1:]]
    error = math.sqrt(share * (1 - share) / len(others))
    assert abs(others.mean() - share) < 4 * error
    assert recall(text_share=1).target_mask(seq_len, 3)[~values[1:]].all()


@pytest.mark.parametrize("density", [0.25, 0.5, 1.0])
def test_distances_are_log_uniform(density):
    """Equally many in each octave from the length of two lines to half of the sequence."""
    seq_len = 16_384
    source = recall(density=density)
    found = [query.distance for index in range(24) for query in source.queries(seq_len, index)]
    octaves = np.bincount(np.log2(found).astype(int), minlength=14)
    middle = octaves[math.ceil(math.log2(64 / density)) : 13]
    assert middle.min() > 0.6 * middle.mean()
    assert middle.max() < 1.5 * middle.mean()
    assert octaves[13] > 0.1 * middle.mean()  # the farthest are possible in the second half alone
    lengths = [
        sum(len(line[0]) for line in LINE.finditer(text_of(source, seq_len, index)))
        for index in range(24)
    ]
    assert np.mean(lengths) / seq_len == pytest.approx(density, abs=0.05)


def test_sequences_depend_on_seed_and_index_alone():
    """A short text is repeated with other lines."""
    one, again = recall(), recall()
    last = one.num_sequences(256) - 1
    number = (sum(len(text) + 1 for text in TEXT) - 1) // 256
    assert last + 1 == number * (2**20 // number)
    for index in (7, last, 0, 7 + number):
        assert text_of(one, 256, index) == text_of(again, 256, index)
    assert len({text_of(one, 256, 7 + k * number) for k in range(40)}) == 40
    assert text_of(one, 256, 7) != text_of(recall(seed=2), 256, 7)


def test_evaluation_has_other_words():
    words = [set[bytes](), set[bytes]()]
    for held_out in (False, True):
        source = recall(held_out=held_out)
        for index in range(4):
            for question, value in LINE.findall(text_of(source, 4096, index)):
                word = WORD.search(question)
                assert word is not None
                words[held_out] |= {word[0], value[1:]}
    assert min(map(len, words)) > 50
    assert {crc32(word) % 8 == 0 for word in words[True]} == {True}
    assert {crc32(word) % 8 == 0 for word in words[False]} == {False}


def test_tokens_of_any_tokenizer():
    """A query has the tokens of the line that it repeats."""
    tokenizer = make_tokenizer(DataConfig(tokenizer="bpe", bpe_vocab_size=290), TEXT)
    documents = tokenizer.encode_documents(TEXT)
    text = TextSource(documents, tokenizer.separator_id, tokenizer.token_bytes)
    source = RecallSource(text, tokenizer, RecallConfig(), 1)
    tokens = source.sequence(2048, 5).tolist()
    assert LINE.search(tokenizer.decode(tokens))
    for start, size, distance in source.queries(2048, 5):
        before = start - distance
        assert tokens[start : start + size] == tokens[before : before + size]
    assert source.queries(2048, 5)


# --- as data of a run -----------------------------------------------------------------------------
def test_a_sequence_is_one_document(tmp_path):
    """Validation text stays as it is."""
    path = str(write_text(tmp_path))
    plain = open_data(DataConfig(source="folder", path=path), seed=1, seq_len=128)
    config = DataConfig(source="folder", path=path, recall=RecallConfig())
    data = open_data(config, seed=1, seq_len=128)
    batch = collate(data.train, [0, 1, 2], 128, document_mask=True)
    assert batch.cu_seqlens.tolist() == [0, 128, 256, 384]
    assert data.train.most_sequences(128, 3) == 3
    assert data.description == plain.description
    assert data.validation.sequence(128, 0).tolist() == plain.validation.sequence(128, 0).tolist()
    with pytest.raises(ValueError, match="seq_len must be at least 128 for recall, got 127"):
        open_data(config, seed=1, seq_len=127).sampler(127, 1)


def test_lines_in_a_stream(tmp_path):
    path = str(write_text(tmp_path))
    config = DataConfig(source="stream", path=path, validation_fraction=0.3, recall=RecallConfig())
    data = open_data(config, seed=1, seq_len=256)
    sampler = data.sampler(256, seed=1)
    for _ in range(3):
        batch = collate(data.train, sampler.next_indices(2), 256, document_mask=True)
        assert LINE.search(bytes(batch.tokens.tolist()))
    assert {"position", "row", "token"} <= sampler.state_dict().keys()
    assert isinstance(data.train, RecallSource)
    assert data.train.text is None
    assert isinstance(data.train._source, StreamSource)
    data.train._source.close()


def test_settings_out_of_range():
    for settings, message in (
        ({"density": 0}, "density must be above 0 and at most 1, got 0.0"),
        ({"text_share": 1.5}, "text_share must be from 0 to 1, got 1.5"),
    ):
        with pytest.raises(ValueError, match=message):
            RecallConfig(**settings)
    with pytest.raises(ValueError, match="recall must be left at None with source copy"):
        DataConfig(source="copy", recall=RecallConfig())
