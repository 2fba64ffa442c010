"""Measure public NSA packages beside this one and dense attention, in one run on one GPU.

python -m benchmarks.peers --out rows.jsonl
python -m benchmarks.peers --table rows.jsonl
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.adapters import PEERS, WHOLE, Peer, version
from benchmarks.peers.whole import SharedGate, shared_problem
from nsa.bench import clock
from nsa.bench.attention import PROVIDERS, bench_attention, make_subject
from nsa.bench.cases import (
    CASES,
    CHOICES,
    Point,
    Tensors,
    batch_of,
    make_tensors,
    parse_shape,
    prepare,
)
from nsa.bench.clock import Fields, Subject, measure, not_run
from nsa.bench.gate import Gate
from nsa.bench.report import Results, cells, markdown, table
from nsa.bench.rows import Row, index_rows, measured, read_rows

TOKENS = 65_536
# What packages raise for a shape or a version that they do not support, besides RuntimeError.
_REFUSALS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    TypeError,
    ValueError,
)
_SHOWN = (
    "provider",
    "seq_len",
    "batch",
    "mode",
    "ms (p20 to p80)",
    "peak_mib",
    "recall",
    "time of dense",
    "MiB of dense",
    "time of nsa",
)


def bench_peers(results: Results, points: Sequence[Point], peers: Sequence[Peer]) -> None:
    """Measure dense attention, then all packages, at each point.

    Args:
        results: receives the rows.
        points: measured shapes, lengths and selections.
        peers: measured packages.
    """
    for point in points:
        bench_attention(results, [point], [PROVIDERS["dense-cudnn"]], WHOLE)
        base = make_tensors(point)
        work = {(peer.cases, tuple(peer.variant.items())): None for peer in peers}
        for cases, variant in work:
            config = replace(point.config, **dict(variant))
            gate = make_gate(cases[0], base, replace(point, config=config))
            for peer in peers:
                if (peer.cases, tuple(peer.variant.items())) == (cases, variant):
                    _measure(results, gate, peer)


def make_gate(case: str, base: Tensors, point: Point) -> Gate:
    """Make the inputs of a case and the gate that knows their fp64 results."""
    if case in WHOLE:
        return SharedGate(shared_problem(base, point))
    backend = "triton" if point.device.type == "cuda" else "reference"
    return Gate(prepare(CASES[case], base, point, backend))


def _measure(results: Results, gate: Gate, peer: Peer) -> None:
    case, point = gate.problem.case, gate.problem.point
    known = {"package": peer.package, "version": version(peer)}
    row: Fields = {"case": case.name, **point.fields(), "provider": peer.name, "settings": known}
    row |= {"case": f"{case.name}.shared"} if isinstance(gate, SharedGate) else {}
    row["variant"] = dict(peer.variant) or None
    for mode in case.modes:
        make = partial(_subject, peer, gate, mode, known)
        try:
            found = measure(make, point.device, is_ours=peer.module == "nsa")
        except _REFUSALS as error:
            if peer.module == "nsa":
                raise
            found = not_run(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        results.add(**{**row, "mode": mode, **found})
        if point.device.type == "cuda":
            torch.cuda.synchronize()  # fails here if the package has broken the CUDA context


def _subject(peer: Peer, gate: Gate, mode: str, known: Fields) -> Subject:
    """Prepare the call, its checks, and the comparison of two runs."""
    if isinstance(gate, SharedGate):
        gate.peer = peer
    subject = make_subject(peer, gate, mode)

    def extra() -> Fields:
        first, second = subject.call(), subject.call()
        equal = {name: torch.equal(x, second[name]) for name, x in first.items()}
        found = {**subject.extra(), "settings": {**known, "bit_equal": equal}}
        recall = {"recall": gate.selected_recall} if isinstance(gate, SharedGate) else {}
        return found | recall

    return replace(subject, extra=extra)


# --- The table
def result_lines(rows: Sequence[Row]) -> str:
    """Markdown tables of the rows with a time, and the reasons of the others."""
    by, parts = index_rows(rows), []
    timed = measured(rows)
    for key in dict.fromkeys((row.shape, row.choice, row.case) for row in timed):
        here = [row for row in timed if (row.shape, row.choice, row.case) == key]
        shape, choice, case = key
        gpu = " ".join(sorted({f"{x.gpu}, torch {x.torch}, Triton {x.triton}" for x in here}))
        lines = [_cells(row, by) for row in here]
        parts.append(f"### {case}, {shape}, {choice}\n\n{gpu}\n\n{markdown(table(lines))}")
    reasons = dict.fromkeys(
        f"- {row.case}, {row.provider}, {row.shape}, S {row.seq_len:,}, {row.mode}: {row.note}"
        for row in rows
        if row.note
    )
    return "\n\n".join([*parts, *(["### Without a time", "\n".join(reasons)] if reasons else [])])


def _cells(row: Row, by: Any) -> dict[str, str]:
    shown, settings = cells(row, by), row.settings or {}
    equal = settings.get("bit_equal", {})
    different = ", ".join(name for name, same in equal.items() if not same)
    stages = row.stages_ms or {}
    return {
        **{name: shown[name] for name in _SHOWN},
        "attention alone": format(stages["attention"], ".4g") if stages else "",
        "error": format(max(row.errors.values(), default=0.0), ".2g"),
        "differs between two runs": (different or "no") if equal else "",
        "version": str(settings.get("version") or row.commit or "")[:12],
    }


# --- The command
def main(words: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code, 1 if a result is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    names = sorted({peer.name for peer in PEERS})
    cases = sorted({case for peer in PEERS for case in peer.cases})
    parser.add_argument("--shape", nargs="+", default=["32x2x64x64", "seed"])
    parser.add_argument("--seqs", nargs="+", type=int, default=[65_536, 8192, 2048])
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of all sequences")
    parser.add_argument("--choice", nargs="+", choices=CHOICES, default=["shared16", "random"])
    parser.add_argument("--case", nargs="+", choices=cases, default=cases)
    parser.add_argument("--peer", nargs="+", choices=names, default=names)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--budget-ms", type=float, default=100.0, help="for each time")
    parser.add_argument("--out", type=Path, help="JSONL file to append the rows to")
    parser.add_argument("--commit", help="commit to record if the checkout has no git")
    parser.add_argument("--table", nargs="+", type=Path, help="print the table of these rows")
    given = parser.parse_args(words)
    if given.table:
        print(result_lines(read_rows(given.table)))
        return 0
    clock.BUDGET_MS = given.budget_ms
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, given.dtype)
    points = [
        Point(shape, parse_shape(shape), seq_len, batch, choice, dtype, device)
        for choice in given.choice
        for shape in given.shape
        for seq_len in given.seqs
        for batch in [batch_of(shape, seq_len, given.tokens)]
    ]
    peers = [x for x in PEERS if x.name in given.peer and {*x.cases} <= {*given.case}]
    results = Results(given.out, device, given.commit)
    bench_peers(results, points, peers)
    print(result_lines(results.rows))
    return int(any(row.correct is False for row in results.rows))


if __name__ == "__main__":
    sys.exit(main())
