"""``nsa convert``: transformers' dense models as sparse ones, against transformers' own in fp64."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import nsa.hf
from nsa.hf.convert import convert
from nsa.hf.tokenizer import as_transformers
from nsa.lm.llama import llama_name
from nsa.lm.model import LanguageModel
from nsa.rope import Rope
from nsa.train.data.tokenizer import SEPARATOR
from nsa.train.load import load_config
from nsa.train.pretrained import load_initial
from tests.cli.conftest import nsa as command
from tests.cli.conftest import refusal
from tests.hf.tiny import tokens

__all__ = ["command", "refusal"]  # fixtures

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": [38, 39],
}
PATTERN: dict[str, Any] = {
    "num_selected_blocks": 4,
    "num_init_blocks": 1,
    "num_local_blocks": 2,
    "block_size": 16,
}
SAME, LONG = 64, 200  # tokens until which all blocks are selected, and in all


def rope(kind: str, **settings: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, **settings}}


YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64)
LLAMA3 = rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rms_norm_eps": 1e-3}),
    "llama 3, biases": ("llama", {**LLAMA3, "attention_bias": True}),
    "linear, tied": ("llama", {**rope("linear", factor=3.0), "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, yarn": ("mistral", {"sliding_window": None, **YARN}),
    "qwen 2": ("qwen2", {"sliding_window": 8}),
    "qwen 3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    "qwen 3, yarn": ("qwen3", {"head_dim": 16, **YARN}),
}


def dense(folder: Path, kind: str = "llama", **changes: Any) -> Path:
    """Save a small random model; return its folder."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config)
    for name, x in model.named_parameters():
        if x.ndim == 1:  # norms and biases
            nn.init.normal_(x, float("norm" in name), 0.3)
    model.save_pretrained(folder, max_shard_size="40KB")
    return folder


