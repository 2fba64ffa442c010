"""NSAConfig: defaults, validation, derived sizes."""

from __future__ import annotations

import dataclasses
import math
import pickle
import re
from typing import Any

import pytest

from nsa import NSAConfig, RopeScaling


def test_defaults_are_those_of_the_page():
    assert NSAConfig() == NSAConfig(
        num_heads=12,
        num_kv_heads=2,
        head_dim=64,
        value_dim=64,
        compress_block_size=32,
        compress_stride=16,
        block_size=64,
        num_selected_blocks=16,
        num_init_blocks=1,
        num_local_blocks=2,
        window_size=512,
        branches=("cmp", "slc", "win"),
        share_kv=False,
        phi="mean",
        compress_rope="middle",
        gate="sigmoid",
        gate_bias=0.0,
        gate_hidden_size=0,
        rope_theta=10_000.0,
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
        }.items()
        for value in values
    ),
    ("num_heads", 65, {"num_kv_heads": 1}),
    ("compress_stride", 16, {"compress_block_size": 30}),  # does not divide l
    ("compress_stride", 3, {"compress_block_size": 30}),
    ("compress_stride", 12, {"compress_block_size": 24}),  # does not divide l'
    ("compress_stride", 32, {"compress_block_size": 32, "block_size": 16}),
    ("num_selected_blocks", 8, {"num_init_blocks": 4, "num_local_blocks": 5}),
    ("gate_temperature", 0.0, {"gate": "softmax"}),
    ("gate_bias", 2.0, {"gate": "softmax"}),
    ("gate_bias", 2.0, {"gate": "fixed"}),
]


@pytest.mark.parametrize(("argument", "value", "others"), REFUSED)
def test_refused(argument, value, others):
    given = re.escape(str(value[-1]) if isinstance(value, tuple) and value else str(value))
    with pytest.raises(ValueError, match=rf"^{argument} must .*, got .*{given}.*\.$"):
        NSAConfig(**others, **{argument: value})


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"kind": "ntk"}, "kind"),
        ({"factor": 0.5}, "factor"),
        ({"factor": math.inf}, "factor"),
        ({"beta_slow": 0.0}, "beta_slow"),
        ({"beta_fast": 0.5}, "beta_slow"),
        ({"original_max_position": 0}, "original_max_position"),
    ],
)
def test_refused_scaling(changes, argument):
    with pytest.raises(ValueError, match=rf"^{argument} must .*, got .*\.$"):
        RopeScaling(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_init_blocks": 0},
        {"num_selected_blocks": 1, "num_init_blocks": 0, "num_local_blocks": 1},
        {"num_heads": 64, "num_kv_heads": 1},
        {"num_heads": 7, "num_kv_heads": 7},
        {"head_dim": 192, "value_dim": 128},
        {"head_dim": 16, "value_dim": 256},
        {"compress_block_size": 64},
        {"compress_block_size": 16},
        {"block_size": 128},
        {"block_size": 32},
        {"window_size": 1},
        {"rotary_dim": 2},
        {"branches": ["win"]},
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
    assert dataclasses.replace(config, window_size=3) != config


@pytest.mark.parametrize(
    ("branches", "scores"),
    [(("cmp",), True), (("slc",), True), (("win",), False), (("slc", "win"), True)],
)
def test_derived_sizes(branches, scores):
    config = NSAConfig(branches=branches, num_heads=12, num_kv_heads=4)
    assert config.group_size == 3
    assert config.num_branches == len(branches)
    assert config.scores_blocks is scores
