"""What ``nsa bench train`` compares: NSA, dense models, other configurations and variants."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nsa.bench.targets import UNMASKED
from nsa.bench.variants import split_variant
from nsa.errors import check
from nsa.lm.baseline import dense_of_equal_size
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
            dense models that it is compared with.
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
        micro_batch = self.micro_batch or config.micro_batch
        if self.tokens is None:
            rule, hint = f"be at most the {windows} windows of a step", "Give --tokens, too."
            check(micro_batch <= windows, _WHERE, "--micro-batch", rule, micro_batch, hint)
        else:
            windows = max(1, self.tokens // seq_len)
            micro_batch = min(micro_batch, windows)
        rule, hint = f"divide the {windows} windows of a step", "Give --micro-batch."
        accumulation, remainder = divmod(windows, micro_batch)
        check(remainder == 0, _WHERE, "micro_batch", rule, micro_batch, hint)
        return replace(
            config,
            seq_len=seq_len,
            micro_batch=micro_batch,
            accumulation=accumulation,
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
    variants: Sequence[str] = (),
    names: Sequence[str] | None = None,
    *,
    unmasked: bool = False,
) -> list[Subject]:
    """The runs to be measured.

    Args:
        paths: configurations; the first one is the base.
        settings: dotted names to values, for all of them.
        variants: ``NAME:KEY=VALUE,...``, settings on top of the base.
        names: of the base and the dense models that it is compared with; None means all of them,
            or the base alone where there are other configurations.
        unmasked: adds the dense model whose attention crosses documents, on the same batches.

    Raises:
        ValueError: a configuration is not valid, or two subjects have one name.
    """
    file, base = load_config(paths[0]), load_config(paths[0], settings)
    if names is None:
        names = PROVIDERS if len(paths) == 1 else (base.model.attention,)
    names = [*names, *[UNMASKED] * unmasked]
    found = [Subject(name, _model_of(base, name), file) for name in names]
    for path in paths[1:]:
        config = load_config(path, settings)
        found.append(Subject(path.stem, config, load_config(path), base))
    for text in variants:
        name, changes = split_variant(_WHERE, text)
        config = load_config(paths[0], {**settings, **changes})
        found.append(Subject(name, config, file, base))
    taken = {*PROVIDERS, UNMASKED}
    for subject in found[len(names) :]:
        rule = f"be none of {', '.join(sorted(taken))}"
        check(subject.name not in taken, _WHERE, "the name of a subject", rule, subject.name)
        taken.add(subject.name)
    return found


def _model_of(base: TrainConfig, name: str) -> TrainConfig:
    """The base with the model of this provider, everything else the same."""
    if name == "dense-matched":
        return replace(base, model=dense_of_equal_size(base.model))
    if name == UNMASKED:
        base = replace(base, data=replace(base.data, document_mask=False))
    return replace(base, model=replace(base.model, attention="nsa" if name == "nsa" else "dense"))


def differences(base: TrainConfig, other: TrainConfig) -> dict[str, Any]:
    """Settings of ``other`` that are not those of ``base``, by dotted name."""
    before, after = (dict(_flat(dataclasses.asdict(config))) for config in (base, other))
    changed = (name for name in after if name not in before or before[name] != after[name])
    return {name: after[name] for name in changed}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
