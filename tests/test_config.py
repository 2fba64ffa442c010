"""NSAConfig and the other sections: validation, JSON, derived sizes."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import re
from typing import Any

import numpy as np
import pytest

from nsa import NSAConfig, RopeScaling
from nsa.lm.config import LMConfig
from nsa.rope import Rope
from nsa.train.config import (
    CheckpointingConfig,
    DataConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)

# The argument that is refused, its value, and what else is given.
REFUSED: list[tuple[str, Any, dict[str, Any]]] = [
    *(
        (argument, value, {})
        for argument, values in {
            "num_heads": (0, -4),
            "num_kv_heads": (0, 5),
            "head_dim": (0, 8, 40, 272),
            "value_dim": (100, 512),
            "compress_block_size": (0, 128),  # the second is longer than a selection block
            "compress_stride": (0, 2),
            "block_size": (0, 48, 256),
            "num_selected_blocks": (0, 2),  # the second is fewer than the forced ones
            "num_init_blocks": (-1,),
            "num_local_blocks": (0,),
            "window_size": (0, -512),
            "branches": ((), ("cmp", "sel"), ("cmp", "cmp")),
            "phi": ("attention",),
            "compress_hidden_size": (0,),
            "compress_rope": ("end",),
            "gate": ("relu",),
            "gate_bias": (math.inf, math.nan),
            "gate_hidden_size": (-1,),
            "gate_temperature": (2.0,),  # of a sigmoid
            "rope_theta": (1.0, math.inf, math.nan),
            "rotary_dim": (7, 0, 66),
            "index_heads": (0, 65),
            "index_dim": (0, 40),
            "index_keys": ("head",),
            "index_rotary_dim": (7, 0, 66),
        }.items()
        for value in values
    ),
    ("num_heads", 65, {"num_kv_heads": 1}),
    ("compress_stride", 16, {"compress_block_size": 30}),  # does not divide l
    ("compress_stride", 3, {"compress_block_size": 30}),
    ("compress_stride", 12, {"compress_block_size": 24}),  # does not divide l'
    ("compress_stride", 32, {"compress_block_size": 32, "block_size": 16}),
    ("num_selected_blocks", 8, {"num_init_blocks": 4, "num_local_blocks": 5}),
    ("coarse_block_size", 128, {"scores": "token_max", "num_coarse_blocks": 9}),
    ("coarse_block_size", 128, {"scores": "index", "num_coarse_blocks": 9}),
    ("score_precision", "fp8", {"scores": "random"}),
    ("scores", "mean", {}),
    ("gate_temperature", 0.0, {"gate": "softmax"}),
    ("gate_bias", 2.0, {"gate": "softmax"}),
    ("gate_bias", 2.0, {"gate": "fixed"}),
]


@pytest.mark.parametrize(("argument", "value", "others"), REFUSED)
def test_refused(argument, value, others):
    given = re.escape(str(value[-1]) if isinstance(value, tuple) and value else str(value))
    with pytest.raises(ValueError, match=rf"^{argument} must .*, got .*{given}.*\.$"):
        NSAConfig(**others, **{argument: value})


# Of every field a value that is not its default.
OTHERS: dict[str, Any] = {
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 48,
    "value_dim": 32,
    "compress_block_size": 16,
    "compress_stride": 8,
    "block_size": 32,
    "num_selected_blocks": 9,
    "num_init_blocks": 2,
    "num_local_blocks": 3,
    "num_selected_blocks_table": ((-1, 40, 5), (0, 99, 6)),
    "scores": "token_max",
    "index_heads": 3,
    "index_dim": 32,
    "index_keys": "shared",
    "index_rotary_dim": 16,
    "coarse_block_size": 128,
    "num_coarse_blocks": 5,
    "score_precision": "fp8",
    "window_size": 128,
    "branches": ("slc", "win"),
    "share_kv": True,
    "phi": "mlp",
    "compress_hidden_size": 7,
    "compress_rope": "start",
    "gate": "softmax",
    "gate_bias": 1.5,
    "gate_hidden_size": 3,
    "gate_temperature": 2.0,
    "rope_theta": 500.0,
    "rotary_dim": 32,
    "rope_scaling": RopeScaling("yarn", 4.0, 512, 16.0, 2.0),
    "qk_norm": True,
    "qk_norm_eps": 1e-5,
    "projection_bias": "qkv",
}


def test_json_comes_back_equal():
    """Every field: lists for tuples, and the scaling as a mapping."""
    assert set(OTHERS) == {field.name for field in dataclasses.fields(NSAConfig)}
    sigmoid = {**OTHERS, "gate": "sigmoid", "gate_temperature": 1.0}
    sigmoid |= {"coarse_block_size": None, "num_coarse_blocks": 0}
    for values in ({**OTHERS, "gate_bias": 0.0, "scores": "compressed"}, sigmoid, {}):
        config = NSAConfig(**values)
        found = NSAConfig(**json.loads(json.dumps(dataclasses.asdict(config))))
        assert (found, hash(found), found.text) == (config, hash(config), config.text)
        rope = Rope.from_config(config)
        assert Rope(**json.loads(rope.text)) == rope


def test_numbers_are_python_s():
    """Of numpy, and integers for floats: equal configurations have equal text."""
    given: dict[str, Any] = {"num_heads": np.int64(24), "rope_theta": np.float32(500)}
    config = NSAConfig(**given, gate_bias=2)
    assert config.text == NSAConfig(num_heads=24, gate_bias=2.0, rope_theta=500.0).text


@pytest.mark.parametrize(
    ("argument", "value", "rule"),
    [
        ("share_kv", "false", "be True or False, got 'false'"),
        ("num_local_blocks", 2.5, "be an integer, got 2.5"),
        ("num_local_blocks", True, "be an integer, got True"),
        ("head_dim", "16", "be an integer, got '16'"),
        ("head_dim", None, "be an integer, got None"),
        ("gate_bias", "1", "be a finite number, got '1'"),
        ("gate_bias", False, "be a finite number, got False"),
        ("gate_bias", 10**400, "be a finite number, got 10"),
        ("phi", ["mean"], "be mean, linear or mlp, got ['mean']"),
        ("branches", "cmp", "be a list or tuple, got 'cmp'"),
        ("branches", ("cmp", 1), "be cmp, slc or win, got 1"),
        ("num_selected_blocks_table", ((-1, 40),), "have 3 entries, got (-1, 40)"),
        ("num_selected_blocks_table", ((-1, 40, 3.0),), "be an integer, got 3.0"),
        ("rope_scaling", "yarn", "contain fields of RopeScaling, got 'yarn'"),
        (
            "rope_scaling",
            {"kin": "yarn"},
            "contain only fields of RopeScaling, got kin. The nearest is kind",
        ),
    ],
)
def test_a_wrong_type_is_refused_by_name(argument, value, rule):
    with pytest.raises(ValueError, match=re.escape(f"{argument} must {rule}")):
        NSAConfig(**{argument: value})


@pytest.mark.parametrize(
    ("cls", "values", "message"),
    [
        (RopeScaling, {"factor": 0.5}, "factor must be at least 1"),
        (RopeScaling, {"factor": math.inf}, "factor must"),
        (RopeScaling, {"beta_slow": 0.0}, "beta_slow must"),
        (RopeScaling, {"beta_fast": 0.5}, "beta_slow must"),
        (RopeScaling, {"original_max_position": 0}, "original_max_position must"),
        (RopeScaling, {"factor": "2"}, "factor must be a finite number, got '2'"),
        (NSAConfig, {"rope_scaling": {"kind": "x"}}, "kind must be linear, yarn or llama3, got x"),
        (LMConfig, {"tie_head": "no"}, "tie_head must be True or False, got 'no'"),
        (LMConfig, {"nsa": {"windw": 1}}, "nsa must contain only fields of NSAConfig, got windw"),
        (TrainConfig, {"steps": 1.5}, "steps must be an integer, got 1.5"),
        (DataConfig, {"source": "web"}, "source must be corpus, stdlib, folder"),
        (OptimConfig, {"betas": [0.9]}, "betas must have 2 entries, got [0.9]"),
        (CheckpointingConfig, {"first": "1"}, "first must be an integer, got '1'"),
        (ParallelConfig, {"bucket_mib": None}, "bucket_mib must be a finite number, got None"),
        (Rope, {"dim": 16, "scaling": 3}, "scaling must contain fields of RopeScaling, got 3"),
    ],
)
def test_every_section_checks_its_types(cls, values, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        cls(**values)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_selected_blocks": 1, "num_init_blocks": 0, "num_local_blocks": 1},
        {"num_heads": 64, "num_kv_heads": 1, "head_dim": 16, "value_dim": 256},
        {"compress_block_size": 64, "window_size": 1, "rotary_dim": 2, "branches": ["win"]},
        {"compress_block_size": 8, "compress_stride": 4, "block_size": 16},
    ],
)
def test_accepted(changes):
    NSAConfig(**changes)


def test_branches_have_one_order():
    assert NSAConfig(branches=("win", "cmp")).branches == ("cmp", "win")
    assert NSAConfig(branches=("win", "slc", "cmp")) == NSAConfig()


def test_frozen_and_comparable():
    config = NSAConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_heads = 3  # type: ignore[misc]
    assert hash(config) == hash(NSAConfig())
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("branches", "scores"),
    [(("cmp",), True), (("slc",), True), (("win",), False), (("slc", "win"), True)],
)
def test_derived_sizes(branches, scores):
    config = NSAConfig(branches=branches, num_heads=12, num_kv_heads=4)
    assert config.group_size == 3
    assert config.num_branches == len(branches)
    assert config.compresses_keys is scores


@pytest.mark.parametrize(
    ("changes", "heads"),
    [
        ({}, (4, 4, 64, 64)),
        ({"index_heads": 3, "index_dim": 32}, (12, 4, 32, 32)),
        ({"index_heads": 3, "index_keys": "shared", "rotary_dim": 24}, (3, 1, 64, 24)),
        ({"index_dim": 128, "index_rotary_dim": 16}, (4, 4, 128, 16)),
    ],
)
def test_heads_of_an_index(changes, heads):
    config = NSAConfig(num_heads=12, num_kv_heads=4, scores="index", **changes)
    found = config.scoring
    sizes = (found.num_heads, found.num_kv_heads, found.head_dim, found.rotary_dim)
    assert (sizes, found.scores) == (heads, "token_max")
    assert (config.has_index, config.scores_tokens, config.compresses_keys) == (True, True, True)
    alone = dataclasses.replace(config, branches=("win",))
    assert (alone.has_index, alone.scores_tokens) == (False, False)
