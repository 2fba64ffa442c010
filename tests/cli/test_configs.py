"""The committed configurations: they load, come in pairs, are sparse, and their comments tell the truth."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from nsa import configs
from nsa.errors import UserError
from nsa.lm.model import LanguageModel
from nsa.train.config import TrainConfig
from nsa.train.data import make_tokenizer
from nsa.train.load import load_config
from nsa.train.optim import parameter_groups

ROOT = configs.FOLDER
PATHS = sorted(ROOT.glob("*.yaml"))
NAMES = {path.stem for path in PATHS}
FP32 = 4  # bytes


def comment(path: Path) -> str:
    lines = path.read_text().splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))


def meta_model(config: TrainConfig) -> LanguageModel:
    with torch.device("meta"):
        return LanguageModel(config.model)


def num_parameters(config: TrainConfig) -> int:
    return meta_model(config).num_parameters()["total"]


def state_bytes(config: TrainConfig) -> int:
    """fp32 weights and gradients, AdamW's two moments, Muon's one."""
    groups = parameter_groups(meta_model(config), config.optim.name)
    one_moment = sum(parameter.numel() for parameter in groups.muon.values())
    return FP32 * (4 * num_parameters(config) - one_moment)


def test_the_configurations_there_must_be():
    assert {"1b", "cpu-small", "gpu-small", "78m", "117m", "117m-fineweb"} <= NAMES


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_each_loads_and_fits_its_tokenizer(path):
    config = load_config(path)
    assert config.model.vocab_size == make_tokenizer(config.data, ()).vocab_size
    assert config.world_size == (2 if config.parallel.strategy == "fsdp" else 1)
    assert config.optim.warmup_steps < config.steps


@pytest.mark.parametrize("name", sorted(name for name in NAMES if not name.endswith("-dense")))
def test_the_dense_twin_differs_in_the_attention_alone(name):
    sparse, dense = (load_config(ROOT / f"{stem}.yaml") for stem in (name, f"{name}-dense"))
    assert (sparse.model.attention, dense.model.attention) == ("nsa", "dense")
    assert (
        dataclasses.replace(dense, model=dataclasses.replace(dense.model, attention="nsa"))
        == sparse
    )
    assert f"twin of {name}.yaml" in comment(ROOT / f"{name}-dense.yaml")


@pytest.mark.parametrize("name", ["cpu-small", "gpu-small"])
def test_short_windows_are_truly_sparse(name):
    config = load_config(ROOT / f"{name}.yaml")
    pattern = config.model.nsa
    assert pattern.branches == ("cmp", "slc", "win")
    assert pattern.num_selected_blocks * pattern.block_size <= config.seq_len / 2
    assert pattern.window_size <= config.seq_len / 4
    # the scores decide something
    assert pattern.num_selected_blocks > pattern.num_init_blocks + pattern.num_local_blocks


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_parameters_tokens_and_memory_in_the_comment(path):
    config, text = load_config(path), comment(path)
    parameters = num_parameters(config)
    stated = re.search(r"Model: ([\d.]+)M parameters", text)
    assert stated is not None
    assert f"{parameters / 1e6:.{len(stated[1].partition('.')[2])}f}" == stated[1]
    if path.stem.endswith("-dense"):
        return
    tokens = re.search(r"Tokens: ([\d,]+) steps x (\d+) windows x ([\d,]+) = ([\d.]+)M", text)
    assert tokens is not None
    factors = [int(tokens[index].replace(",", "")) for index in (1, 2, 3)]
    assert factors == [config.steps, config.global_batch, config.seq_len]
    assert f"{config.steps * config.global_batch * config.seq_len / 1e6:.1f}" == tokens[4]
    memory = re.search(r"Memory: ([\d.]+) (MB|GB) for fp32 weights", text)
    assert memory is not None
    unit = {"MB": 1e6, "GB": 1e9}[memory[2]]
    assert f"{state_bytes(config) / unit:.{len(memory[1].partition('.')[2])}f}" == memory[1]


def test_the_78m_configuration_is_the_one_that_is_specified():
    config = load_config(ROOT / "78m.yaml")
    model, pattern, optim = config.model, config.model.nsa, config.optim
    assert (model.width, model.num_layers, model.vocab_size, model.tie_head) == (
        768,
        12,
        256,
        False,
    )
    assert (model.mlp, model.mlp_hidden_size, model.attention) == ("silu", 4 * 768, "nsa")
    assert (pattern.num_heads, pattern.num_kv_heads, pattern.head_dim, pattern.value_dim) == (
        12,
        2,
        64,
        64,
    )
    assert (pattern.compress_block_size, pattern.compress_stride, pattern.block_size) == (
        32,
        16,
        64,
    )
    assert (pattern.num_selected_blocks, pattern.window_size, pattern.phi, pattern.gate) == (
        16,
        512,
        "mean",
        "sigmoid",
    )
    assert (pattern.rope_theta, pattern.rope_scaling, pattern.share_kv) == (10_000, None, False)
    assert (config.seq_len, config.micro_batch, config.accumulation, config.compute_dtype) == (
        2048,
        2,
        2,
        "bf16",
    )
    assert (optim.name, optim.lr, optim.betas, optim.warmup_steps) == (
        "adamw",
        2e-4,
        (0.9, 0.999),
        2000,
    )
    assert (optim.min_lr_ratio, optim.weight_decay, optim.grad_clip) == (0.0, 0.01, 1.0)
    assert (config.seed, config.checkpoint_every, config.steps) == (1337, 5000, 50_000)
    assert config.steps * config.global_batch * config.seq_len == 409_600_000
    # the 78.3M have no gates per head
    assert abs(num_parameters(config) - 12 * num_gate_parameters(config) - 78.3e6) < 0.05e6


def num_gate_parameters(config: TrainConfig) -> int:
    return 3 * config.model.nsa.num_heads * (config.model.width + 1)  # of a layer: weight and bias


def test_the_1b_configuration_is_what_its_name_says():
    config = load_config(ROOT / "1b.yaml")
    assert 0.9e9 < num_parameters(config) < 1.3e9
    assert (config.parallel.strategy, config.checkpointing.policy, config.model.attention) == (
        "fsdp",
        "operators",
        "nsa",
    )
    for world_size, accumulation in ((2, 4), (4, 2)):
        load_config(
            ROOT / "1b.yaml", {"world_size": str(world_size), "accumulation": str(accumulation)}
        )


def test_the_117m_configuration_is_the_78m_one_with_another_vocabulary():
    bytes_, gpt2 = (load_config(ROOT / f"{name}.yaml") for name in ("78m", "117m"))
    assert (gpt2.model.vocab_size, gpt2.model.tie_head, gpt2.data.tokenizer) == (
        50257,
        True,
        "gpt2",
    )
    model = dataclasses.replace(gpt2.model, vocab_size=256, tie_head=False)
    data = dataclasses.replace(gpt2.data, tokenizer="byte")
    assert dataclasses.replace(gpt2, model=model, data=data, loss_chunk=bytes_.loss_chunk) == bytes_


def test_the_fineweb_configuration_is_the_117m_one_on_prepared_text():
    gpt2, fineweb = (load_config(ROOT / f"{name}.yaml") for name in ("117m", "117m-fineweb"))
    assert (fineweb.data.source, fineweb.data.path) == ("shards", "data/fineweb-edu")
    data = dataclasses.replace(fineweb.data, source="stdlib", path=None)
    assert dataclasses.replace(fineweb, data=data) == gpt2
    prepared = re.search(
        r"--max-tokens (\d+) --out data/fineweb-edu", (ROOT / "117m-fineweb.yaml").read_text()
    )
    assert prepared is not None
    assert int(prepared[1]) > fineweb.steps * fineweb.global_batch * fineweb.seq_len


# ------------------------------------------------------------------------------------------------------------------
# names


def test_the_names_are_listed_with_what_they_are(nsa):
    lines = nsa("configs").splitlines()
    assert [line.split()[0] for line in lines] == sorted(NAMES)
    assert (
        "78m                 78M parameters on bytes: the pattern of the paper, S = 2,048." in lines
    )
    assert all(line.endswith(".") and ". " not in line for line in lines)
    assert nsa("configs --folder") == f"{ROOT}\n"


def test_a_word_is_a_name_or_a_path(tmp_path):
    assert load_config("78m") == load_config(ROOT / "78m.yaml")
    for path in ("78m.yaml", "78m.yml", "mine/78m", str(tmp_path / "78m")):
        assert configs.find(path) == Path(path)
    with pytest.raises(UserError) as caught:
        load_config("78n")
    assert str(caught.value) == (
        "configuration: name must be one that comes with the package, got '78n'. The nearest is 78m; "
        "`nsa configs` lists them; the path of a file ends in .yaml."
    )
    with pytest.raises(UserError, match="take it by its name: 78m"):
        load_config("configs/78m.yaml")


def test_names_of_the_release_before_are_taken(caplog):
    for old, new in configs.RENAMED.items():
        assert configs.find(old) == ROOT / f"{new}.yaml"
        assert f"the configuration {old} is called {new} now" in caplog.text
        assert configs.name_in_rows(new) == configs.name_in_rows(f"{old}.yaml") == old
    assert set(configs.RENAMED.values()) <= NAMES
    assert configs.name_in_rows("cpu-small") == "cpu-small"
