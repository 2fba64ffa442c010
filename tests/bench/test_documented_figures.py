"""Figures of the README and of the report on training speed are those of committed rows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import speedup_chart
from nsa.bench.rows import read_rows, targets

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"


def read(file: str) -> str:
    """Text of a file of the repository."""
    return (ROOT / file).read_text(encoding="utf-8")


def table(page: str, heading: str) -> list[list[str]]:
    """Cells of the tables in a section, a list for each line that begins with a number."""
    pattern = rf"^## {heading}\n(.*?)(?=^## |\Z)"
    (found,) = re.findall(pattern, read(page), re.DOTALL | re.MULTILINE)
    lines = re.findall(r"^\| \d.*", found, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def number(cell: str) -> float:
    """The number that a cell begins with."""
    return float(cell.split()[0].replace(",", ""))


def test_speeds_of_training_are_those_of_rows():
    rows = read_rows([RESULTS / "h200-train.jsonl"])
    known = {round(row.tokens_per_s) for row in rows if row.tokens_per_s is not None}
    known |= {round(target["target"]) for target in targets()["targets"]}
    rows_of_page = table("docs/reports/throughput.md", "Speed and targets")
    cells = [cell for row in rows_of_page for cell in row]
    shown = {int(number(cell)) for cell in cells[1:] if re.match(r"\d{2,3},\d{3}\b", cell)}
    shown -= {65_536}  # a length
    assert len(shown) >= 12
    assert shown <= known


def test_steps_of_several_gpus_are_those_of_rows():
    page, rows = "docs/reports/throughput.md", read("benchmarks/scaling/h200.jsonl").splitlines()
    known, buckets = set(), set()
    for row in map(json.loads, rows):
        step, processes = f"{row['step_ms']:.1f}", str(row["processes"])
        known.add((processes, step))
        where = (processes, str(row["global_batch"]), row["commit"][:7], row["bucket_mib"])
        buckets.add((*where, f"{step} / {row['exposed_ms']:.1f}"))
    shown = {(row[0], row[3]) for row in table(page, "Several GPUs")}
    assert len(shown) >= 4
    assert shown <= known
    cells = {
        (*row[:3], size, cell)
        for row in table(page, "Communication buckets")
        for size, cell in zip((10, 25, 50, 100), row[3:], strict=True)
        if cell
    }
    assert len(cells) == 10
    assert cells <= buckets


def test_times_of_the_readme_are_those_of_rows():
    known: dict[tuple[int, str], float] = {
        (row.seq_len, row.mode): row.ms_p50
        for row in read_rows(speedup_chart.ROWS)
        if (row.case, row.choice, row.provider) == ("attention", "random", "nsa") and row.ms_p50
    }
    speed_ups = speedup_chart.speed_ups()
    shown = table("README.md", "Speed")
    assert len(shown) >= 6
    for length, *cells in shown:
        seq_len = int(number(length))
        for mode, ms, speed_up in (("fwd", *cells[:2]), ("fwd_bwd", *cells[2:])):
            assert number(ms) == float(f"{known[seq_len, mode]:.3g}")
            by_length = speed_ups[mode]
            assert speed_up == (f"{by_length[seq_len]:.2f}x" if seq_len in by_length else "")


def results(model: str, file: str) -> list[Any]:
    """A file of each seed of a model that was trained at 8,192 tokens."""
    files = sorted((ROOT / "benchmarks/quality/selection-8k").glob(f"{model}-[0-9]*/{file}"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in files]


def learned(model: str) -> str:
    """Mean bits per byte of the test text over the seeds, as pages write it."""
    return f"{fmean(row['test_bits_per_byte'] for row in results(model, 'row.json')):.3f}"


def gain(model: str, distance: int) -> float:
    """Mean gain of passages that are repeated so many tokens back."""
    found = [one["repeats"] for one in results(model, "repeats.json")]
    at = [x for run in found for x in run if x["distance"] == distance]
    return fmean(x["first_bits_per_byte"] - x["bits_per_byte"] for x in at)


def one_line(run: str) -> float:
    """Share of the single lines in 65,536 tokens that a run found."""
    rows = json.loads(read(f"benchmarks/quality/needle-64k/7m-{run}-1337/lookups.json"))["needles"]
    (share,) = (x["exact_match"] for x in rows if (x["length"], x["depth"]) == (65536, None))
    return float(share)


def test_facts_of_the_first_screen_are_those_of_rows():
    page = read("README.md")
    ours, dense = learned("token-max"), learned("dense")
    assert f"`78m-8k` has {ours} bits per byte of unseen books, dense {dense} " in page
    speeds = [
        fmean(row["tokens_per_s"] for row in results(model, "row.json"))
        for model in ("token-max", "dense")
    ]
    assert f"trained at {speeds[0] / speeds[1]:.2f}x the tokens/s" in page
    least, most = (
        [pick(gain(model, d) for d in (1024, 2048, 4096, 8064)) for model in ("token-max", "dense")]
        for pick in (min, max)
    )
    gains = f"gains {least[0]:.2f} to {most[0]:.2f} bits per byte from 1,024 to 8,064 tokens back"
    assert f"{gains}, dense {least[1]:.2f} to {most[1]:.2f};" in page
    lines = read("benchmarks/quality/lookups.jsonl").splitlines()
    least, *_, most = sorted(json.loads(x)["lookups_exact_low_high"]["65536"][0] for x in lines)
    assert (
        f"in {least:.1%} to {most:.1%} of cases ({len(lines)} seeds)".replace("% to", " to") in page
    )
    scores, attention = map(one_line, ("mean-keys-eight", "dense"))
    others = f"With the paper's scores it finds {scores:.0%}, with dense attention {attention:.0%} "
    assert others in page
    rows = read_rows([RESULTS / "h200-decode.jsonl"])
    ms = {
        (row.batch, row.provider): row.ms_p50
        for row in rows
        if (row.case, row.mode, row.seq_len) == ("decode.model", "step", 65_536) and row.ms_p50
    }
    many, dense_many = ms[64, "nsa"], ms[64, "dense"]
    speed_up = f"takes {many:.2f} ms, dense {dense_many:.2f} ms: {dense_many / many:.1f}x"
    assert f"{speed_up}. With one sequence: {ms[1, 'dense'] / ms[1, 'nsa']:.1f}x." in page
    chart = speedup_chart.speed_ups()["fwd_bwd"]
    assert f"{chart[8_192]:.2f}x as fast at 8,192 tokens and {chart[65_536]:.1f}x at 65,536" in page


def test_table_of_models_is_that_of_rows():
    page = read("docs/use.md")
    for name, model in (("`78m-8k`", "token-max"), ("dense, eq", "dense"), ("`78m-s", "shared")):
        (line,) = re.findall(rf"^\| {name}.*", page, re.MULTILINE)
        cells = line.strip("| ").split(" | ")
        assert cells[1:] == [learned(model), f"{gain(model, 4096):.3f}"]


def test_table_of_scores_is_that_of_rows():
    rows = read_rows([RESULTS / "h100-selection.jsonl"])
    ms = {(x.case, x.provider, x.seq_len): x.ms_p50 for x in rows if x.mode == "fwd_bwd"}
    page, lines = read("README.md"), [read("benchmarks/quality/lookups.jsonl").splitlines()[0]]
    found = json.loads(*lines)["lookups_exact_low_high"]["65536"][0]
    for scores, provider, case, model, share in (
        ("compressed", "nsa", "attention", "shared", one_line("mean-keys")),
        ("token_max", "token_max", "attention", "token-max", found),
        ("index", "index", "attention.with_index_loss", "index-head", one_line("index-eight")),
    ):
        (line,) = re.findall(rf"^\| `{scores}`.*", page, re.MULTILINE)
        speed_ups = [
            f"{(ms['attention', 'dense-cudnn', n] or 0) / (ms[case, provider, n] or 1):.2f}x"
            for n in (8192, 65_536)
        ]
        wanted = [*speed_ups, learned(model), f"{gain(model, 4096):.3f}", f"{share:.0%}"]
        assert line.strip("| ").split(" | ")[1:] == wanted


def test_times_of_other_packages_are_those_of_rows():
    rows = read_rows([ROOT / "benchmarks/peers/h100.jsonl"])
    known = {f"{row.ms_p50:.3g}" for row in rows if row.ms_p50 and row.mode == "fwd_bwd"}
    page = read("README.md")
    begin = page.index("| package | ms |")
    shown = re.findall(
        r"\d+\.\d+",
        re.sub(r"\| [^|]*\|$", "|", page[begin : page.index("\n\n", begin)], flags=re.M),
    )
    assert len(shown) >= 12
    assert {f"{float(ms):.3g}" for ms in shown} <= known
