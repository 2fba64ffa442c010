"""``nsa bench decode``: attention of one step, and whole models that generate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch

from nsa.bench.attention import Fields
from nsa.bench.clock import gpu_events, kernel_sums, profiled, release_memory, time_call
from nsa.bench.decode_attention import copy_tbps, prepare_attention
from nsa.bench.decode_generate import GENERATORS, time_generate
from nsa.bench.decode_model import DTYPE, Pass, check_decoder, prepare_prefill, prepare_step
from nsa.bench.gate import Verdict, judge
from nsa.bench.implementations import UnsupportedError, refusals
from nsa.bench.points import Point, Shape
from nsa.bench.rows import Results, Row
from nsa.bench.subjects import PROVIDERS as MODELS
from nsa.bench.subjects import find_subjects
from nsa.bench.table import progress_line, result_table
from nsa.bench.targets import DENSE_DECODE
from nsa.errors import check
from nsa.extras import install_command, missing
from nsa.lm.config import LMConfig

CASES = ("decode.attention", "decode.model")
ATTENTION = ("nsa", *DENSE_DECODE, "reference")
PROVIDERS = tuple(dict.fromkeys((*ATTENTION, *MODELS, *GENERATORS)))
# Those that may refuse a point; what the others raise is a bug of this library.
FOREIGN = (*DENSE_DECODE[:-1], "transformers")
# Tokens of context and sequences.
ATTENTION_POINTS = ((65_536, 32), (16_384, 128))
MODEL_POINTS = ((2048, 1), (65_536, 1), (1_048_576, 1), (16_384, 64), (65_536, 64))
PREFILLS = (65_536,)
SHORTEST = 128


@dataclass(frozen=True)
class DecodePlan:
    """What ``nsa bench decode`` is asked to measure.

    Attributes:
        shape: heads of ``decode.attention``.
        config: name or file of the configuration of ``decode.model``.
        name: of that configuration in rows.
        cases: words of ``CASES``.
        providers: words of ``PROVIDERS``; None: for attention all but the reference, which stands
            alone without a GPU, and the sparse and the dense model.
        points: tokens of context and sequences; None: those above of each case.
        prefills: tokens of prompts, for models; None: that above, but none where points are given.
        steps: timed steps of a model.
        out: JSONL file to append to; None keeps the rows to itself.
        commit: to record where the checkout has no git.
        budget_ms: time spent on the samples of a figure of attention.
    """

    shape: Shape
    config: Path
    name: str
    cases: Sequence[str] = CASES
    providers: Sequence[str] | None = None
    points: Sequence[tuple[int, int]] | None = None
    prefills: Sequence[int] | None = None
    steps: int = 64
    out: Path | None = None
    commit: str | None = None
    budget_ms: float = 300.0


def bench_decode(plan: DecodePlan, device: torch.device) -> bool:
    """Measure, print and write rows.

    Returns:
        Whether every row that was tried is correct; those that cannot run here do not count.

    Raises:
        ValueError: the plan does not fit.
    """
    hint = "Without one give short contexts: nsa bench decode --config cpu-small --points 256"
    fits = device.type == "cuda" or plan.points is not None
    check(fits, "nsa bench decode", "this machine", "have a CUDA GPU", "none", hint)
    lengths = [*(length for length, _ in plan.points or ()), *(plan.prefills or ())]
    shortest, rule = min([*lengths, SHORTEST]), f"be at least {SHORTEST}"
    check(shortest >= SHORTEST, "nsa bench decode", "tokens of context", rule, shortest)
    results = Results(Row, plan.out, device, plan.commit)
    for case, rows in ((CASES[0], _attention), (CASES[1], _models)):
        if case in plan.cases:
            for found in rows(plan, device):
                results.add(progress_line, **{**_EMPTY, "case": case, **found})
    return results.finish(result_table)


_EMPTY: Fields = {
    "mode": "step",
    "dtype": str(DTYPE).removeprefix("torch."),
    "kernels": [],
    "kernel_us": {},
    "errors": {},
}


def _attention(plan: DecodePlan, device: torch.device) -> Iterator[Fields]:
    """Rows of attention alone."""
    providers: Sequence[str] = ATTENTION[:-1] if device.type == "cuda" else ATTENTION[-1:]
    if plan.providers is not None:
        providers = [name for name in plan.providers if name in ATTENTION]
    for seq_len, batch in plan.points or ATTENTION_POINTS:
        point = Point(plan.shape, seq_len, batch, "random", DTYPE, device)
        common = {"shape": plan.shape.name, "choice": "random", "seq_len": seq_len, "batch": batch}
        for provider in providers:
            measure = partial(_measure_attention, provider, point, plan.budget_ms)
            yield {**common, "provider": provider, **_tried(measure, device, provider)}


def _measure_attention(provider: str, point: Point, budget_ms: float) -> Fields:
    """The gate, then kernels and time of the same call."""
    device, step = point.device, prepare_attention(provider, point)
    with torch.no_grad():
        verdict = judge(step.compare)
        if not verdict.correct:
            return asdict(verdict)
        found = {**asdict(verdict), **_seen(step.call, step.kernels, device)}
        if not found["correct"]:
            return found
        timing = time_call(step.call, device, budget_ms, capture=provider != "reference")
    found |= {"tokens_per_s": 1000 * point.batch / timing.p50, **timing.fields()}
    return found | _bytes(step.bytes_read, timing.p50, device)


def _models(plan: DecodePlan, device: torch.device) -> Iterator[Fields]:
    """Rows of models: steps, and prompts."""
    models, verdicts = dict[str, LMConfig](), dict[str, Fields]()
    for name in ("nsa", "dense") if plan.providers is None else plan.providers:
        if name in (*MODELS, *GENERATORS):
            kind = GENERATORS[name][0] if name in GENERATORS else name
            (subject,) = find_subjects([plan.config], {}, names=[kind])
            model = models[name] = subject.config.model
            is_checked_later = name in GENERATORS
            verdict = Verdict(True, {}) if is_checked_later else check_decoder(model, device)
            verdicts[name] = asdict(verdict)
    points = [("step", *point) for point in plan.points or MODEL_POINTS]
    prefills = (() if plan.points else PREFILLS) if plan.prefills is None else plan.prefills
    points += [("prefill", length, 1) for length in prefills]
    for (mode, seq_len, batch), (name, model) in product(points, models.items()):
        found, size = verdicts[name], (seq_len, batch, plan.steps)
        if name in GENERATORS and mode != "step":
            continue
        if found["correct"]:
            prepare = partial(prepare_prefill, model, seq_len, device)
            if mode == "step":
                prepare = partial(prepare_step, model, *size, device)
            measure = partial(_measure_pass, prepare, found, device)
            if name in GENERATORS:
                measure = partial(_measure_generate, name, model, *size, device)
            found = found | _tried(measure, device, name)
        where = {"shape": plan.name, "choice": "model", "seq_len": seq_len, "batch": batch}
        yield {**where, "provider": name, "mode": mode, **found}


def _measure_generate(
    name: str, model: LMConfig, seq_len: int, batch: int, steps: int, device: torch.device
) -> Fields:
    if missing("hf"):
        raise UnsupportedError(f"transformers is not installed: {install_command('hf')}")
    verdict, timing = time_generate(name, model, seq_len, batch, steps, device)
    if not verdict.correct:
        return asdict(verdict)
    return {**asdict(verdict), **timing.fields(), "tokens_per_s": 1000 * batch / timing.p50}


def _measure_pass(prepare: Callable[[], Pass], verdict: Fields, device: torch.device) -> Fields:
    """Time of what a model does, then kernels and bytes."""
    work = prepare()
    timing, speed = work.time(device)
    found = {**verdict, **_seen(work.call, work.kernels, device)}
    if not found["correct"]:
        return found
    found |= {"tokens_per_s": speed, **timing.fields()}
    read = work.count_bytes() if work.count_bytes and device.type == "cuda" else None
    return found | _bytes(read, timing.p50, device)


def _tried(measure: Callable[[], Fields], device: torch.device, provider: str) -> Fields:
    """What a row says, or why there is no figure; a bug of this library is raised again."""
    release_memory(device)
    try:
        return measure()
    except refusals() as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if isinstance(error, torch.OutOfMemoryError):
            reason = "out of GPU memory"
        elif provider not in FOREIGN and not isinstance(error, UnsupportedError):
            raise
        return asdict(Verdict(None, {}, f"not run: {reason}"))


def _seen(call: Callable[[], object], parts: Sequence[str], device: torch.device) -> Fields:
    """Launches and kernels of a warmed-up call; its result counts as wrong if others ran."""
    if device.type != "cuda":
        return {}
    trace = profiled(call, device)
    kernel_us = kernel_sums(trace)
    found = {"launches": len(gpu_events(trace)), "kernels": [*kernel_us], "kernel_us": kernel_us}
    for part in parts:
        if not any(part in name.lower() for name in kernel_us):
            found |= {"correct": False, "note": f"no kernel with {part} in its name ran"}
    return found


def _bytes(read: int | None, ms: float, device: torch.device) -> Fields:
    """What a row says of the bytes that a call loads."""
    if read is None:
        return {}
    tbps, copied = read / ms / 1e9, copy_tbps(device)
    share = {"of_copy": tbps / copied, "settings": {"copy_tbps": round(copied, 3)}}
    return {"mib_read": read / 2**20, "tbps_useful": tbps, **share}
