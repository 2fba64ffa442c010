"""Runs that are exported: what transformers loads is what was trained, and so is a run from it."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaForCausalLM,
    pipeline,
)

from nsa.config import RopeScaling
from nsa.hf.export import as_llama
from nsa.hf.tokenizer import as_transformers
from nsa.lm.llama import check_llama, llama_settings
from nsa.lm.model import LanguageModel
from nsa.train.checkpoint import list_checkpoints
from nsa.train.config import DataConfig
from nsa.train.data import Tokenizer, load_tokenizer, make_tokenizer
from nsa.train.data.tokenizer import SEPARATOR, ByteTokenizer
from nsa.train.pretrained import load_initial
from nsa.train.run_folder import RunFolder
from nsa.train.runs.evaluation import load_model
from tests.cli.conftest import finished, nsa, refusal, run, tiny
from tests.hf.tiny import tiny as tiny_model
from tests.hf.tiny import tokens
from tests.test_house_rules import ROOT

__all__ = ["finished", "nsa", "refusal", "run", "tiny"]  # fixtures


def trained(folder: Path) -> LanguageModel:
    """The model of a run's last checkpoint."""
    opened = RunFolder.open(folder)
    last = list_checkpoints(opened.checkpoints)[-1]
    return load_model(opened.load_config().model, last, torch.device("cpu"))[0]


# --------------------------------------------------------------------------------------------------
# tokenizers

TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
SOME = ["", "Once upon  a\ttime\n\n", "é ß 漢字 🙂 e\u0301 \u00a0", f"a{SEPARATOR}b", "Ā<unk>\x7f"]


def saved_by(tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    tokenizer.save(folder / "ours.json")
    found: dict[str, Any] = json.loads((folder / "ours.json").read_text(encoding="utf-8"))
    return found


def agree(theirs: Any, ours: Tokenizer, text: str) -> None:
    ids = ours.encode(text)
    assert theirs(text)["input_ids"] == ids
    assert theirs.decode(ids) == text


def test_bytes_of_every_text(tmp_path):
    """Ids are bytes, before and behind a folder; bytes that are no UTF-8 decode as in Python."""
    ours = ByteTokenizer()
    as_transformers(saved_by(ours, tmp_path)).save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)

    @settings(max_examples=200)
    @given(TEXTS)
    def check_text(text):
        agree(theirs, ours, text)

    @settings(max_examples=200)
    @given(st.binary())
    def check_bytes(raw):
        raw = raw.replace(b"\0", b"")
        assert theirs.decode([*raw]) == raw.decode("utf-8", "replace")

    check_text()
    check_bytes()
    for text in SOME:
        agree(theirs, ours, text)
    assert theirs("a\0b")["input_ids"] == [97, 0, 98]
    assert (theirs.eos_token_id, theirs.pad_token_id, len(theirs)) == (0, 0, 256)
    assert theirs.decode([97, 0], skip_special_tokens=True) == "a"
    batch = theirs(["ab", "a"], padding=True)
    assert batch["input_ids"] == [[97, 98], [0, 97]]
    assert batch["attention_mask"] == [[1, 1], [0, 1]]


def test_bytes_of_a_synthetic_task(tmp_path):
    ours = ByteTokenizer(separator=False)
    theirs = as_transformers(saved_by(ours, tmp_path))
    agree(theirs, ours, "a\0b")
    assert theirs.eos_token_id is None


@pytest.mark.parametrize("kind", ["gpt2", "bpe"])
def test_subwords(kind, tmp_path):
    config = DataConfig(tokenizer=kind, bpe_vocab_size=280)
    ours = make_tokenizer(config, [b"the quick brown foxes jump over the lazy dogs " * 20])
    as_transformers(saved_by(ours, tmp_path)).save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in (*SOME, "the quick brown foxes"):
        agree(theirs, ours, text)
    assert theirs.eos_token_id == ours.separator_id
    assert len(theirs) == ours.vocab_size


# --------------------------------------------------------------------------------------------------
# runs

SWIGLU = "--model.attention dense --model.mlp swiglu"


