"""``nsa bench host``: what a layer costs the CPU, beside the attention layer of transformers' Llama."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nsa.attention import native_sparse_attention
from nsa.bench.attention import release_memory
from nsa.bench.gate import Verdict
from nsa.bench.points import Shape
from nsa.bench.rows import Origin, origin
from nsa.bench.table import align
from nsa.bench.targets import HostTarget, host_targets
from nsa.config import NSAConfig
from nsa.extras import require
from nsa.module import NativeSparseAttention
from nsa.rope import Rope
from nsa.testing import assert_within_budget
from nsa.train.execution.precision import autocast

CASES = ("host.function", "host.module")
PROVIDERS = ("nsa", "llama")
# How ``torch.compile`` is called for a mode; the others are eager.
COMPILED: dict[str, dict[str, Any]] = {"compiled": {}, "reduce_overhead": {"mode": "reduce-overhead"}}
MODES = ("fwd", "fwd_bwd", *COMPILED)
WEIGHTS = ("bfloat16", "float32")
WARM_UP_CALLS = 5
# Errors allowed, as a multiple of the CPU's own. The worst of 12,288 rows in bfloat16 differs by more than two between equals.
BUDGET = 3.0
_HEADER = ("case", "provider", "weights", "mode", "tokens", "host ms", "p20", "p80", "launches", "GPU ms", "of llama", "target")


@dataclass(frozen=True)
class HostPlan:
    """What ``nsa bench host`` is asked to measure.

    Attributes:
        shape: heads.
        width: of the layer's input.
        tokens: numbers of tokens, of one sequence each.
        cases, providers, modes, weights: words of those above; float32 weights run under autocast to bfloat16.
        calls: timed calls of a figure.
        out: JSONL file to append to; None keeps the rows to itself.
        commit: to record where the checkout has no git.
    """

    shape: Shape
    width: int
    tokens: Sequence[int]
    cases: Sequence[str] = CASES
    providers: Sequence[str] = PROVIDERS
    modes: Sequence[str] = MODES
    weights: Sequence[str] = WEIGHTS
    calls: int = 40
    out: Path | None = None
    commit: str | None = None


@dataclass(frozen=True)
class HostRow(Origin):
    """One provider in one mode; ``docs/benchmarks.md`` explains the fields."""

    case: str
    provider: str
    mode: str
    shape: str
    width: int
    weights: str
    tokens: int
    host_ms_p50: float | None
    host_ms_p20: float | None
    host_ms_p80: float | None
    launches: int | None
    gpu_ms: float | None
    correct: bool
    errors: dict[str, float]
    note: str | None


class Subject(nn.Module):
    """What is measured: called with tensors ``[1, T, ...]``, of which the gradients are asked for, too."""

    def inputs(self, tokens: int) -> list[Tensor]:
        """Fresh random inputs in fp32 on the CPU, for a gradient each."""
        raise NotImplementedError


class Function(Subject):
    """:func:`nsa.native_sparse_attention` with the default pattern."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.config = shape.config()
        self.rope = Rope.from_config(self.config)

    def inputs(self, tokens: int) -> list[Tensor]:
        """Queries, keys and values of three branches, gates."""
        config = self.config
        sizes = [(config.num_heads, config.head_dim)]
        sizes += [(config.num_kv_heads, size) for size in (config.head_dim, config.value_dim) * 3]
        return [*(torch.randn(1, tokens, *size) for size in sizes), torch.rand(1, tokens, config.num_heads, 3)]

    def forward(self, q: Tensor, *rest: Tensor) -> Tensor:
        """Attend."""
        k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates = rest
        backend = "reference" if q.dtype == torch.float64 else "auto"
        return native_sparse_attention(
            q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates, None, self.config, rope=self.rope, backend=backend
        )


class Layer(Subject):
    """:class:`nsa.NativeSparseAttention` with the default pattern."""

    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__()
        self.width = width
        self.attention = NativeSparseAttention(width, shape.config())

    def inputs(self, tokens: int) -> list[Tensor]:
        """The layer's input."""
        return [torch.randn(1, tokens, self.width)]

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        out: Tensor = self.attention(x)
        return out


class Llama(Subject):
    """The attention layer of transformers' Llama, by SDPA; a model computes its cosines and sines once for all layers."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, shape: Shape, width: int) -> None:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

        super().__init__()
        self.width = width
        sizes = {"num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads, "head_dim": shape.head_dim}
        config = LlamaConfig.from_dict({"hidden_size": width, "attn_implementation": "sdpa", **sizes})
        self.attention = LlamaAttention(config, 0)
        self.rotary = LlamaRotaryEmbedding(config)
        self.register_buffer("cosines", torch.empty(0))
        self.register_buffer("sines", torch.empty(0))

    def inputs(self, tokens: int) -> list[Tensor]:
        """The layer's input; angles of its length are kept."""
        like = self.attention.q_proj.weight
        self.cosines, self.sines = self.rotary(like, torch.arange(tokens, device=like.device)[None])
        return [torch.randn(1, tokens, self.width)]

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        out: Tensor = self.attention(x, position_embeddings=(self.cosines, self.sines), attention_mask=None)[0]
        return out


