"""Configuration from files and overrides: what is accepted, and what is refused in which words."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa.config import NSAConfig, RopeScaling
from nsa.errors import UserError
from nsa.lm.config import LMConfig
from nsa.train import load
from nsa.train.config import DataConfig, OptimConfig, RecallConfig, TrainConfig
from nsa.train.load import load_config, to_yaml


def file_with(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path | None, **overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def leaves(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting of a configuration by its dotted name."""
    for entry in dataclasses.fields(section):
        name, value = f"{prefix}{entry.name}", getattr(section, entry.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{name}.")
        else:
            yield name, value


# --- what comes out -------------------------------------------------------------------------------

positive = st.floats(min_value=1e-12, max_value=1e12)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["null", "no", "3e-4", "010", "~", "#", ""]
)
kinds = st.sampled_from(["linear", "yarn"])
rope_scalings = st.none() | st.builds(RopeScaling, kind=kinds, factor=st.floats(1, 100))
attentions = st.sampled_from(["nsa", "dense"])
patterns = st.builds(
    NSAConfig,
    branches=st.sets(st.sampled_from(["cmp", "slc", "win"]), min_size=1).map(tuple),
    share_kv=st.booleans(),
    gate_bias=st.floats(-9, 9),
    compress_hidden_size=st.none() | st.integers(1, 9),
    rope_theta=st.floats(1, 1e12, exclude_min=True),
    rope_scaling=rope_scalings,
)
runs = st.builds(
    TrainConfig,
    model=st.builds(LMConfig, nsa=patterns, attention=attentions, norm_eps=positive),
    data=st.builds(DataConfig, source=st.just("folder"), path=names, pattern=names),
    optim=st.builds(
        OptimConfig,
        lr=positive,
        betas=st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)),
    ),
    steps=st.integers(1, 10**9),
    seed=st.integers(0, 2**40),
    compile=st.booleans(),
)


@settings(max_examples=25)
@given(config=runs)
def test_written_configuration_reads_back_equal(config, tmp_path_factory):
    assert load_config(file_with(tmp_path_factory.mktemp("run"), to_yaml(config))) == config


def test_every_setting_is_written_described_and_an_option():
    known = {setting.name: setting for setting in load.settings()}
    assert all(setting.help.endswith(".") and len(setting.help) > 10 for setting in known.values())
    model = LMConfig(nsa=NSAConfig(rope_scaling=RopeScaling()))
    config = TrainConfig(model, DataConfig(recall=RecallConfig()))
    del known["model.nsa.rope_scaling"], known["data.recall"]
    assert [name for name, _ in leaves(config)] == list(known)
    assert yaml.safe_load(to_yaml(config)) == json.loads(json.dumps(dataclasses.asdict(config)))
    words = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in leaves(config)
    }
    assert load_config(None, words) == config
    assert load_config() == TrainConfig()


def test_the_type_of_a_setting_decides_what_a_word_means(tmp_path):
    """And not YAML 1.1: false, text, a number of seconds, eight."""
    for text, value in (("3e-4", 3e-4), ("1", 1.0), ("1_000.5", 1000.5), ("+2.", 2.0)):
        from_file = load_config(file_with(tmp_path, f"optim: {{lr: {text}}}"))
        assert from_file == load_config(None, {"optim.lr": text})
        assert (from_file.optim.lr, type(from_file.optim.lr)) == (value, float)
    for text in ("0.8,0.9", "[0.8, 0.9]"):
        assert load_config(None, {"optim.betas": text}).optim.betas == (0.8, 0.9)
    text = "{data: {source: folder, path: no, pattern: 12:30:45}, steps: 010, compile: yes}"
    config = load_config(file_with(tmp_path, text))
    assert (config.data.path, config.data.pattern) == ("no", "12:30:45")
    assert (config.steps, config.compile) == (10, True)
    config = load_config(None, {"data.source": "folder", "data.path": "2024", "compile": "no"})
    assert (config.data.path, config.compile) == ("2024", False)


# --- overrides ------------------------------------------------------------------------------------


def test_overrides_win_over_the_file_and_come_before_its_checks(tmp_path):
    path = file_with(tmp_path, "micro_batch: 8\ndata: {source: folder}\n")
    assert "global_batch" in refusal(path, **{"data.path": "x"})
    assert "data.path" in refusal(path, global_batch="16")
    config = load_config(path, {"global_batch": "16", "data.path": "2024"})
    assert (config.micro_batch, config.global_batch, config.data.path) == (8, 16, "2024")
    heads = {"model.nsa.num_heads": "9", "model.nsa.num_kv_heads": "9"}
    assert all("num_kv_heads" in refusal(None, **{name: "9"}) for name in heads)
    assert load_config(None, heads).model.nsa.num_kv_heads == 9


