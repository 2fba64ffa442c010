"""Learning rates: the sweeps, and what they say of the rates that experiments use."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from tools.evidence.arms import Arm, Group
from tools.evidence.experiments import CONFIGS
from tools.evidence.parts import BITS, VALIDATION, Figures, Part, table_of
from tools.evidence.training import read_lines

OLDER, SWEPT, MUON_SWEPT = "learning-rates.jsonl", "rates", "muon_rates"
Sweeps = dict[tuple[int, int, int], list[Figures]]


def read_sweeps(swept: Group) -> Sweeps:
    """Rows by tokens of a sequence, tokens of a step and steps.

    Args:
        swept: runs of ``rates``, beside which an older sweep lies in a file, or ``muon_rates``.
    """
    found: Sweeps = {}
    lines = read_lines(swept.rows / OLDER) if swept.name == SWEPT else []
    older = [row | {"file": OLDER} for row in lines]
    for row in [*older, *(arm.row | {"file": f"{swept.name}/"} for arm in swept.arms)]:
        size = row["tokens"] // row["steps"]
        found.setdefault((row["seq_len"], size, row["steps"]), []).append(row)
    return dict(sorted(found.items()))


def learning_rates(sweeps: Sweeps) -> list[Part]:
    """Validation loss by learning rate and model, the lowest of each model in bold."""
    parts = list[Part]()
    for (seq_len, size, steps), found in sweeps.items():
        models = sorted({row["model"] for row in found}, key=[*CONFIGS].index)
        best = {model: min(losses(found, model).values()) for model in models}
        by_rate: dict[float, Figures] = {row["lr"]: {"lr": row["lr"]} for row in found}
        for row in found:
            mark = "**" * (row[VALIDATION] == best[row["model"]])
            by_rate[row["lr"]][row["model"]] = f"{mark}{row[VALIDATION]:.4f}{mark}"
        row = found[0]
        parts += [
            f"{seq_len:,} tokens a sequence. Validation, {BITS} of {row['val_windows']} windows, "
            f"after {steps:,} steps of {size:,} tokens; seed {row['seed']}, one {row['gpu']} each. "
            f"From `{row['file']}`.",
            table_of(
                " | ".join(["learning rate=lr:g", *models]), [by_rate[lr] for lr in sorted(by_rate)]
            ),
        ]
    return parts


def against_sweeps(arms: Sequence[Arm], sweeps: Sweeps) -> str:
    """What a sweep of their length says of the learning rates of runs, in words.

    It is the longest of those with steps of as many tokens, or else of all.
    """
    row = arms[0].row
    own = row["tokens"] // row["steps"]
    known = [key for key in sweeps if key[0] == row["seq_len"]]
    if not known:
        return "Learning rates were not swept at this length."
    key = max(known, key=lambda key: (key[1] == own, key[2]))
    _, size, steps = key
    used = dict.fromkeys((arm.row["model"], arm.row["lr"]) for arm in arms)
    verdicts = [judged(model, lr, losses(sweeps[key], model)) for model, lr in used]
    about = f"Learning rates against the sweep of {steps:,} steps of {size:,} tokens"
    about += f" (here {row['steps']:,} of {own:,})" * (own != size)
    return f"{about}: {'; '.join(verdicts)}."


def losses(found: Sequence[Figures], model: str) -> dict[float, float]:
    """Validation losses of a model by learning rate."""
    return {row["lr"]: row[VALIDATION] for row in found if row["model"] == model}


def judged(model: str, lr: float, swept: dict[float, float]) -> str:
    """What a sweep says of a learning rate; only one with its best between others counts.

    Args:
        model: its name.
        lr: the rate that it was trained with.
        swept: losses of that model by rate.
    """
    if not swept:
        return f"{model} was not swept"
    rates, (best, *others) = sorted(swept), sorted(swept, key=swept.__getitem__)
    if best in (rates[0], rates[-1]):
        place = "only" if not others else "smallest" if best == rates[0] else "largest"
        return f"{lr:g} of {model} is not settled: its best, {best:g}, is the {place} rate tried"
    if lr in swept:
        verdict = "is its best" if lr == best else f"is not its best, {best:g}"
        return f"{lr:g} of {model} {verdict}"
    between = next(((a, b) for a, b in pairwise(rates) if a < lr < b), None)
    if between is None:
        return f"{lr:g} of {model} was not swept and lies outside of what was"
    place = f"{between[0]:g} and {between[1]:g}" + ", its two best" * (
        {*between} == {best, others[0]}
    )
    return f"{lr:g} of {model} was not swept and lies between {place}"
