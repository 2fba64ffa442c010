"""What ``nsa bench train`` compares: the model of a configuration, its dense twins, other configurations and variants."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nsa.errors import check, fail
from nsa.lm.twins import dense_matched, twin
from nsa.train.config import TrainConfig
from nsa.train.load import load_config

PROVIDERS = ("nsa", "dense", "dense-matched")
# Precisions by the name that rows have for them.
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
# Steps from one row of metrics to the next, or fewer where fewer are timed.
LOG_EVERY = 20
_WHERE = "nsa bench train"


@dataclass(frozen=True)
class Subject:
    """One run to be measured.

    Attributes:
        name: as provider in the rows.
        config: the run.
        base: the first configuration, for a row to say what differs; None for that one and its twins.
    """

    name: str
    config: TrainConfig
    base: TrainConfig | None = None


@dataclass(frozen=True)
class Batching:
    """How many tokens an optimizer step has; lengths come from the command.

    Attributes:
        tokens: of a step; at least one window is taken.
        micro_batch: windows of one forward and backward; None takes all at once.
        as_configured: leaves length and batch of every configuration as they are.
    """

    tokens: int = 65_536
    micro_batch: int | None = None
    as_configured: bool = False

    def apply(self, config: TrainConfig, seq_len: int, warmup: int, steps: int) -> TrainConfig:
        """The run at this length, without evaluations, checkpoints and sample, long enough for these steps.

        Windows are one sequence each: a dense kernel over masked documents would be another, slower one.
        """
        if not self.as_configured:
            windows = max(1, self.tokens // seq_len)
            micro_batch = min(self.micro_batch or windows, windows)
            check(windows % micro_batch == 0, _WHERE, "--micro-batch", f"divide the {windows} windows of a step", micro_batch)
            config = replace(
                config, seq_len=seq_len, world_size=1, micro_batch=micro_batch, accumulation=windows // micro_batch,
                global_batch=windows,
            )  # fmt: skip
        check(config.world_size == 1, _WHERE, "world_size", "be 1", config.world_size)
        return replace(
            config, steps=max(config.steps, warmup + steps + 2), eval_windows=0, sample_tokens=0, checkpoint_every=0,
            log_every=min(LOG_EVERY, steps),
            data=replace(config.data, document_mask=False),
        )  # fmt: skip


def find_subjects(
    paths: Sequence[Path], settings: Mapping[str, str], variants: Mapping[str, Mapping[str, str]], names: Sequence[str] | None
) -> list[Subject]:
    """The runs to be measured.

    Args:
        paths: configurations; the first one is the base.
        settings: dotted names to values, for all of them.
        variants: by name, settings on top of the base.
        names: of the base and its twins; None means all of them, or the base alone beside other configurations.

    Raises:
        ValueError: a configuration is not valid, or two subjects have one name.
    """
    base = load_config(paths[0], settings)
    if names is None:
        names = PROVIDERS if len(paths) == 1 else (base.model.attention,)
    found = [Subject(name, replace(base, model=_model(base, name))) for name in names]
    others = {path.stem: load_config(path, settings) for path in paths[1:]}
    check(len(others) == len(paths) - 1, _WHERE, "--config", "name files of different names", ", ".join(map(str, paths)))
    for name, changes in variants.items():
        check(name not in others, _WHERE, "--variant", "have a name of its own", name)
        others[name] = load_config(paths[0], {**settings, **changes})
    for name, config in others.items():
        check(name not in PROVIDERS, _WHERE, "the name of a variant", f"be none of {', '.join(PROVIDERS)}", name)
        found.append(Subject(name, config, base))
    return found


def _model(base: TrainConfig, name: str) -> Any:
    if name == "dense-matched":
        return dense_matched(base.model)
    return twin(base.model, "nsa" if name == "nsa" else "dense")


def differences(base: TrainConfig, other: TrainConfig) -> dict[str, Any]:
    """Settings of ``other`` that are not those of ``base``, by dotted name."""
    before, after = (dict(_flat(dataclasses.asdict(config))) for config in (base, other))
    return {name: value for name, value in after.items() if name not in before or before[name] != value}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in tree.items():
        found += _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(f"{prefix}{name}", value)]
    return found


def parse_settings(function: str, option: str, texts: Sequence[str]) -> dict[str, str]:
    """``KEY=VALUE`` texts as names and values; the configuration checks both.

    Raises:
        ValueError: a text is of another form.
    """
    found: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        check(bool(equals) and bool(key), function, option, "be KEY=VALUE", repr(text), "For example: compile=true")
        check(key not in found, function, option, "name a setting once", key)
        found[key.replace("-", "_")] = value
    return found


def parse_train_variant(text: str) -> tuple[str, dict[str, str]]:
    """``NAME:KEY=VALUE,...`` with settings of the configuration as keys.

    Raises:
        ValueError: the text does not say that.
    """
    name, colon, rest = text.partition(":")
    if not (re.fullmatch(r"[\w.-]+", name) and colon and rest):
        fail(_WHERE, "--variant", "be a name, a colon and KEY=VALUE pairs", repr(text))
    return name, parse_settings(_WHERE, "--variant", re.split(r",(?![^\[(]*[\])])", rest))
