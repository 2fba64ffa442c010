"""Layers with attention and patterns of their own: configuration, model, training, reports."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from typing import Any

import numpy as np
import pytest
import torch

from nsa import NativeSparseAttention, cli
from nsa.bench.train import check_model, fault_of, gate_config, model_of
from nsa.config import NSAConfig
from nsa.errors import UserError
from nsa.lm.baseline import parameters_by_part
from nsa.lm.config import LMConfig
from nsa.lm.flops import flops_per_token
from nsa.lm.llama import llama_settings
from nsa.lm.model import LanguageModel
from nsa.plan import make_plan, step_memory
from nsa.train.checkpoint import list_checkpoints
from nsa.train.config import CheckpointingConfig, ParallelConfig, TrainConfig
from nsa.train.distributed.processes import Processes
from nsa.train.distributed.strategy import distribute
from nsa.train.load import load_config, to_yaml
from nsa.train.loss import NextTokenLoss
from nsa.train.runs.inspection import (
    check_selects,
    heat_maps,
    inspect_run,
    inspection_page,
    selection_lines,
)
from tests.lm.test_decoder import MIXED, make
from tests.train.cases import new_trainer, resumed, stored_tensors, tiny_config
from tests.train.runs.test_report import Page

WINDOW = {"window_size": 16, "branches": ["win"]}
# Layers 0 and 2 select blocks of 16 and 32 tokens, layer 1 is dense, layer 3 has a window.
LAYERS: list[dict[str, Any]] = [{}, {"attention": "dense"}, {"block_size": 32}, WINDOW]
FOUR: dict[str, Any] = {"num_layers": 4, "layers": LAYERS}


# --- the configuration ----------------------------------------------------------------------------
def test_each_layer_has_its_changes():
    model = make(**MIXED)
    kinds = [type(layer.attention).__name__ for layer in model.decoder_layers()]
    assert kinds == ["DenseAttention"] + 4 * ["NativeSparseAttention"]
    patterns = [layer.attention.config for layer in model.decoder_layers()]
    assert [x.window_size for x in patterns] == [32, 32, 32, 16, 16]
    assert [x.block_size for x in patterns] == [16, 32, 16, 16, 16]
    assert [x.num_kv_heads for x in patterns] == [2, 4, 2, 2, 2]
    found = {tuple(n): kind.attention for kind, n in model.config.kinds.items()}
    assert found == {(0,): "dense", (1,): "nsa", (2,): "nsa", (3, 4): "nsa"}
    table = dataclasses.replace(model.config.nsa, num_selected_blocks_table=((4, 9, 3), (1, 9, 3)))
    config = dataclasses.replace(model.config, nsa=table)
    rows = [config.layer(n).nsa.num_selected_blocks_table for n in range(5)]
    assert rows == [(), ((-1, 9, 3),), (), (), ((-1, 9, 3),)]


def test_forms_of_the_changes(tmp_path):
    """A list, a mapping, YAML and the command line, whose values are words."""
    given: Any = {1: {"attention": "dense"}, "2": {"block_size": 32}, "3-3": WINDOW}
    config = LMConfig(num_layers=4, layers=given)
    as_list = LMConfig(**FOUR)
    assert as_list.kinds == config.kinds
    assert config.layers == {
        "1": {"attention": "dense"},
        "2": {"block_size": 32},
        "3-3": {"window_size": 16, "branches": ("win",)},
    }
    again = json.loads(json.dumps(dataclasses.asdict(config)))
    assert (LMConfig(**again), hash(LMConfig(**again))) == (config, hash(config))
    empty: Any = (None, {}, {0: {}}, [{}, {}, {}, {}])
    for layers in empty:
        assert LMConfig(num_layers=4, layers=layers) == LMConfig(num_layers=4)
    run = TrainConfig(model=config)
    path = tmp_path / "run.yaml"
    path.write_text(to_yaml(run))
    assert load_config(path) == run
    word = "{1: {attention: dense}, 2: {block_size: 32}, 3-3: {window_size: 16, branches: [win]}}"
    assert load_config(None, {"model.num_layers": "4", "model.layers": word}) == run
    word = "[{}, {attention: dense}, {block_size: 32}, {window_size: 16, branches: [win]}]"
    found = load_config(None, {"model.num_layers": "4", "model.layers": word})
    assert found.model == as_list
    assert load_config(path, {"model.layers": "null"}).model == LMConfig(num_layers=4)
    path.write_text("model: {layers: {0-3: {rope_scaling: {factor: 2.5}, share_kv: yes}}}")
    pattern = load_config(path).model.layer(3).nsa
    assert pattern.rope_scaling is not None
    assert (pattern.rope_scaling.factor, pattern.share_kv) == (2.5, True)


@pytest.mark.parametrize(
    ("word", "error"),
    [
        ("{0: {windw_size: 3}}", "layers.0 must contain .*, got windw_size. The nearest is window"),
        ("{0: {window_size: -3}}", "layers.0.window_size must be positive, got -3."),
        ("{0: {window_size: x}}", "layers.0.window_size must be an integer, got 'x'."),
        ("{2-3: {attention: full}}", "layers.2-3.attention must be nsa or dense, got full."),
        ("{12: {}}", "layers must have layers from 0 to 11 as keys, such as .*, got 12."),
        ("{4-12: {}}", "layers must have .*, got 4-12."),
        ("{7-4: {}}", "layers must have .*, got 7-4."),
        ("{a: {}}", "layers must have .*, got a."),
        ("{4-7: {}, 5: {}}", "layers must be given once for layer 5, got 4-7 and 5."),
        ("{0: dense}", "layers.0 must be a mapping of changes, got 'dense'."),
        ("[{}]", "layers must have one entry for each of the 12 layers, got 1."),
        ("dense", "layers must be a list, or a mapping from layers to changes, got 'dense'."),
    ],
)
def test_mistakes_are_named(word, error):
    with pytest.raises(UserError, match=f"^model.{error}"):
        load_config(None, {"model.layers": word})


# --- the model ------------------------------------------------------------------------------------
def test_output_is_that_of_the_layers_one_by_one():
    """Modules that are made from patterns written out here."""
    model, x = make(**MIXED), torch.randint(40, (3, 90))
    block = {"block_size": 32, "compress_block_size": 16, "compress_stride": 8, "num_kv_heads": 4}
    base = dataclasses.asdict(model.config.nsa)
    last = {"window_size": 16, "branches": ("slc", "win"), "compress_rope": "none"}
    expected = model.embedding(x)
    for layer, changes in zip(model.decoder_layers(), (None, block, {}, last, last), strict=True):
        normed = layer.attention_norm(expected)
        if changes is not None:
            module = NativeSparseAttention(24, NSAConfig(**{**base, **changes})).double()
            module.load_state_dict(layer.attention.state_dict())
            found = module(normed)
        else:  # by a formula: test_dense_attention.py
            found = layer.attention(normed)
        expected = expected + found
        expected = expected + layer.mlp(layer.mlp_norm(expected))
    torch.testing.assert_close(model(x), model.head(model.norm(expected)), rtol=1e-9, atol=1e-10)


def test_parameters_and_operations():
    config = dataclasses.replace(make(**MIXED).config, vocab_size=300)
    assert parameters_by_part(config) == LanguageModel(config).num_parameters()
    # embedding and norm multiply nothing; a layer's work is that of a model of such layers
    head = 6 * 300 * 24
    alone = [flops_per_token(config.layer(n), 200) - head for n in range(5)]
    assert flops_per_token(config, 200) == pytest.approx(head + sum(alone) / 5)
    assert len({*alone}) == 4


# --- training -------------------------------------------------------------------------------------
def test_a_mixed_model_learns_and_resumes(tmp_path):
    """The loss falls, gradients reach every weight, and a resumed run ends with the same bits."""
    options: dict[str, Any] = {"model": FOUR, "checkpoint_every": 6, "steps": 12, "log_every": 1}
    whole = new_trainer(tmp_path, "whole", **options)
    before = [x.clone() for x in whole.model.parameters()]
    whole.run()
    assert not any(map(torch.equal, before, whole.model.parameters()))
    rows = [json.loads(row) for row in whole.run_folder.metrics_jsonl.read_text().splitlines()]
    losses = [row["loss_nats"] for row in rows if "loss_nats" in row]
    assert losses[-1] < losses[0] - 0.5
    named = {name for row in rows for name in row if name.startswith("gate_slc_mean_layer")}
    assert named == {"gate_slc_mean_layer_0", "gate_slc_mean_layer_2"}
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    last = list_checkpoints(tmp_path / "cut/checkpoints")[-1]
    shutil.rmtree(last)
    again = resumed(tmp_path, "cut", **options)
    assert again.state.progress.step == 6
    again.run()
    first, second = (
        stored_tensors(tmp_path / name / "checkpoints" / last.name) for name in ("whole", "cut")
    )
    assert first.keys() == second.keys() >= {"model.head.weight"}
    assert all(torch.equal(first[name], second[name]) for name in first)
    changed = {**options, "steps": 14, "model": {**FOUR, "layers": [*LAYERS[:3], {}]}}
    with pytest.raises(UserError, match=r"model\.layers\.3\.branches must stay"):
        resumed(tmp_path, "cut", **changed)


def test_more_kinds_of_layers_than_graphs_of_a_function(monkeypatch):
    """Layers are compiled one by one, and a function has few graphs unless it is allowed more."""
    layers = [{"attention": "dense", "num_heads": 2 * n + 2} for n in range(3)]
    loss = NextTokenLoss(make(num_layers=3, layers=layers))
    x, offsets = torch.arange(70) % 40, torch.tensor([0, 31, 70], dtype=torch.int32)
    expected = loss(x, x, offsets, 39)
    compiler = functools.partial(torch.compile, fullgraph=True, backend="eager")
    monkeypatch.setattr("nsa.train.distributed.strategy._GRAPHS_PER_KIND", 2)
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=2):
        strategy = distribute(loss, ParallelConfig(), Processes(), torch.device("cpu"))
        torch.testing.assert_close(strategy.training_module(compiler)(x, x, offsets, 39), expected)
    torch.compiler.reset()


# --- reports --------------------------------------------------------------------------------------
def test_inspection_shows_the_sparse_layers(tmp_path):
    trainer = new_trainer(tmp_path, steps=1, model=FOUR)
    trainer.run()
    found = inspect_run(trainer.run_folder)
    assert [(x.layer, [*x.gates], x.selection is None) for x in found.layers] == [
        (0, ["cmp", "slc", "win"], False),
        (2, ["cmp", "slc", "win"], False),
        (3, ["win"], True),
    ]
    assert [line.split(":")[0] for line in found.lines()][1:] == ["layer 0", "layer 2", "layer 3"]
    assert "Selected blocks" in Page(inspection_page(found)).shown
    assert [line.split("|")[0] for line in selection_lines(found.layers)][1:] == [
        *("layer  0 ", "layer  2 ")
    ]
    assert [x.get_title() for x in heat_maps(found.layers).axes[:2]] == ["layer 0", "layer 2"]
    check_selects("--show-selection", trainer.config.model)
    found.record(tmp_path / "blocks.npz")
    with np.load(tmp_path / "blocks.npz") as blocks:
        assert {*blocks} == {"layer0", "layer2", "block_size"}
        assert blocks["block_size"].tolist() == [16, 32]
    dense = new_trainer(tmp_path, "d", steps=1, model={"layers": {0: {"attention": "dense"}}})
    dense.run()
    with pytest.raises(UserError, match="RUN must be a run of a model with attention nsa"):
        inspect_run(dense.run_folder)
    with pytest.raises(UserError, match="--show-selection must be left out"):
        check_selects("--show-selection", dense.config.model)


LAYERS_0_6_7 = "{0: {attention: dense}, 6-7: {attention: dense}}"


def test_the_plan_of_a_mixed_model(capsys):
    words = ["plan", "78m", "--gpu", "h100", "--model.layers", LAYERS_0_6_7]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "\n    layers 0, 6-7: dense, 0.04601 GFLOP and" in said
    assert "\n    layers 1-5, 8-11: nsa, 0.05" in said
    mixed, sparse, dense = (
        load_config("78m", given)
        for given in ({"model.layers": words[-1]}, {}, {"model.attention": "dense"})
    )
    layers = make_plan(mixed, None).layers
    assert [x["layers"] for x in layers] == [[0, 6, 7], [1, 2, 3, 4, 5, 8, 9, 10, 11]]
    ends = [make_plan(each, None).layers[0] for each in (dense, sparse)]
    for name in ("flops_per_token", "saved_bytes"):
        assert [x[name] for x in layers] == [x[name] for x in ends]
    peaks = [step_memory(each).peak for each in (dense, mixed, sparse)]
    assert peaks == sorted(peaks)
    assert (peaks[2] - peaks[1]) / (peaks[2] - peaks[0]) == pytest.approx(3 / 12, rel=0.2)
    policy = CheckpointingConfig("range", 0, 3)
    found = make_plan(dataclasses.replace(mixed, checkpointing=policy), None).layers
    assert [x["layers"] for x in found] == [[0], [6, 7], [1, 2, 3], [4, 5, 8, 9, 10, 11]]


def test_the_benchmark_of_a_mixed_model(tmp_path):
    config = tiny_config(
        tmp_path, model={"num_layers": 9, "layers": {"5-8": {"attention": "dense"}}}
    )
    assert model_of(config, "nsa") == config
    assert model_of(config, "dense").model.attention_kind == "dense"
    total = parameters_by_part(config.model)["total"]
    matched = parameters_by_part(model_of(config, "dense-matched").model)["total"]
    assert matched == pytest.approx(total, rel=0.01)
    gate = gate_config(config)
    assert [gate.model.layer(n).attention for n in range(3)] == ["nsa", "nsa", "dense"]
    assert (gate.model.num_layers, gate.seq_len) == (3, 64)
    assert check_model(gate, torch.device("cpu"))["correct"]
    ours = ["range_fwd_kernel", "select_kernel", "selected_fwd_kernel"]
    assert fault_of(config, [*ours, "flash_fwd_kernel"], "fwd") is None
    assert "flash" in str(fault_of(config, ours, "fwd"))
    assert "select" in str(fault_of(config, ["flash_fwd_kernel", "range_fwd_kernel"], "fwd"))


def test_llama_has_no_layers_of_their_own():
    config = LMConfig(attention="dense", mlp="swiglu", layers={"0": {"attention": "nsa"}})
    with pytest.raises(UserError, match=r"model\.layers must be left out for Llama's layout"):
        llama_settings(config)