def in_fp64(folder: Path, **options: Any) -> PreTrainedModel:
    """transformers' own model, whose fp32 steps run in fp64: norms, cosines and sines.

    Frequencies are those of its functions, computed in fp64, and rounded to fp32 like angles.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **options).eval()
    rotary = model.model.rotary_emb
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch, "float32", torch.float64)
        of_kind = ROPE_INIT_FUNCTIONS.get(rotary.rope_type, rotary.compute_default_rope_parameters)
        frequency, factor = of_kind(model.config, device=torch.device("cpu"))
    assert frequency.dtype == torch.float64

    def cos_sin(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angle = (position_ids[..., None].float() * frequency.to(torch.float32)).double()
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos() * factor, angle.sin() * factor

    def norm(x: Tensor, module: Any) -> Tensor:
        mean = x.square().mean(-1, keepdim=True)
        return module.weight * x / (mean + module.variance_epsilon).sqrt()

    rotary.forward = cos_sin
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = partial(norm, module=module)
    return model


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_are_those_of_transformers(case, tmp_path):
    """Dense while all blocks are selected, then those of the registered attention function."""
    kind, changes = CASES[case]
    source, out = dense(tmp_path / "dense", kind, **changes), tmp_path / "sparse"
    said = convert(source, out, **PATTERN)
    assert said.startswith(f"{out}: {kind} with 4 blocks of 16, equal to the dense model for ")
    sparse = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float64).eval()
    assert type(sparse) is nsa.hf.NSAForCausalLM
    x = tokens(2, LONG)
    found, wanted = sparse(x).logits, in_fp64(source)(x).logits
    torch.testing.assert_close(found[:, :SAME], wanted[:, :SAME], rtol=0, atol=1e-10)
    assert (found - wanted)[:, -SAME:].abs().amax((0, 2)).min() > 1e-4
    nsa.hf.register("converted", branches=("slc",), **PATTERN, compress_block_size=16)
    same = in_fp64(source, attn_implementation="converted")(x).logits
    torch.testing.assert_close(found, same, rtol=0, atol=1e-10)

    texts = [
        AutoModelForCausalLM.from_pretrained(folder).generate(
            x[:, :40], max_new_tokens=20, do_sample=False, attention_mask=torch.ones(2, 40)
        )
        for folder in (source, out)
    ]
    assert torch.equal(*texts)


@torch.no_grad()
def test_bf16_has_at_most_twice_the_error_of_dense(tmp_path):
    source = dense(tmp_path / "dense", "mistral", sliding_window=512)
    convert(source, tmp_path / "sparse", **PATTERN)
    x = tokens(4, SAME)
    wanted = in_fp64(source)(x).logits
    theirs, ours = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.bfloat16)(x).logits
        for name in ("dense", "sparse")
    )
    assert ours.dtype == torch.bfloat16
    errors = [(logits - wanted).square().mean().sqrt() for logits in (theirs, ours)]
    assert 0 < errors[1] < 2 * errors[0] < 0.2


@torch.no_grad()
def test_the_folder(tmp_path):
    """Weights are linked; every class loads them, a run begins with them, and they are saved."""
    source, out = dense(tmp_path / "dense", "qwen2"), tmp_path / "sparse"
    (source / "tokenizer.json").write_text("{}")
    (source / "pytorch_model.bin").touch()
    convert(source, out, **PATTERN)
    names = {x.name for x in source.iterdir()} - {"pytorch_model.bin"} | {"nsa_hf.py"}
    assert {x.name for x in out.iterdir()} == names
    for file in out.glob("*.safetensors"):
        assert file.samefile(source / file.name)
    model, x = AutoModelForCausalLM.from_pretrained(out).eval(), tokens(2, LONG)
    settings = json.loads((out / "config.json").read_text())
    assert settings["max_position_embeddings"] == 512
    assert settings["dtype"] == "float32"
    body = AutoModel.from_pretrained(out)(x).last_hidden_state
    assert torch.equal(model.model.head(body), model(x).logits)
    AutoModelForSequenceClassification.from_pretrained(out, pad_token_id=0)
    fresh = LanguageModel(model.config.lm)
    load_initial(out, fresh)
    assert torch.equal(fresh(x), model(x).logits)
    nn.init.normal_(model.lm.norm.weight)
    before = {file: file.read_bytes() for file in source.iterdir()}
    model.generation_config.max_length = 7
    model.save_pretrained(out)
    assert {file: file.read_bytes() for file in source.iterdir()} == before
    again = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(again(x).logits, model(x).logits)


@torch.no_grad()
def test_tensors_that_transformers_ignores(tmp_path):
    """The head of a tied model, and the rotary buffers of old checkpoints."""
    source = dense(tmp_path / "dense", tie_word_embeddings=True)
    wanted = in_fp64(source)(tokens(1, SAME)).logits
    weights = {k: x for file in source.glob("*.safetensors") for k, x in load_file(file).items()}
    for file in source.glob("model*"):
        file.unlink()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    convert(source, tmp_path / "sparse", **PATTERN)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "sparse", dtype=torch.float64)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    torch.testing.assert_close(model(tokens(1, SAME)).logits, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("kind", "shard"), [("llama", "40KB"), ("llama", "1GB"), ("qwen2", "1GB"), ("qwen3", "1GB")]
)
@torch.no_grad()
def test_an_index_begins_with_the_projections(kind, shard, tmp_path):
    """With one query head a group its scores are those of the tokens; else of the mean query."""
    source = dense(tmp_path / "dense", kind, num_key_value_heads=4, rms_norm_eps=1e-3)
    model = AutoModelForCausalLM.from_pretrained(source)
    shutil.rmtree(source)
    model.save_pretrained(source, max_shard_size=shard)
    x, logits = tokens(2, LONG), []
    for scores in ("token_max", "index"):
        convert(source, tmp_path / scores, **PATTERN, scores=scores)
        sparse = AutoModelForCausalLM.from_pretrained(tmp_path / scores, dtype=torch.float64)
        logits.append(sparse(x).logits)
    torch.testing.assert_close(*logits, rtol=0, atol=1e-12)
    source = dense(tmp_path / "grouped")
    convert(source, tmp_path / "mean", **PATTERN, scores="index")
    weights = LanguageModel(AutoConfig.from_pretrained(tmp_path / "mean").lm)
    load_initial(tmp_path / "mean", weights)
    found = weights.get_parameter("layers.1.attention.q_idx_proj.weight")
    q_proj = AutoModelForCausalLM.from_pretrained(source).model.layers[1].self_attn.q_proj.weight
    torch.testing.assert_close(found, q_proj.view(2, 2, 16, 64).mean(1).view(32, 64))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_smaller_index(kind, tmp_path):
    """An index begins with every second rotated pair of mean heads."""
    source = dense(tmp_path / "dense", kind, head_dim=32)
    given = {**PATTERN, "scores": "index", "index_dim": 16, "index_keys": "shared"}
    with pytest.raises(ValueError, match="index_heads must be at most 4, the query heads of an"):
        convert(source, tmp_path / "sparse", **given, index_heads=5)
    with pytest.raises(
        ValueError, match="index_dim must be a divisor of the head size, 32, got 48"
    ):
        convert(source, tmp_path / "sparse", **{**given, "index_dim": 48})
    convert(source, tmp_path / "sparse", **given, index_heads=3)
    model = LanguageModel(AutoConfig.from_pretrained(tmp_path / "sparse").lm)
    load_initial(tmp_path / "sparse", model)
    found = {name.split("1.attention.")[-1]: x for name, x in model.named_parameters()}
    layer = AutoModelForCausalLM.from_pretrained(source).model.layers[1].self_attn
    columns = torch.arange(0, 32, 2)  # column c is rotated with column c + 16
    heads = layer.q_proj.weight.view(4, 32, 64)[:, columns]
    wanted = torch.cat([heads[:2].mean(0), heads[2], heads[3]])
    torch.testing.assert_close(found["q_idx_proj.weight"], wanted)
    wanted = layer.k_proj.weight.view(2, 32, 64)[:, columns].mean(0)
    torch.testing.assert_close(found["k_idx_proj.weight"], wanted)
    if kind == "qwen3":
        torch.testing.assert_close(found["q_idx_norm.weight"], layer.q_norm.weight[columns])
    whole, half = (Rope(size, 1e4).inverse_frequencies(torch.device("cpu")) for size in (32, 16))
    torch.testing.assert_close(whole[::2], half)


def test_an_index_is_trained_on_a_frozen_base(tmp_path, monkeypatch, command):
    """From a dense model with its tokenizer to a run that changes the index alone."""
    monkeypatch.chdir(tmp_path)
    source = dense(Path("dense"), vocab_size=256, head_dim=16, bos_token_id=None, eos_token_id=0)
    as_transformers({"separator": SEPARATOR, "tokenizer": None}).save_pretrained(source)
    pattern = "--num-selected-blocks 4 --num-local-blocks 2 --block-size 16"
    said = command(f"convert dense sparse --scores index {pattern}")
    line = "; train its index: nsa train sparse/train.yaml --init-from sparse --data.path SHARDS"
    assert line in said
    shipped = load_config("sparse/train.yaml", {})
    assert (shipped.steps, shipped.global_batch * shipped.seq_len) == (600, 65_536)
    Path("texts").mkdir()
    for n in range(30):
        Path(f"texts/{n}.txt").write_text(f"{n} is a number, and {n + 1} too.\n" * 20)
    tokenizer = "--tokenizer file --tokenizer-path sparse/tokenizer.json"
    command(f"data prepare texts {tokenizer} --validation-fraction 0.2 --out shards")
    model = AutoConfig.from_pretrained("sparse").lm
    assert shipped.model == model
    short = "--steps 2 --seq-len 256 --micro-batch 1 --global-batch 1 --optim.index-lr 1e-2"
    short += " --device cpu --compute-dtype fp32 --eval-windows 1 --compile false"
    command(f"train sparse/train.yaml --init-from sparse --data.path shards --run-dir run {short}")
    base = {k: x for file in source.glob("*.safetensors") for k, x in load_file(file).items()}
    trained = load_file(next(Path("run/checkpoints").glob("*2/*.safetensors")))
    for name in dict(LanguageModel(model).named_parameters()):
        if "_idx_proj." not in name:
            assert torch.equal(trained[f"model.{name}"], base[llama_name(name)])
    moments = {name: x for name, x in trained.items() if name.endswith("exp_avg")}
    assert len(moments) == 4
    assert all("_idx_" in name and x.any() for name, x in moments.items())
    models = [AutoModelForCausalLM.from_pretrained(name) for name in ("dense", "sparse")]
    x = torch.randint(256, (1, SAME))
    torch.testing.assert_close(*(m(x).logits for m in models), rtol=0, atol=1e-4)


def write_gguf(file: Path, model: PreTrainedModel) -> None:
    """Write a Llama as llama.cpp does, with rotated pairs side by side."""
    gguf = pytest.importorskip("gguf")

    config, names = model.config, gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["ab", *map(chr, range(97, 96 + config.vocab_size))])
    writer.add_token_merges(["a b"])
    writer.add_token_types([1] * config.vocab_size)
    for name, x in model.state_dict().items():
        if "q_proj" in name or "k_proj" in name:
            halves = x.view(-1, 2, config.head_dim // 2, config.hidden_size)
            x = halves.transpose(1, 2).reshape(x.shape)
        writer.add_tensor(names.get_name(name, (".weight",)), x.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_older_transformers_read_no_gguf_file(tmp_path, monkeypatch):
    monkeypatch.setattr("nsa.hf.convert.find_spec", lambda name: name)
    monkeypatch.setattr("nsa.hf.convert.version", lambda name: "5.17.0")
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ValueError, match=r"be 5\.23 or newer for a GGUF file, got 5\.17\.0"):
        convert(tmp_path / "model.gguf", tmp_path / "sparse", **PATTERN)


@torch.no_grad()
def test_a_gguf_file(tmp_path):
    """Its floats are fp32, so that the norms' constant is near 1e-5; transformers gives it so."""
    source = dense(tmp_path / "dense", rms_norm_eps=1e-5)
    model = AutoModelForCausalLM.from_pretrained(source)
    write_gguf(tmp_path / "model.gguf", model)
    convert(tmp_path / "model.gguf", tmp_path / "sparse", **PATTERN)
    sparse = AutoModelForCausalLM.from_pretrained(tmp_path / "sparse")
    assert sparse.config.norm_eps == 9.999999747378752e-06
    x = tokens(2, SAME)
    torch.testing.assert_close(sparse(x).logits, model(x).logits, rtol=0, atol=1e-4)
    assert (tmp_path / "sparse/tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act of MODEL must be silu, got gelu"),
        ("llama", {"mlp_bias": True}, "mlp_bias of MODEL must be false, got True"),
        ("mistral", {"sliding_window": 64}, "sliding_window of MODEL must be null or .*got 64"),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "sliding_window of MODEL must be null or at least 512, got 8",
        ),
        (
            "mixtral",
            {"num_local_experts": 2},
            "model_type of MODEL must be one of llama, .*mixtral",
        ),
        ("llama", rope("dynamic", factor=2.0), "rope_parameters of MODEL must have .*dynamic"),
        (
            "llama",
            rope("yarn", factor=4.0, attention_factor=3.0),
            "rope_parameters of MODEL must have no other settings than .*'attention_factor': 3.0",
        ),
        ("llama", {"head_dim": 24}, "head_dim must be a multiple of 16 from 16 to 256, got 24"),
    ],
    ids=str,
)
def test_what_a_sparse_model_lacks(kind, changes, said, tmp_path, monkeypatch, refusal):
    monkeypatch.chdir(tmp_path)
    dense(Path("dense"), kind, **changes)
    assert re.search(said, refusal("convert dense sparse"))
    assert not Path("sparse").exists()


