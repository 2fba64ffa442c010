"""NSAConfig: defaults, validation, derived sizes."""

from __future__ import annotations

import dataclasses
import math
import pickle

import pytest

from nsa import NSAConfig, RopeScaling


def test_defaults_are_those_of_the_page():
    config = NSAConfig()
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.value_dim) == (
        12,
        2,
        64,
        64,
    )
    assert (config.compress_block_size, config.compress_stride, config.block_size) == (32, 16, 64)
    assert (config.num_selected_blocks, config.num_init_blocks, config.num_local_blocks) == (
        16,
        1,
        2,
    )
    assert config.window_size == 512
    assert config.branches == ("cmp", "slc", "win")
    assert (config.share_kv, config.phi, config.compress_rope, config.gate) == (
        False,
        "mean",
        "middle",
        "sigmoid",
    )
    assert (config.gate_hidden_size, config.rope_theta) == (0, 10_000.0)


def test_small_pattern_is_allowed():
    NSAConfig(
        compress_block_size=8,
        compress_stride=4,
        block_size=16,
        num_selected_blocks=4,
        window_size=32,
    )


@pytest.mark.parametrize(
    ("changes", "argument", "value"),
    [
        ({"num_heads": 12, "num_kv_heads": 5}, "num_kv_heads", "5"),
        ({"num_heads": 0}, "num_heads", "0"),
        ({"num_heads": -4}, "num_heads", "-4"),
        ({"num_kv_heads": 0}, "num_kv_heads", "0"),
        ({"num_heads": 65, "num_kv_heads": 1}, "num_heads", "65"),
        ({"head_dim": 0}, "head_dim", "0"),
        ({"head_dim": 40}, "head_dim", "40"),
        ({"head_dim": 8}, "head_dim", "8"),
        ({"head_dim": 272}, "head_dim", "272"),
        ({"value_dim": 100}, "value_dim", "100"),
        ({"value_dim": 512}, "value_dim", "512"),
        ({"compress_block_size": 0}, "compress_block_size", "0"),
        # longer than a selection block
        ({"compress_block_size": 128}, "compress_block_size", "128"),
        ({"compress_block_size": 30}, "compress_stride", "16"),  # d does not divide l
        ({"compress_stride": 0}, "compress_stride", "0"),
        ({"compress_stride": 2}, "compress_stride", "2"),
        ({"compress_stride": 3, "compress_block_size": 30}, "compress_stride", "3"),
        # d does not divide l'
        ({"compress_stride": 12, "compress_block_size": 24}, "compress_stride", "12"),
        (
            {"compress_stride": 32, "compress_block_size": 32, "block_size": 16},
            "compress_stride",
            "32",
        ),
        ({"block_size": 48}, "block_size", "48"),
        ({"block_size": 256}, "block_size", "256"),
        ({"block_size": 0}, "block_size", "0"),
        ({"num_selected_blocks": 0}, "num_selected_blocks", "0"),
        ({"num_selected_blocks": 2}, "num_selected_blocks", "2"),  # fewer than the forced ones
        (
            {"num_selected_blocks": 8, "num_init_blocks": 4, "num_local_blocks": 5},
            "num_selected_blocks",
            "8",
        ),
        ({"num_init_blocks": -1}, "num_init_blocks", "-1"),
        ({"num_local_blocks": 0}, "num_local_blocks", "0"),
        ({"window_size": 0}, "window_size", "0"),
        ({"window_size": -512}, "window_size", "-512"),
        ({"branches": ()}, "branches", r"\(\)"),
        ({"branches": ("cmp", "sel")}, "branches", "sel"),
        ({"branches": ("cmp", "cmp")}, "branches", "cmp"),
        ({"phi": "attention"}, "phi", "attention"),
        ({"compress_hidden_size": 0}, "compress_hidden_size", "0"),
        ({"compress_rope": "end"}, "compress_rope", "end"),
        ({"gate": "relu"}, "gate", "relu"),
        ({"gate_hidden_size": -1}, "gate_hidden_size", "-1"),
        ({"gate": "softmax", "gate_temperature": 0.0}, "gate_temperature", "0.0"),
        ({"gate_temperature": 2.0}, "gate_temperature", "2.0"),
        ({"rope_theta": 1.0}, "rope_theta", "1.0"),
        ({"rope_theta": math.inf}, "rope_theta", "inf"),
        ({"rope_theta": math.nan}, "rope_theta", "nan"),
        ({"rotary_dim": 7}, "rotary_dim", "7"),
        ({"rotary_dim": 0}, "rotary_dim", "0"),
        ({"rotary_dim": 66}, "rotary_dim", "66"),
    ],
)
def test_refused(changes, argument, value):
    with pytest.raises(ValueError, match=rf"^NSAConfig: {argument} must .*, got .*{value}.*\.$"):
        NSAConfig(**changes)


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
    with pytest.raises(ValueError, match=rf"^RopeScaling: {argument} must .*, got .*\.$"):
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
