"""What ``nsa bench train`` compares: the model of a configuration, its dense twins, other configurations and variants."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nsa.bench.targets import UNMASKED
from nsa.errors import check, fail
from nsa.lm.twins import dense_matched, twin
from nsa.train.config import TrainConfig
from nsa.train.load import load_config

PROVIDERS = ("nsa", "dense", "dense-matched")
# Precisions by the name that rows have for them.
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
# Most steps from one row of metrics to the next.
LOG_EVERY = 20
_WHERE = "nsa bench train"


@dataclass(frozen=True)
class Subject:
    """One run to be measured.

    Attributes:
        name: as provider in the rows.
        config: the run.
        file: the configuration file that it comes from, without any change.
        base: the first configuration, for a row to say what differs; None for that one and the
            dense models beside it.
    """

    name: str
    config: TrainConfig
    file: TrainConfig
    base: TrainConfig | None = None


@dataclass(frozen=True)
class Batching:
    """Changes of length and batch that the command asked for; without any, a run stays as it is.

    Attributes:
        seq_len: length S; None leaves it.
        tokens: of an optimizer step, at least one window; None leaves the number of windows.
        micro_batch: windows of one forward and backward, or all of a step with fewer; None leaves
            it.
    """

    seq_len: int | None = None
    tokens: int | None = None
    micro_batch: int | None = None

    def apply(self, config: TrainConfig) -> TrainConfig:
        """The run with these changes.

        Raises:
            ValueError: the windows of a step are no whole number of micro-batches, or the run needs
                several processes.
        """
        hint = "Give --world-size 1 --accumulation N, N times as large as before."
        check(config.world_size == 1, _WHERE, "world_size", "be 1", config.world_size, hint)
        seq_len = self.seq_len or config.seq_len
        windows = config.global_batch
        if self.tokens is not None:
            windows = max(1, self.tokens // seq_len)
        micro_batch = self.micro_batch or config.micro_batch
        if self.tokens is None:
            rule, hint = f"be at most the {windows} windows of a step", "Give --tokens, too."
            check(micro_batch <= windows, _WHERE, "--micro-batch", rule, micro_batch, hint)
        micro_batch = min(micro_batch, windows)
        rule, hint = f"divide the {windows} windows of a step", "Give --micro-batch."
        check(windows % micro_batch == 0, _WHERE, "micro_batch", rule, micro_batch, hint)
        return replace(
            config,
            seq_len=seq_len,
            micro_batch=micro_batch,
            accumulation=windows // micro_batch,
            global_batch=windows,
        )


def as_measured(config: TrainConfig, warmup: int, steps: int) -> TrainConfig:
    """The run as the benchmark needs it, which no row counts as a change.

    It is long enough for these steps and writes a row of metrics among them, as often as its own
    ``log_every`` says if it can; it makes no evaluation, checkpoint and sample.
    """
    return replace(
        config,
        steps=max(config.steps, warmup + steps + 2),
        log_every=min(config.log_every or LOG_EVERY, steps),
        eval_windows=0,
        checkpoint_every=0,
        sample_tokens=0,
    )


def find_subjects(
    paths: Sequence[Path],
    settings: Mapping[str, str],
    variants: Mapping[str, Mapping[str, str]],
    names: Sequence[str] | None,
    *,
    unmasked: bool = False,
) -> list[Subject]:
    """The runs to be measured.

    Args:
        paths: configurations; the first one is the base.
        settings: dotted names to values, for all of them.
        variants: by name, settings on top of the base.
        names: of the base and the dense models beside it; None means all of them, or the base alone
            beside other configurations.
        unmasked: adds the dense model whose documents see each other, on the same batches.

    Raises:
        ValueError: a configuration is not valid, or two subjects have one name.
    """
    file, base = load_config(paths[0]), load_config(paths[0], settings)
    if names is None:
        names = PROVIDERS if len(paths) == 1 else (base.model.attention,)
    names = [*names, *[UNMASKED] * unmasked]
    found = [Subject(name, _beside(base, name), file) for name in names]
    others = {path.stem: (load_config(path, settings), load_config(path)) for path in paths[1:]}
    same = len(others) == len(paths) - 1
    check(same, _WHERE, "--config", "name files of different names", ", ".join(map(str, paths)))
    for name, changes in variants.items():
        check(name not in others, _WHERE, "--variant", "have a name of its own", name)
        others[name] = (load_config(paths[0], {**settings, **changes}), file)
    known = (*PROVIDERS, UNMASKED)
    for name, (config, its_file) in others.items():
        rule = f"be none of {', '.join(known)}"
        check(name not in known, _WHERE, "the name of a variant", rule, name)
        found.append(Subject(name, config, its_file, base))
    return found


def _beside(base: TrainConfig, name: str) -> TrainConfig:
    """The base with the model of this provider, everything else the same."""
    if name == "dense-matched":
        return replace(base, model=dense_matched(base.model))
    if name == UNMASKED:
        base = replace(base, data=replace(base.data, document_mask=False))
    return replace(base, model=twin(base.model, "nsa" if name == "nsa" else "dense"))


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