def test_a_run_there_and_back(run, nsa, tiny):
    """Equal logits, the tokenizer, a card, pipelines; a run that begins with the folder."""
    said = nsa("export run m --shard-size 20KB")
    assert re.match(r"m: step 4, fp32, layout nsa, 0\.\d MB", said)
    assert not list(tiny.glob(".unfinished*"))
    model, ours = AutoModelForCausalLM.from_pretrained("m"), trained(run)
    x = torch.randint(1, 256, (2, 50))
    assert torch.equal(model(x).logits, ours(x))
    tokenizer = AutoTokenizer.from_pretrained("m")
    assert tokenizer("the")["input_ids"] == [*b"the"]
    generation = GenerationConfig.from_pretrained("m")
    assert (generation.eos_token_id, generation.pad_token_id) == (0, 0)
    card = (tiny / "m/README.md").read_text(encoding="utf-8")
    assert "| trained | 4 steps, 256 tokens |" in card
    assert re.search(r"\| validation loss \| \d\.\d{4} bits a byte \|", card)
    (program,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    exec(compile(program.replace("100", "4"), "README.md", "exec"), {})

    write = pipeline("text-generation", model="m", tokenizer="m", device="cpu")
    options = {"max_new_tokens": 5, "do_sample": False, "return_full_text": False}
    texts = ["the 3 quick brown foxes", "lazy"]
    alone = [write(text, **options)[0]["generated_text"] for text in texts]
    together = write(texts, batch_size=2, **options)
    assert [found[0]["generated_text"] for found in together] == alone

    nsa("train tiny.yaml --run-dir more --init-from m --optim.lr 1e-30 --steps 1 --sample-tokens 0")
    state = ours.state_dict()
    assert all(
        torch.equal(x, state[name]) for name, x in trained(tiny / "more").state_dict().items()
    )
    assert load_tokenizer(tiny / "more/tokenizer.json").fingerprint == ByteTokenizer().fingerprint


def test_program_of_the_documents(run, nsa):
    """It loads what the line before it exports."""
    nsa("export run my-model")
    page = (ROOT / "docs/use.md").read_text(encoding="utf-8")
    *_, program = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    exec(compile(program.replace("=50", "=5"), "use.md", "exec"), {})


def test_a_dense_run_as_llama(tiny, nsa):
    """transformers' own Llama reads it and writes it; a run begins with what it has written."""
    nsa(f"train tiny.yaml --run-dir dense --sample-tokens 0 {SWIGLU} --optim.lr 0.02")
    nsa("export dense llama --layout llama --checkpoint 4")
    llama = AutoModelForCausalLM.from_pretrained("llama")
    assert type(llama) is LlamaForCausalLM
    x, ours = torch.randint(1, 256, (2, 60)), trained(tiny / "dense")
    torch.testing.assert_close(llama(x).logits, ours(x), rtol=0, atol=2e-6)
    assert AutoTokenizer.from_pretrained("llama")("the")["input_ids"] == [*b"the"]
    llama.save_pretrained("again", max_shard_size="20KB")
    fresh = LanguageModel(ours.config)
    load_initial(tiny / "again", fresh)
    state = ours.state_dict()
    assert all(torch.equal(x, state[name]) for name, x in fresh.state_dict().items())


def test_bf16_and_refused_exports(run, nsa, refusal, tiny):
    nsa("export run half --dtype bf16 --checkpoint 2")
    assert AutoModelForCausalLM.from_pretrained("half").dtype == torch.bfloat16
    assert "DIR must not exist yet, got half" in refusal("export run half")
    for size in ("0", "2GiB"):
        rule = f"--shard-size must be a size such as 5GB or 500MB, got {size}"
        assert rule in refusal(f"export run other --shard-size={size}")
    said = refusal("export run other --layout llama")
    assert "model.attention must be dense for Llama's layout, got nsa" in said
    assert not (tiny / "other").exists()
    said = refusal("train tiny.yaml --init-from half --checkpoint 2")
    assert "--checkpoint must be left out with an exported folder, got 2" in said


# --------------------------------------------------------------------------------------------------
# Llama's layout

DENSE: dict[str, Any] = {"attention": "dense", "mlp": "swiglu", "value_dim": 16}


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_head": True, "norm_eps": 1e-3, "num_heads": 3, "num_kv_heads": 1},
        {"rope_theta": 500.0, "rope_scaling": RopeScaling("linear", 3.0)},
        {"projection_bias": "all"},
    ],
    ids=str,
)
def test_llama_has_equal_logits(changes, tmp_path):
    """What differs is rounding: Llama's norms and angles are fp32 in fp64 models, too."""
    model = tiny_model(**DENSE, **changes).lm
    for name, bias in model.named_parameters():
        if name.endswith("bias"):
            assert not bias.any()
            torch.nn.init.normal_(bias)
    as_llama(model, {}).save_pretrained(tmp_path)
    llama, x = LlamaForCausalLM.from_pretrained(tmp_path), tokens(2, 60)
    torch.testing.assert_close(llama(x).logits, model(x), rtol=0, atol=1e-5)
    fresh = LanguageModel(model.config)
    load_initial(tmp_path, fresh)
    found, wanted = fresh.state_dict(), model.state_dict()
    assert all(torch.equal(x, wanted[name].float()) for name, x in found.items())


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"mlp": "silu"}, "model.mlp must be swiglu for Llama's layout, got silu"),
        (
            {"rope_scaling": RopeScaling("yarn", 2.0)},
            "rope_scaling must be linear, llama3 or left out",
        ),
        ({"projection_bias": "qkv"}, "projection_bias must be none or all"),
        ({"num_heads": 10}, r"model.width must be a multiple of num_heads \(10\)"),
    ],
)
def test_what_llama_lacks(changes, match):
    config = tiny_model(**{**DENSE, **changes}).lm.config
    with pytest.raises(ValueError, match=match):
        llama_settings(config)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_attention_heads": 8}, "have num_attention_heads 4, as the run, got 8"),
        ({"rope_parameters": None, "rope_theta": 5.0}, "have rope_parameters .*5.0"),
        ({"attention_bias": True}, "have attention_bias False"),
        ({"num_attention_heads": 0}, "have a positive integer as num_attention_heads, got 0"),
        ({"rope_parameters": [1]}, r"have rope_parameters as an object, got \[1\]"),
    ],
)
def test_llamas_of_other_settings(change, match):
    config = tiny_model(**DENSE).lm.config
    found = llama_settings(config)
    check_llama("a", found, config)
    old = {key: x for key, x in found.items() if key != "rope_parameters"}
    check_llama("a", {**old, "rope_theta": config.nsa.rope_theta}, config)
    in_fp32 = {"rms_norm_eps": float(np.float32(config.norm_eps))}
    assert in_fp32["rms_norm_eps"] != config.norm_eps
    check_llama("a", {**found, **in_fp32}, config)
    with pytest.raises(
        ValueError, match=r"^a must have rms_norm_eps 1e-06, as the run, got 1.1e-06"
    ):
        check_llama("a", {**found, "rms_norm_eps": 1.1e-6}, config)
    with pytest.raises(ValueError, match=f"^a must {match}"):
        check_llama("a", {**found, **change}, config)