@torch.no_grad()
def test_the_command(tmp_path, monkeypatch, command, refusal):
    monkeypatch.chdir(tmp_path)
    assert "MODEL must be a folder with config.json" in refusal("convert dense sparse")
    source = dense(Path("dense"))
    said = command("convert dense sparse")
    assert "sparse: llama with 24 blocks of 64, " in said
    assert "equal to the dense model for the first 1,536 tokens" in said
    config = AutoConfig.from_pretrained("sparse").lm.nsa
    assert (config.num_init_blocks, config.num_local_blocks) == (1, 9)
    assert (config.branches, config.scores, config.gate) == (("slc",), "token_max", "fixed")
    x = tokens(1, 1536)
    logits = AutoModelForCausalLM.from_pretrained("sparse", dtype=torch.float64)(x).logits
    torch.testing.assert_close(logits, in_fp64(source)(x).logits, rtol=0, atol=1e-10)
    assert "OUT must not exist yet, got sparse" in refusal("convert dense sparse")
    options = "--num-selected-blocks 8 --num-init-blocks 2 --num-local-blocks 3 --block-size 16"
    command(f"convert dense other {options} --scores compressed")
    config = AutoConfig.from_pretrained("other").lm.nsa
    assert (config.num_selected_blocks, config.num_init_blocks) == (8, 2)
    assert (config.num_local_blocks, config.block_size, config.scores) == (3, 16, "compressed")
    if find_spec("gguf") is None:
        Path("model.gguf").touch()
        assert "without the package gguf, got model.gguf" in refusal("convert model.gguf more")
    file = source / "config.json"
    config = json.loads(file.read_text())
    for change, said in (
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config of MODEL must be"),
        ({"num_hidden_layers": 3}, "MODEL must hold model.layers.2.* as .*got None"),
        ({"num_hidden_layers": 1}, "MODEL must hold no model.layers.1.*, got one"),
        ({"hidden_size": 80}, r"MODEL must hold model.embed_tokens.weight as \(40, 80\), got"),
    ):
        file.write_text(json.dumps({**config, **change}))
        assert re.search(said, refusal("convert dense more"))
