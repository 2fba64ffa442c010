"""The configurations of the package: they load, come in pairs, and their comments are true."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa import configs
from nsa.errors import UserError
from nsa.lm.model import LanguageModel
from nsa.train.config import DataConfig, TrainConfig
from nsa.train.data import make_tokenizer
from nsa.train.load import load_config
from nsa.train.optim import parameter_groups

ROOT = configs.FOLDER
NAMES = configs.names()
SPARSE = [name for name in NAMES if not name.endswith("-dense")]
# Settings of the 78M configuration, which is specified.
SPECIFIED = """
model.width 768
model.num_layers 12
model.vocab_size 256
model.tie_head False
model.mlp silu
model.mlp_hidden_size 3072
model.attention nsa
model.nsa.num_heads 12
model.nsa.num_kv_heads 2
model.nsa.head_dim 64
model.nsa.value_dim 64
model.nsa.compress_block_size 32
model.nsa.compress_stride 16
model.nsa.block_size 64
model.nsa.num_selected_blocks 16
model.nsa.window_size 512
model.nsa.phi mean
model.nsa.gate sigmoid
model.nsa.rope_theta 10000.0
model.nsa.rope_scaling None
model.nsa.share_kv False
model.nsa.gate_bias 0.0
optim.name adamw
optim.lr 0.0002
optim.betas (0.9, 0.999)
optim.warmup_steps 2000
optim.min_lr_ratio 0.0
optim.weight_decay 0.01
optim.grad_clip 1.0
seq_len 2048
micro_batch 2
accumulation 2
compute_dtype bf16
seed 1337
checkpoint_every 5000
steps 50000
"""


def comment(name: str) -> str:
    lines = (ROOT / f"{name}.yaml").read_text().splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))


@functools.cache
def meta_model(config: TrainConfig) -> LanguageModel:
    with torch.device("meta"):
        return LanguageModel(config.model)


def num_parameters(config: TrainConfig) -> int:
    return meta_model(config).num_parameters()["total"]


def state_bytes(config: TrainConfig) -> int:
    """Weights, gradients, AdamW's two moments and Muon's one, all fp32."""
    groups = parameter_groups(meta_model(config), config.optim)
    one_moment = sum(parameter.numel() for parameter in groups.muon.values())
    return 4 * (4 * num_parameters(config) - one_moment)


@functools.cache
def vocab_size(tokenizer: Any) -> int:
    return make_tokenizer(DataConfig(tokenizer=tokenizer), ()).vocab_size


@pytest.mark.parametrize("name", NAMES)
def test_each_loads_and_fits_its_tokenizer(name):
    config = load_config(name)
    assert config.model.vocab_size == vocab_size(config.data.tokenizer)
    assert config.world_size == (2 if config.parallel.strategy == "fsdp" else 1)
    assert config.optim.warmup_steps < config.steps


@pytest.mark.parametrize("name", SPARSE)
def test_the_dense_configuration_differs_in_the_attention_alone(name):
    sparse, dense = load_config(name), load_config(f"{name}-dense")
    assert (sparse.model.attention, dense.model.attention) == ("nsa", "dense")
    model = replace(dense.model, attention="nsa", layers=sparse.model.layers)
    assert replace(dense, model=model) == sparse
    assert f"comparison with {name}.yaml" in comment(f"{name}-dense")


def stated(name: str, pattern: str, *values: float) -> None:
    """Assert that a comment gives these numbers, each rounded to the digits that it shows."""
    found = re.search(pattern, comment(name))
    assert found is not None
    for text, value in zip(found.groups(), values, strict=True):
        assert f"{value:.{len(text.partition('.')[2])}f}" == text.replace(",", "")


@pytest.mark.parametrize("name", NAMES)
def test_parameters_tokens_and_memory_in_the_comment(name):
    config = load_config(name)
    stated(name, r"Model: ([\d.]+)M parameters", num_parameters(config) / 1e6)
    if name in SPARSE:
        factors = config.steps, config.global_batch, config.seq_len
        tokens = config.steps * config.global_batch * config.seq_len / 1e6
        pattern = r"Tokens: ([\d,]+) steps x (\d+) sequences? x ([\d,]+) = ([\d.]+)M"
        stated(name, pattern, *factors, tokens)
        unit = "GB" if " GB for fp32 weights" in comment(name) else "MB"
        size = state_bytes(config) / {"MB": 1e6, "GB": 1e9}[unit]
        stated(name, rf"Memory: ([\d.]+) {unit} for fp32 weights", size)


def test_the_78m_configuration_is_the_one_that_is_specified():
    config = load_config("78m")
    for line in SPECIFIED.strip().splitlines():
        name, value = line.split(maxsplit=1)
        assert str(attrgetter(name)(config)) == value, name
    assert config.steps * config.global_batch * config.seq_len == 409_600_000
    # The 78.3M leave out the gates of each head: weight and bias in each layer.
    gates = 12 * 3 * config.model.nsa.num_heads * (config.model.width + 1)
    assert abs(num_parameters(config) - gates - 78.3e6) < 0.05e6


def test_the_78m_configuration_with_shared_keys_has_as_many_parameters():
    own, shared = load_config("78m"), load_config("78m-shared")
    assert num_parameters(own) == num_parameters(shared)
    nsa = replace(shared.model.nsa, share_kv=False, gate_bias=0.0)
    model = replace(shared.model, nsa=nsa, mlp_hidden_size=own.model.mlp_hidden_size)
    optim = replace(shared.optim, name="adamw", lr=2e-4, muon_lr=0.02, weight_decay=0.01)
    alike = replace(shared, model=model, optim=optim)
    assert replace(alike, micro_batch=own.micro_batch, accumulation=own.accumulation) == own


def test_the_117m_configuration_is_the_78m_one_with_another_vocabulary():
    bytes_, gpt2 = load_config("78m"), load_config("117m")
    found = (gpt2.model.vocab_size, gpt2.model.tie_head, gpt2.data.tokenizer)
    assert found == (50257, True, "gpt2")
    model = replace(gpt2.model, vocab_size=256, tie_head=False)
    data = replace(gpt2.data, tokenizer="byte")
    assert replace(gpt2, model=model, data=data, loss_chunk=bytes_.loss_chunk) == bytes_


def test_the_fineweb_configuration_is_the_117m_one_on_prepared_text():
    gpt2, fineweb = load_config("117m"), load_config("117m-fineweb")
    assert (fineweb.data.source, fineweb.data.path) == ("shards", "data/fineweb-edu")
    assert replace(fineweb, data=replace(fineweb.data, source="stdlib", path=None)) == gpt2
    text = (ROOT / "117m-fineweb.yaml").read_text()
    prepared = re.search(r"--max-tokens (\d+) --out data/fineweb-edu", text)
    assert prepared is not None
    assert int(prepared[1]) > fineweb.steps * fineweb.global_batch * fineweb.seq_len


# ---------------------------------------------------------------------------------------- names


def test_the_names_are_listed_with_what_they_are(nsa):
    lines = nsa("configs").splitlines()
    assert [line.split()[0] for line in lines] == NAMES
    said = "78m                 78M parameters on bytes: the pattern of the paper, S = 2,048."
    assert said in lines
    assert all(line.endswith(".") and ". " not in line for line in lines)
    assert nsa("configs --folder") == f"{ROOT}\n"


def test_a_word_is_a_name_or_a_path(tmp_path):
    assert load_config("78m") == load_config(ROOT / "78m.yaml")
    for path in ("78m.yaml", "78m.yml", "mine/78m", str(tmp_path / "78m")):
        assert configs.find(path) == Path(path)
    with pytest.raises(UserError) as caught:
        load_config("78mm")
    rule = "the configuration must be one that comes with the package, got '78mm'."
    hint = "The nearest is 78m; `nsa configs` lists them; the path of a file ends in .yaml."
    assert str(caught.value) == f"{rule} {hint}"
    with pytest.raises(UserError, match="give its name: 78m"):
        load_config("configs/78m.yaml")


def test_rows_have_the_names_of_the_first_release():
    assert set(configs.RENAMED.values()) <= {*NAMES}
    assert configs.name_in_rows("78m") == configs.name_in_rows("seed.yaml") == "seed"
    assert configs.name_in_rows("cpu-small") == "cpu-small"