def test_an_index_that_a_folder_lacks_is_new(tmp_path, caplog):
    source = tiny_model(scores="token_max").float()
    source.save_pretrained(tmp_path)
    target = LanguageModel(tiny_model(scores="index").lm.config)
    before = {key: x.clone() for key, x in target.state_dict().items()}
    with caplog.at_level("INFO", logger="nsa"):
        load_initial(tmp_path, target)
    assert f"{2 * len(target.layers)} weights of an index are not in" in caplog.text
    for key, wanted in {**before, **source.lm.state_dict()}.items():
        assert torch.equal(target.state_dict()[key], wanted), key


def test_folders_that_do_not_fit(tmp_path):
    """Nothing is loaded then."""
    model = tiny_model()
    model.float().save_pretrained(tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    held, text = load_file(file), config.read_text()
    name = "model.norm.weight"
    target = LanguageModel(dataclasses.replace(model.config.lm))
    before = {key: x.clone() for key, x in target.state_dict().items()}
    for change, match in (
        ({name: None}, rf"hold {name} as \(24,\), got None"),
        ({name: torch.ones(3)}, rf"hold {name} as \(24,\), got \(3,\)"),
        ({"model.more": torch.ones(3)}, r"hold no model\.more, got one"),
        ({name: torch.ones(24).int()}, f"hold {name} as one of F64, F32, F16, BF16, got I32"),
        (
            {name: torch.tensor([1.0] * 23 + [math.nan])},
            f"hold finite numbers in {name}, got inf or",
        ),
    ):
        changed: dict[str, Any] = {**held, **change}
        save_file({key: x for key, x in changed.items() if x is not None}, file)
        with pytest.raises(ValueError, match=f"^--init-from must {match}"):
            load_initial(tmp_path, target)
    for content, match in (
        (text.replace('"nsa_lm"', '"mistral"'), "be of type nsa_lm or llama, got mistral"),
        ("{", "hold JSON in its files"),
    ):
        config.write_text(content)
        with pytest.raises(ValueError, match=f"^--init-from must {match}"):
            load_initial(tmp_path, target)
    config.write_text(text)
    file.write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="must hold tensors in the format of safetensors"):
        load_initial(tmp_path, target)
    shutil.copy(config, file)
    assert all(torch.equal(x, before[key]) for key, x in target.state_dict().items())


@pytest.mark.parametrize("place", ["../w.safetensors", "config.json", 3])
def test_an_index_names_files_beside_it(place, tmp_path):
    model, inside = tiny_model().float(), tmp_path / "inside"
    model.save_pretrained(inside)
    (inside / "model.safetensors").rename(tmp_path / "w.safetensors")
    index = inside / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": place}}))
    match = r"^--init-from must name files \*\.safetensors of the folder in model\..*, got "
    with pytest.raises(ValueError, match=match):
        load_initial(inside, model.lm)
    index.write_text("[]" if place == 3 else '{"weight_map": []}')
    with pytest.raises(ValueError, match=r"hold JSON objects|hold a weight_map in model"):
        load_initial(inside, model.lm)