def bench_host(plan: HostPlan, device: torch.device) -> bool:
    """Measure, print and write rows.

    Returns:
        Whether every result is correct.

    Raises:
        ValueError: the plan does not fit this machine.
        UsageError: transformers is wanted and not installed.
    """
    if "llama" in plan.providers and "host.module" in plan.cases:
        require("nsa bench host", "hf")
    here = origin(device, plan.commit)
    print(
        f"run {here.run_id} on {here.gpu or here.device}, commit {here.commit}{' with changes' * bool(here.dirty)}", flush=True
    )
    if plan.out is not None:
        plan.out.parent.mkdir(parents=True, exist_ok=True)
        plan.out.open("a", encoding="utf-8").close()  # a place that cannot be written to is refused before the work
    rows = []
    for row in _measure_all(plan, device, here):
        rows.append(row)
        print(_progress(row), flush=True)
        if plan.out is not None:
            with plan.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(dataclasses.asdict(row)) + "\n")
    print("\n" + host_table(rows), flush=True)
    return all(row.correct for row in rows)


def _measure_all(plan: HostPlan, device: torch.device, here: Origin) -> Iterator[HostRow]:
    for case in plan.cases:
        for weights in plan.weights if case == "host.module" else WEIGHTS[:1]:  # the function has none
            for provider in plan.providers if case == "host.module" else PROVIDERS[:1]:
                subject = _subject(plan, case, provider)
                gate = Gate(subject, weights, plan.shape.config())
                for mode in plan.modes:
                    common = {
                        "case": case, "provider": provider, "mode": mode, "shape": plan.shape.name, "width": plan.width,
                        "weights": weights,
                    }  # fmt: skip
                    yield from _measure(plan, gate, common, device, here)


def _subject(plan: HostPlan, case: str, provider: str) -> Subject:
    torch.manual_seed(0)
    if case == "host.function":
        return Function(plan.shape)
    return Layer(plan.shape, plan.width) if provider == "nsa" else Llama(plan.shape, plan.width)


def _measure(plan: HostPlan, gate: Gate, common: dict[str, Any], device: torch.device, here: Origin) -> Iterator[HostRow]:
    """The gate, then a row for each number of tokens."""
    release_memory(device)
    torch.compiler.reset()  # each mode compiles the same code anew
    mode, subject = common["mode"], deepcopy(gate.subject).to(device)
    run: Callable[..., Tensor] = torch.compile(subject, **COMPILED[mode]) if mode in COMPILED else subject
    verdict = gate.check(subject, run, device)
    for tokens in plan.tokens:
        given: dict[str, Any] = {
            "host_ms_p50": None,
            "host_ms_p20": None,
            "host_ms_p80": None,
            "launches": None,
            "gpu_ms": None,
        }
        if verdict.correct:
            inputs = [x.to(device, gate.dtype) for x in subject.inputs(tokens)]
            given |= _times(*_call(subject, run, inputs, gate.precision(device), backward=mode != "fwd"), device, plan.calls)
        yield HostRow(
            **dataclasses.asdict(here), **common, tokens=tokens, **given, correct=bool(verdict.correct), errors=verdict.errors,
            note=verdict.note,
        )  # fmt: skip


class Gate:
    """Compares output and gradients of inputs and weights with fp64 on the CPU.

    The sequence is so short that every block is chosen: where blocks compete, rounding decides between near ones (the choice
    has a gate of its own in ``nsa bench attention``). The budget is what the same mathematics loses on the CPU.

    Args:
        subject: on the CPU; its weights are converted.
        weights: their dtype, a word of ``WEIGHTS``.
        config: the sparse pattern.
    """

    def __init__(self, subject: Subject, weights: str, config: NSAConfig) -> None:
        self.dtype: torch.dtype = getattr(torch, weights)
        self.subject = subject.to(self.dtype)
        tokens = config.num_selected_blocks * config.block_size
        self._inputs = [x.to(self.dtype) for x in subject.inputs(tokens)]
        cpu, exact = torch.device("cpu"), deepcopy(self.subject).double()
        self._oracle = _results(exact, exact, [x.double() for x in self._inputs], nullcontext())
        self._baseline = _results(self.subject, self.subject, self._inputs, self.precision(cpu))

    def precision(self, device: torch.device) -> AbstractContextManager[object]:
        """What fp32 weights run under: autocast to bfloat16."""
        return nullcontext() if self.dtype == torch.bfloat16 else autocast(device, "bf16")

    def check(self, subject: Subject, run: Callable[..., Tensor], device: torch.device) -> Verdict:
        """Compare.

        Args:
            subject: a copy on the device.
            run: the same as it is measured.
            device: where.
        """
        found = _results(subject, run, [x.to(device) for x in self._inputs], self.precision(device))
        errors: dict[str, float] = {}
        try:
            for name, exact in self._oracle.items():
                budget = assert_within_budget(found[name], self._baseline[name].bfloat16(), exact, name, BUDGET)
                errors[name] = float(f"{budget.total:.3g}")
        except AssertionError as error:
            return Verdict(False, errors, str(error))
        return Verdict(True, errors)


