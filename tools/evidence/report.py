"""The page on what models learn, made from committed rows alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np

from nsa.errors import check
from nsa.train.evaluation import Measurement, paired_difference
from nsa.train.measurements import load_measurement
from tools.accept.programs import say
from tools.evidence.arms import Arm, Group, read_group
from tools.evidence.equal import MASKS, SETTINGS, equal_tokens
from tools.evidence.experiments import CONFIGS, PROMPT
from tools.evidence.parts import (
    BITS,
    VALIDATION,
    Figures,
    Part,
    points,
    shared,
    source,
    table_of,
)
from tools.evidence.plots import Line, Panel, Plot, draw
from tools.evidence.rates import (
    MUON_SWEPT,
    SWEPT,
    Sweeps,
    against_sweeps,
    learning_rates,
    read_sweeps,
)
from tools.evidence.rows import FAILED
from tools.evidence.selected import selection, timed
from tools.evidence.training import STOPPED, read_lines

INTRODUCTION = """\
# What models learn

Made by `python -m tools.evidence report` from `benchmarks/quality`, in which the named files lie.
`python -m tools.evidence run --data BOOKS --out OUT` trains and measures,
`python -m tools.evidence take OUT` brings rows and files there; data and older rows:
[README](../../benchmarks/quality/README.md). Bits per byte are of text that no run was trained on.

Limits: one corpus, public-domain books in English, read as bytes. By the standards of large models
these are far from trained out. The test text is 30 books; other editions of a training book are not
recognised among them. Of three seeds are the models of 200M tokens at 2,048 a sequence, but for
`nsa` in small steps, by AdamW as by Muon; all else is of one. The trainings of 90M tokens and the
sweep of 440 steps had 217 books to train on, all others 1,036. Sections that do not name Muon are
of AdamW.

