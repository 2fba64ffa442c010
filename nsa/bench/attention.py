"""``nsa bench attention``: a row for each implementation, case and mode.

The result is checked first; then come kernels, peak memory and time of the same call.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nsa.bench.cases import CASES, prepare
from nsa.bench.clock import kernel_times, peak_mib, release_memory, time_call
from nsa.bench.flops import useful_bytes, useful_flops
from nsa.bench.gate import Gate, Verdict, approximates
from nsa.bench.implementations import (
    Implementation,
    PyTorch,
    Reference,
    UnsupportedError,
    choose_implementations,
    does_not_fit,
    refusals,
)
from nsa.bench.points import RECORDED, Point, Shape, batch_of, make_tensors
from nsa.bench.rows import Results, Row
from nsa.bench.table import progress_line, result_table
from nsa.bench.variants import Variant
from nsa.errors import check

MIN_LENGTH = 128

Fields = dict[str, Any]  # of a row


@dataclass(frozen=True)
class Plan:
    """What ``nsa bench attention`` is asked to measure.

    Attributes:
        shape: heads.
        seqs: lengths S.
        tokens: tokens of all sequences together; None takes those of the shape.
        choices: keys of ``CHOICES``, or ``RECORDED``.
        recorded: file of ``nsa inspect --record``, for that.
        cases: names of cases; None means all.
        providers: names of implementations; None means all that need not be named.
        variants: of this library.
        dtype: of the inputs.
        out: JSONL file to append to; None keeps the rows to itself.
        recall: also measure how much of the exact selection is found; always measured where the
            pattern approximates it.
        commit: to record where the checkout has no git.
        budget_ms: time spent on the samples of one figure.
    """

    shape: Shape
    seqs: Sequence[int]
    tokens: int | None = None
    choices: Sequence[str] = ("random",)
    recorded: Path | None = None
    cases: Sequence[str] | None = None
    providers: Sequence[str] | None = None
    variants: Sequence[Variant] = ()
    dtype: torch.dtype = torch.bfloat16
    out: Path | None = None
    recall: bool = False
    commit: str | None = None
    budget_ms: float = 300.0


def bench_attention(plan: Plan, device: torch.device) -> bool:
    """Measure, print and write rows.

    Returns:
        Whether every row that was tried is correct; those that cannot run here do not count.

    Raises:
        ValueError: the plan does not fit this machine.
    """
    # With fewer keys most gradients are differences that cancel: there is no error to compare with.
    shortest, rule = min(plan.seqs), f"be at least {MIN_LENGTH}"
    check(shortest >= MIN_LENGTH, "nsa bench attention", "--seqs", rule, shortest)
    if RECORDED in plan.choices:
        name, selected = "nsa bench attention", "attention.selected"
        check(plan.recorded is not None, name, "--recorded", "be given for that choice", None)
        rule = f"be {selected} for recorded selections, which scores do not give"
        check([*(plan.cases or CASES)] == [selected], name, "--case", rule, plan.cases)
    implementations = choose_implementations(plan.providers, plan.variants, device)
    results = Results(Row, plan.out, device, plan.commit)
    for choice, seq_len in itertools.product(plan.choices, plan.seqs):
        batch = batch_of(plan.shape, seq_len, plan.tokens)
        point = Point(plan.shape, seq_len, batch, choice, plan.dtype, device, plan.recorded)
        where = f"{plan.shape.name}, S {seq_len:,} x {batch}, choice {choice}, {plan.dtype}"
        print(f"\n{where}", flush=True)
        for found in _measure_point(plan, point, implementations):
            results.add(progress_line, **found)
    return results.finish(result_table)


def _measure_point(
    plan: Plan,
    point: Point,
    implementations: Sequence[Implementation],
) -> Iterator[Fields]:
    """Rows of one point, case by case; those of one pattern share its inputs and its gate."""
    backend = "triton" if point.device.type == "cuda" else "reference"
    base = make_tensors(point, point.shape.config())
    common = {
        "shape": point.shape.name,
        "choice": point.choice,
        "seq_len": point.seq_len,
        "batch": point.batch,
        "dtype": str(point.dtype).removeprefix("torch."),
        "kernels": [],
        "kernel_us": {},
    }
    for case in (CASES[name] for name in plan.cases or CASES):
        gate: Gate | None = None
        for each in implementations:
            if not each.takes_part(case, plan.providers is not None):
                continue
            config = each.config(point)
            if gate is None or gate.problem.config != config:
                gate = None  # one pattern at a time, for the memory
                gate = Gate(prepare(case, base, point, config, backend))
            said = {
                "case": case.name,
                "provider": each.name,
                "variant": each.variant.settings() or None,
            }
            for found in _measure(plan, each, gate):
                yield {**common, **said, **found}


def _measure(plan: Plan, implementation: Implementation, gate: Gate) -> Iterator[Fields]:
    """What the rows of each mode say."""
    for mode in gate.problem.case.modes:
        release_memory(gate.problem.point.device)
        try:
            with implementation.scope() as unused:
                found = _figures(plan, implementation, gate, mode, unused)
        except refusals() as error:
            found = _not_run(implementation, error)
        yield {"mode": mode, **found}


def _figures(
    plan: Plan, implementation: Implementation, gate: Gate, mode: str, unused: set[str]
) -> Fields:
    """The gate, then the kernels, memory and time of the same call."""
    problem, device, work = (
        gate.problem,
        gate.problem.point.device,
        implementation.work(gate.problem),
    )
    name, call = problem.case.name, partial(work.run, mode)
    dense = name == "attention" and isinstance(implementation, PyTorch)
    results = call()
    if unused:
        raise UnsupportedError(f"nothing here looks up a tile for {', '.join(sorted(unused))}")
    named = problem.named(results, work.leaves)
    verdict = gate.check(named, dense=dense, backend=implementation.backend)
    found = asdict(verdict)
    if not verdict.correct:
        return found
    if name == "attention.choice" and (plan.recall or approximates(problem.config)):
        found["recall"] = gate.recall(results[0])
    del results, named
    kernel_us = kernel_times(call, device)
    found |= {"kernel_us": kernel_us, "kernels": sorted(kernel_us)}
    if judges_kernels(device):
        fault = implementation.fault(list(kernel_us), problem.case, mode)
        if fault is not None:
            return {**found, "correct": False, "note": fault, "recall": None}
    found["peak_mib"] = peak_mib(call, device)
    captured = not isinstance(implementation, Reference)
    timing = time_call(call, device, plan.budget_ms, capture=captured)
    backward = mode == "fwd_bwd"
    flops = useful_flops(problem, backward=backward, dense=dense)
    if flops is not None:
        found["tflops_useful"] = flops / timing.p50 / 1e9
    else:
        found["tbps_useful"] = useful_bytes(problem, backward=backward) / timing.p50 / 1e9
    return found | timing.fields()


def _not_run(implementation: Implementation, error: Exception) -> Fields:
    """Why an implementation gave up; a bug of this library is raised again."""
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    if isinstance(error, torch.OutOfMemoryError):
        reason = "out of GPU memory"
    elif not isinstance(implementation, PyTorch):
        tiles_differ = bool(implementation.variant.name) and does_not_fit(error)
        if not tiles_differ and not isinstance(error, UnsupportedError):
            raise error
    return asdict(Verdict(None, {}, f"not run: {reason}"))


def judges_kernels(device: torch.device) -> bool:
    """Whether there are kernels to judge: the profiler sees those of a GPU."""
    return device.type == "cuda"