def test_a_section_that_may_be_null(tmp_path):
    path = file_with(tmp_path, "model: {nsa: {rope_scaling: {kind: yarn, factor: 4}}}")
    assert load_config(path).model.nsa.rope_scaling == RopeScaling("yarn", 4.0)
    assert load_config(path, {"model.nsa.rope_scaling": "null"}).model.nsa.rope_scaling is None
    null = file_with(tmp_path, "model: {nsa: {rope_scaling: null}}")
    config = load_config(null, {"model.nsa.rope_scaling.factor": "2"})
    assert config.model.nsa.rope_scaling == RopeScaling(factor=2.0)
    for first, second in (("", ".factor"), (".factor", "")):
        names = (f"model.nsa.rope_scaling{part}" for part in (first, second))
        assert "be left out with settings inside it" in refusal(
            None, **dict.fromkeys(names, "null")
        )


# --- refusals -------------------------------------------------------------------------------------


# Each file, and the message.
REFUSED = {
    "optim: {lrr: 1}\n": "names must be settings, got optim.lrr. The nearest is optim.lr.",
    "lr: 1\n": "names must be settings, got lr. The nearest is optim.lr.",
    "optim: {betas: {lrr: 1}}\n": "optim.betas must be a list or tuple, got {'lrr': '1'}.",
    "\noptim:\n  lr: fast\n": "optim.lr must be a finite number, got 'fast'.",
    "optim: {lr: nan}\n": "optim.lr must be a finite number, got nan.",
    "steps: 1e3\n": "steps must be an integer, got '1e3'.",
    "compile: 2\n": "compile must be True or False, got '2'.",
    "data: {pattern: [a]}\n": "data.pattern must be a string, got ['a'].",
    "model: {attention: desne}\n": (
        "model.attention must be nsa or dense, got desne. The nearest is dense."
    ),
    "optim: {betas: [0.9]}\n": "optim.betas must have 2 entries, got [0.9].",
    "optim: 3\n": "optim must contain fields of OptimConfig, got '3'.",
    "model: {nsa: {num_heads: 3, num_kv_heads: 2}}": (
        "model.nsa.num_kv_heads must divide num_heads (3), got 2."
    ),
    "steps: 5\nsteps: 6\n": "{path}:2 must be valid YAML, got steps twice in a section.",
    "- steps\n": "{path} must contain settings as 'name: value', got ['steps'].",
    "": (
        "{path} must contain a setting, got none. To use a configuration of the package, give its "
        "name; `nsa configs` lists them."
    ),
    "steps: 1\n---\nsteps: 2\n": "{path}:2 must be valid YAML, got but found another document.",
    "steps: !!python/name:os.system x\n": "steps must be an integer, got 'x'.",
    "data: &a\n  x: *a\n": "{path}:1 must be valid YAML, got found unconstructable recursive node.",
}


@pytest.mark.parametrize("text", REFUSED)
def test_bad_files_name_the_setting_and_the_rule(tmp_path, text):
    path = file_with(tmp_path, text)
    assert refusal(path) == REFUSED[text].replace("{path}", str(path))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("model.mlp", "silo", "model.mlp must be silu or swiglu, got silo. The nearest is silu."),
        ("optim.betas", "[0.9", "optim.betas must be a list or tuple, got '[0.9'."),
        (
            "optim.betas",
            "0.9,1",
            "optim.betas must lie between 0 and 1, 1 excluded, got (0.9, 1.0).",
        ),
        ("optim.lr.x", "3", "optim.lr must be a finite number, got {'x': '3'}."),
        ("steps", "1000000001", "steps must be at most 1,000,000,000, got 1000000001."),
    ],
)
def test_bad_overrides_name_the_setting(name, value, words):
    assert refusal(None, **{name: value}) == words


def test_files_that_cannot_be_read(tmp_path):
    file_with(tmp_path, "")
    assert f"The nearest is {tmp_path / 'run.yaml'}." in refusal(tmp_path / "runn.yaml")
    assert "YAML file that exists" in refusal(tmp_path / "quite" / "elsewhere.yaml")
    assert "YAML file that exists" in refusal(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"data: {path: \xe9}")
    assert "UTF-8" in refusal(tmp_path / "latin.yaml")