def _gradient(out: Tensor) -> Tensor:
    """The same random gradient for results of every dtype and on every device: bfloat16 holds it."""
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(out.device, out.dtype)


def _results(
    subject: Subject, run: Callable[..., Tensor], inputs: Sequence[Tensor], precision: AbstractContextManager[object]
) -> dict[str, Tensor]:
    """Output, gradients of the inputs, and those of all weights in one row, on the CPU."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    with precision:
        out = run(*leaves)
    subject.zero_grad(set_to_none=True)
    out.backward(_gradient(out))
    results = {"out": out.detach().cpu()}
    for index, leaf in enumerate(leaves):
        assert leaf.grad is not None
        results[f"dinput_{index}"] = leaf.grad.cpu()
    weights = [parameter.grad.flatten().cpu() for parameter in subject.parameters() if parameter.grad is not None]
    return results | ({"dweights": torch.cat(weights)} if weights else {})


def _call(
    subject: Subject, run: Callable[..., Tensor], inputs: Sequence[Tensor], precision: AbstractContextManager[object],
    *, backward: bool,
) -> tuple[Callable[[], None], Callable[[], None]]:  # fmt: skip
    """One forward or forward and backward, and what has to be done before the next one."""
    leaves = [x.requires_grad_(backward) for x in inputs]
    with torch.no_grad(), precision:
        gradient = _gradient(subject(*leaves))

    def call() -> None:
        with torch.set_grad_enabled(backward):
            with precision:
                out = run(*leaves)
            if backward:
                out.backward(gradient)

    def forget() -> None:
        for leaf in (*leaves, *subject.parameters()):
            leaf.grad = None

    return call, forget


def _times(call: Callable[[], None], forget: Callable[[], None], device: torch.device, calls: int) -> dict[str, Any]:
    """Time that the CPU spends on a call while the GPU has nothing else to do, and what the GPU then does."""
    samples = []
    for number in range(WARM_UP_CALLS + calls):
        forget()
        _wait(device)
        begin = time.perf_counter()
        call()
        elapsed = 1000 * (time.perf_counter() - begin)
        if number >= WARM_UP_CALLS:
            samples.append(elapsed)
    _wait(device)
    samples.sort()
    p20, p80 = (samples[round(share * (len(samples) - 1))] for share in (0.2, 0.8))
    times = {"host_ms_p50": statistics.median(samples), "host_ms_p20": p20, "host_ms_p80": p80}
    found: dict[str, Any] = {name: round(value, 4) for name, value in times.items()}
    if device.type == "cuda":
        from torch.profiler import ProfilerActivity, profile

        forget()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            call()
            _wait(device)
        events = [event for event in trace.events() or () if event.device_type.name == "CUDA"]
        found["launches"] = len(events)
        found["gpu_ms"] = round(sum(float(event.time_range.elapsed_us()) for event in events) / 1000, 4)
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _progress(row: HostRow) -> str:
    name = f"  {row.case:14} {row.provider:6} {row.weights:9} {row.mode:16} {row.tokens:7,}"
    return f"{name} WRONG: {row.note}" if row.host_ms_p50 is None else f"{name} {row.host_ms_p50:8.3f} ms"


def host_table(rows: Sequence[HostRow]) -> str:
    """Rows as text, with the host time over that of Llama's layer, and the targets of this GPU."""
    lines: list[tuple[str, ...]] = [_HEADER]
    for row in rows:
        if row.host_ms_p50 is None:
            continue
        ratio, found = of_llama(row, rows), dataclasses.asdict(row)
        lines.append((
            row.case, row.provider, row.weights, row.mode, f"{row.tokens:,}", f"{row.host_ms_p50:.3f}",
            f"{row.host_ms_p20:.3f}", f"{row.host_ms_p80:.3f}", "" if row.launches is None else str(row.launches),
            "" if row.gpu_ms is None else f"{row.gpu_ms:.3f}", "" if ratio is None else f"{ratio:.2f}",
            "; ".join(_verdict(target, row, ratio) for target in host_targets(row.gpu) if target.is_of(found)),
        ))  # fmt: skip
    return "\n".join(align(lines, words=(0, 1, 2, 3)))


def of_llama(row: HostRow, rows: Sequence[HostRow]) -> float | None:
    """Host time of a layer of ours over that of Llama's in the same run; None where there is no such row."""
    if row.case != "host.module" or row.provider != "nsa" or row.host_ms_p50 is None:
        return None
    same = ("run_id", "case", "mode", "shape", "width", "weights", "tokens")
    for other in rows:
        if other.provider == "llama" and all(getattr(other, name) == getattr(row, name) for name in same):
            return None if not other.host_ms_p50 else row.host_ms_p50 / other.host_ms_p50
    return None


def _verdict(target: HostTarget, row: HostRow, ratio: float | None) -> str:
    value = ratio if target.unit == "of llama" else row.launches
    if value is None:
        return ""
    bounds = [("must", target.must), ("goal", target.goal)]
    return f"{target.unit}: " + ", ".join(f"{name} {bound:g} {'pass' if value <= bound else 'FAIL'}" for name, bound in bounds)
