"""``nsa bench attention``: correctness first, then kernels, memory and time, a row for each provider, case and mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa.bench.cases import CASES, Case, Tensors, prepare
from nsa.bench.clock import Timing, kernel_times, peak_mib, time_call
from nsa.bench.flops import dense_flops, useful_flops
from nsa.bench.gate import Gate, Verdict, approximates
from nsa.bench.points import CHOICES, Point, Shape, batch_of, make_tensors, overlap
from nsa.bench.providers import (
    Ours,
    Provider,
    Reference,
    UnsupportedError,
    Work,
    choose_providers,
    does_not_fit,
    refusals,
    takes_part,
)
from nsa.bench.rows import Origin, Row, RowFile, origin, row_of
from nsa.bench.table import progress_line, result_table
from nsa.bench.variants import Variant
from nsa.config import NSAConfig
from nsa.errors import check
from nsa.ops.selection import select_blocks

MIN_LENGTH = 128


@dataclass(frozen=True)
class Plan:
    """What ``nsa bench attention`` is asked to measure.

    Attributes:
        shape: heads.
        seqs: lengths S.
        tokens: tokens of all sequences together; None takes those of the shape.
        choices: keys of ``CHOICES``.
        cases: names of cases; None means all.
        providers: names; None means all that can compute a case.
        variants: of ours.
        dtype: of the inputs.
        out: JSONL file to append to; None keeps the rows to itself.
        recall: say how much of the exact choice every provider finds; of a pattern that approximates it is said in any case.
        commit: to record where the checkout has no git.
        budget_ms: time spent on the samples of one figure.
    """

    shape: Shape
    seqs: Sequence[int]
    tokens: int | None = None
    choices: Sequence[str] = ("random",)
    cases: Sequence[str] | None = None
    providers: list[str] | None = None
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
    # With fewer keys most gradients are differences that cancel: an error has nothing to be measured by.
    check(min(plan.seqs) >= MIN_LENGTH, "nsa bench attention", "--seqs", f"be at least {MIN_LENGTH}", min(plan.seqs))
    providers = choose_providers(plan.providers, list(plan.variants), device)
    file = RowFile(plan.out)
    here = origin(device, plan.commit)
    print(
        f"run {here.run_id} on {here.gpu or here.device}, commit {here.commit}{' with changes' * bool(here.dirty)}", flush=True
    )
    for choice in plan.choices:
        for seq_len in plan.seqs:
            point = Point(plan.shape, seq_len, batch_of(plan.shape, seq_len, plan.tokens), choice, plan.dtype, device)
            print(f"\n{point.shape.name}, S {seq_len:,} x {point.batch}, choice {choice}, {plan.dtype}", flush=True)
            for row in _measure_point(plan, point, providers, here):
                file.add(row)
                print(progress_line(row), flush=True)
    print("\n" + result_table(file.rows), flush=True)
    return all(row.correct is not False for row in file.rows)


def _measure_point(plan: Plan, point: Point, providers: Sequence[Provider], here: Origin) -> Iterator[Row]:
    """Rows of one point, case by case; what a case needs is made once for all providers of the same pattern."""
    backend = "triton" if point.device.type == "cuda" else "reference"
    base = make_tensors(point, point.shape.config())
    shared = _shared_choice(base, point, backend)
    for case in (CASES[name] for name in plan.cases or CASES):
        made: dict[NSAConfig, tuple[Tensors, Gate]] = {}
        for provider in providers:
            if not takes_part(provider, case, plan.providers is not None):
                continue
            config = provider.config(point)
            if config not in made:
                made.clear()  # one pattern at a time, for the memory
                tensors = prepare(case, base, point, config, backend)
                made[config] = tensors, Gate(case, tensors, point, config)
            common = {
                "case": case.name, "provider": provider.name, "shape": point.shape.name, "choice": point.choice,
                "seq_len": point.seq_len, "batch": point.batch, "dtype": str(point.dtype).removeprefix("torch."),
                "variant": provider.variant.settings() if provider.variant is not None else None,
                "overlap": shared if case.name in ("attention", "attention.choice") else None,
            }  # fmt: skip
            yield from _measure(plan, provider, case, *made[config], point, config, here, common)
        made.clear()


def _shared_choice(base: Tensors, point: Point, backend: str) -> float | None:
    """How far neighbours really agree in whole attention: measured on the choice itself, over groups of the asked size."""
    if CHOICES[point.choice] == 1 or (backend == "reference" and point.seq_len > 4096):
        return None
    config = point.shape.config()
    prepared = prepare(CASES["attention.choice"], base, point, config, backend)
    chosen = select_blocks(base["q"], prepared["k_cmp"], prepared["lse"], config, backend=backend)
    return round(overlap(chosen, CHOICES[point.choice]), 4)


def _measure(
    plan: Plan, provider: Provider, case: Case, tensors: Tensors, gate: Gate, point: Point, config: NSAConfig, here: Origin,
    common: dict[str, Any],
) -> Iterator[Row]:  # fmt: skip
    """One row for each mode."""
    work = None
    try:
        work = provider.work(case, tensors, point, config)
    except UnsupportedError as error:
        reason = str(error)
    except refusals() as error:
        reason = _reason(provider, error)
    for mode in case.modes:
        if work is None:
            yield _row(here, common, mode, Figure(Verdict(None, {}, f"not run: {reason}")))
            continue
        with work.scope() as unused:
            figure = _figure(plan, provider, case, work, gate, point, mode, unused)
        if figure.timing is not None:
            tflops, tbps = _rates(provider, case, tensors, point, config, mode, figure.timing)
            figure = replace(figure, tflops_useful=tflops, tbps_useful=tbps)
        yield _row(here, common, mode, figure)


@dataclass(frozen=True)
class Figure:
    """What one row says about one mode; without a timing if the verdict is not that it is correct."""

    verdict: Verdict
    timing: Timing | None = None
    recall: float | None = None
    kernel_us: dict[str, float] = field(default_factory=dict)
    peak_mib: float | None = None
    tflops_useful: float | None = None
    tbps_useful: float | None = None


def _figure(
    plan: Plan, provider: Provider, case: Case, work: Work, gate: Gate, point: Point, mode: str, unused: set[str] | None
) -> Figure:
    """The gate, then the kernels, memory and time of the same call."""

    def call() -> object:
        return work.run(mode)

    try:
        results = work.run(mode)
        if unused:
            note = f"not run: nothing here looks up a tile for {', '.join(sorted(unused))}"
            return Figure(Verdict(None, {}, note))
        verdict = gate.check(_named(case, work, results), dense=_is_dense(provider, case), backend=provider.backend)
        recall = None
        if case.name == "attention.choice" and verdict.correct and (plan.recall or approximates(gate.config)):
            recall = gate.recall(results[0])
        del results
        if not verdict.correct:
            return Figure(verdict)
        kernel_us = kernel_times(call, point.device)
        fault = provider.fault(list(kernel_us), case, mode) if judges_kernels(point.device) else None
        if fault is not None:
            return Figure(Verdict(False, verdict.errors, fault), kernel_us=kernel_us)
        peak = peak_mib(call, point.device)
        return Figure(verdict, time_call(call, point.device, plan.budget_ms), recall, kernel_us, peak)
    except refusals() as error:
        return Figure(Verdict(None, {}, f"not run: {_reason(provider, error)}"))


def _reason(provider: Provider, error: Exception) -> str:
    """Why a provider gave up; a bug of ours is raised again, and is not something that somebody else does not support."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of GPU memory"
    ours = isinstance(provider, (Ours, Reference))
    if ours and not (provider.variant is not None and does_not_fit(error)):
        raise error
    return (str(error).splitlines() or [type(error).__name__])[0]