Models: `nsa` is `78m`, the pattern of the paper; `nsa-shared` is `78m-shared`, whose branches share
one key and value projection, whose gates start open, and whose MLP has 3,328 instead of 3,072, so
that its parameters are as many; the dense model of equal parameters is `78m-dense` with an MLP of
3,344, that of equal width `78m-dense` as it is. Large steps are of 65,536 tokens, eight times those
of `78m`: few for so many tokens ([log](../log.md)).
"""
ABOUT_MUON = (
    "Muon's learning rate is that of the matrices of the layers, beside AdamW's 4e-4 of all else; "
    "weight decay is 0.1 instead of 0.01."
)
GROUPS = (
    *("50k", "50k_shared", "2k", "muon", "muon_long", "200m", "90m", "8k"),
    *(SWEPT, MUON_SWEPT),
)
LOSSES = (
    "split | window=seq_len:, | windows:, | bits per byte=bits_per_byte:.4f | "
    "95% over documents=over | a bigram model's=bigram_bits_per_byte:.4f | file"
)
LEGS = "begin | end | s=seconds:,.0f | exit code=exit_code | last step=last_step:,"
SPEEDS = {
    "tokens_per_s": "median of the rows of metrics: training alone",
    "tokens_per_s_total": "last row of metrics: with evaluations and checkpoints",
    "tokens_per_s_processes": "tokens over the seconds of the processes: with their starts",
}
OF_LAYERS = {
    "gate_cmp_mean": "gate, compressed",
    "gate_slc_mean": "gate, selected",
    "gate_win_mean": "gate, window",
    "selected_overlap": "overlap with the query before",
}


def write_report(rows: Path, out: Path) -> Path:
    """Write ``learning.md`` and its plots, once everything is made.

    Args:
        rows: ``benchmarks/quality``, or a folder in its layout, with ``results`` beside it. What
            is missing is left out; so is what is broken, and the page says so.
        out: folder, made where it is missing.

    Raises:
        UserError: there is nothing to report.
    """
    groups = {name: read_group(rows, name) for name in GROUPS}
    sweeps, of_muon = (read_sweeps(groups[name]) for name in (SWEPT, MUON_SWEPT))
    for line in (line for group in groups.values() for line in group.broken):
        say(line)
    by_muon = learning_rates(of_muon)
    sections: dict[str, list[Part]] = {
        "50,000 steps of `78m`": long_run(groups["50k"], sweeps),
        "50,000 steps of `78m-shared`, by Muon": long_run(groups["50k_shared"], of_muon),
        "200M tokens, 2,048 a sequence": equal_tokens(groups["2k"], sweeps),
        "200M tokens by Muon, 2,048 a sequence": equal_tokens(groups["muon"], of_muon),
        "200M tokens by Muon, 8,192 a sequence": equal_tokens(groups["muon_long"], of_muon),
        "200M tokens in large steps, 2,048 a sequence": equal_tokens(groups["200m"], sweeps),
        "90M tokens in large steps, 2,048 a sequence": equal_tokens(groups["90m"], sweeps),
        "100M tokens in large steps, 8,192 a sequence": equal_tokens(groups["8k"], sweeps),
        "Learning rates": [*learning_rates(sweeps), *groups[SWEPT].notes()],
        "Learning rates of Muon": [
            *([ABOUT_MUON, *by_muon] if by_muon else []),
            *groups[MUON_SWEPT].notes(),
        ],
        "What is selected": [*selection(groups.values()), *timed(rows.parent / "results")],
    }
    made = {title: [part for part in parts if part] for title, parts in sections.items() if parts}
    check(bool(made), "report", "--rows", "hold rows of an experiment", rows)
    parts = [part for title, found in made.items() for part in (f"## {title}", *found)]
    path = out / "learning.md"
    out.mkdir(parents=True, exist_ok=True)
    for part in parts:
        if isinstance(part, Plot):
            (out / part.name).write_bytes(part.png)
    text = "\n\n".join([INTRODUCTION.rstrip(), *map(str, parts)])
    path.write_text(f"{text}\n", encoding="utf-8")
    return path


def long_run(group: Group, sweeps: Sweeps) -> list[Part]:
    """The run of 50,000 steps: losses, speed, legs, curves, a sample."""
    if not group.arms:
        return [*group.notes()]
    arm = group.arms[0]
    row, metrics = arm.row, arm.metrics()
    same, _ = shared(SETTINGS, [arm.figures])
    size = "" if row["parameters"] is None else f", {row['parameters']:,} parameters"
    speeds = [{"source": what, "tokens": row.get(name)} for name, what in SPEEDS.items()]
    legs = read_lines(arm.folder / "legs.jsonl")
    parts: list[Part] = [
        f"`{CONFIGS[row['model']]}`{size}: {row['steps']:,} steps of {row['global_batch']} windows "
        f"of {row['seq_len']:,} bytes, {row['tokens']:,} tokens, seed {row['seed']}; {same}. "
        f"{against_sweeps([arm], sweeps)} {source(arm.code('row.json'))}",
        table_of(LOSSES, losses(arm)),
        *group.notes(),
        f"Speed, three times. {MASKS} {source(arm.code('row.json'))}",
        table_of("source | tokens/s=tokens:,.0f", speeds),
        " ".join([how_it_ended(legs), checked(arm), source(arm.code("legs.jsonl", "check.txt"))]),
        table_of(LEGS, legs),
    ]
    if metrics:
        lines = [
            Line("training", points(metrics, "step", "bits_per_byte"), {"color": "#bbbbbb"}),
            Line("validation", points(metrics, "step", VALIDATION), {"marker": "."}),
        ]
        panels = [
            Panel("optimizer steps", label, layers, {"ylim": (0, 1)})
            for name, label in OF_LAYERS.items()
            if (layers := _layer_lines(metrics[::10], name))
        ]
        about = f"Loss, gates and overlap of each layer. {source(arm.code(arm.metrics_file))}"
        parts += [about, draw(f"{group.name}-loss.png", [Panel("optimizer steps", BITS, lines)])]
        parts += [draw(f"{group.name}-layers.png", panels)] if panels else []
    if sample := arm.text("generated.txt").replace("```", "'''").rstrip():
        about = f'512 bytes written after "{PROMPT}". {source(arm.code("generated.txt"))}'
        parts += [about, f"```text\n{sample}\n```"]
    return parts


def losses(arm: Arm) -> list[Figures]:
    """What ``nsa eval`` printed, short windows first, test before validation, with intervals."""
    paths = [*arm.folder.glob("test*.json"), *arm.folder.glob("validation.json")]
    rows = [
        arm.read(path.name)
        | {"file": arm.code(path), "over": over_documents(path.with_suffix(".npz"))}
        for path in paths
    ]
    return sorted(rows, key=lambda row: (row["seq_len"], row["split"]))


def over_documents(path: Path) -> str | None:
    """95% interval of a loss over documents: of its difference to a model without loss."""
    if not path.exists():
        return None
    found, _ = load_measurement("report", path.name, path)
    nothing = Measurement(found.documents * np.array([0.0, 1.0, 1.0]), found.positions)
    bounds = paired_difference([found], [nothing])
    low, high = bounds["difference_low"], bounds["difference_high"]
    return None if low is None else f"{low:.4f} to {high:.4f} ({bounds['num_documents']})"


def how_it_ended(legs: Sequence[Figures]) -> str:
    """How many processes trained, and how each ended."""
    if not legs:
        return "How its processes ended is not recorded."
    names = {STOPPED: " (SIGTERM)", 0: " (the end)"}
    counts = Counter(leg["exit_code"] for leg in legs)
    ends = [f"{n} with exit code {code}{names.get(code, '')}" for code, n in counts.items()]
    resumed = ", from the second on by `nsa train --resume`" * (len(legs) > 1)
    number = f"{len(legs)} processes" if len(legs) > 1 else "one process"
    return f"Trained by {number}{resumed}; ended: {', '.join(ends)}."


def checked(arm: Arm) -> str:
    """What ``nsa check`` found."""
    said = arm.text("check.txt") or arm.text(f"{FAILED}check.txt")
    verdict = said.rstrip().rpartition("\n")[2].rpartition(": ")[2]
    faults = [fault for fault in arm.row.get("failed") or [] if fault.startswith("nsa check ")]
    if faults:
        verdict = "; ".join([f"failed, {faults[0].rpartition(': ')[2]}", *filter(None, [verdict])])
    place = source(arm.code(f"{FAILED}check.txt"))
    return f"`nsa check` afterwards: {verdict or 'not run'}. {place}".rstrip()


def _layer_lines(metrics: Sequence[Figures], name: str) -> list[Line]:
    """A line for each layer, dark to light."""
    found = list[list[tuple[float, float]]]()
    while layer := points(metrics, "step", f"{name}_layer_{len(found)}"):
        found.append(layer)
    shades = mpl.colormaps["viridis"].resampled(len(found) + 1)  # the lightest is invisible
    styles = [{"color": shades(layer), "linewidth": 0.8} for layer in range(len(found))]
    return [Line(f"layer {n}", *x) for n, x in enumerate(zip(found, styles, strict=True))]