def judges_kernels(device: torch.device) -> bool:
    """Whether there are kernels to judge: the profiler sees those of a GPU."""
    return device.type == "cuda"


def _named(case: Case, work: Work, results: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Results by name: outputs, then gradients where there are any."""
    names = [*case.outputs, *(f"d{name}" for name in work.leaves)]
    return dict(zip(names, results, strict=len(results) > len(case.outputs)))


def _is_dense(provider: Provider, case: Case) -> bool:
    return provider.dense or (provider.name == "flex" and case.name == "attention")


def _rates(
    provider: Provider, case: Case, tensors: Tensors, point: Point, config: NSAConfig, mode: str, timing: Timing
) -> tuple[float | None, float | None]:
    """Useful TFLOP/s or, where there is hardly any arithmetic, useful TB/s."""
    backward = mode == "fwd_bwd"
    if _is_dense(provider, case):
        flops: int | None = dense_flops(point, config, backward=backward)
    else:
        flops = useful_flops(case.name, point, config, backward=backward)
    if flops is not None:
        return round(flops / timing.p50 / 1e9, 2), None
    return None, round(useful_bytes(case, tensors, backward=backward) / timing.p50 / 1e9, 3)


def useful_bytes(case: Case, tensors: Tensors, *, backward: bool) -> int:
    """Bytes that must move at least.

    Forward each input and output once; backward the gradients of both, and the inputs again where they are needed
    (``attention.combine``).
    """
    inputs = sum(tensors[name].nbytes for name in case.inputs)
    outputs = sum(tensors[f"d{name}"].nbytes for name in case.outputs)
    again = inputs if case.name == "attention.combine" else 0
    return inputs + outputs + (backward * (inputs + outputs + again))


def _row(here: Origin, common: dict[str, Any], mode: str, figure: Figure) -> Row:
    timing, verdict = figure.timing, figure.verdict
    times = {f"ms_{name}": None if timing is None else round(getattr(timing, name), 5) for name in ("p50", "p20", "p80")}
    return row_of(
        here, **common, mode=mode, **times, correct=verdict.correct, errors=verdict.errors, note=verdict.note,
        recall=figure.recall, kernels=sorted(figure.kernel_us), kernel_us=figure.kernel_us,
        tflops_useful=figure.tflops_useful, tbps_useful=figure.tbps_useful,
        peak_mib=None if figure.peak_mib is None else round(figure.peak_mib, 1),
        timing=None if timing is None else timing.method, samples=None if timing is None else timing.samples,
    )  # fmt: skip
