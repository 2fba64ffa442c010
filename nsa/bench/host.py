"""``nsa bench host``: what a layer costs the CPU, compared with transformers' Llama attention."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nsa.attention import native_sparse_attention
from nsa.bench.clock import gpu_events, percentiles, profiled, release_memory, synchronize
from nsa.bench.gate import ModelGate, random_gradient
from nsa.bench.points import Shape
from nsa.bench.rows import Origin, Results
from nsa.bench.table import align, field, named, number, table, verdicts
from nsa.bench.targets import outcomes_of
from nsa.config import NSAConfig
from nsa.extras import require
from nsa.module import NativeSparseAttention
from nsa.rope import Rope
from nsa.train.execution.precision import autocast

CASES = ("host.function", "host.module")
PROVIDERS = ("nsa", "llama")
# How ``torch.compile`` is called for a mode; the others are eager.
COMPILED: dict[str, dict[str, Any]] = {
    "compiled": {},
    "reduce_overhead": {"mode": "reduce-overhead"},
}
MODES = ("fwd", "fwd_bwd", *COMPILED)
WEIGHTS = ("bfloat16", "float32")
WARM_UP_CALLS = 5
# Errors allowed, as a multiple of the CPU's own. The worst of 12,288 rows in bfloat16 differs by
# more than two between equals.
BUDGET = 3.0

Fields = dict[str, Any]  # of a row


@dataclass(frozen=True)
class HostPlan:
    """What ``nsa bench host`` is asked to measure.

    Attributes:
        shape: heads.
        width: of the layer's input.
        tokens: numbers of tokens, of one sequence each.
        cases, providers, modes, weights: words of those above; float32 weights run under autocast
            to bfloat16.
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
    """One implementation in one mode; ``docs/benchmarks.md`` explains the fields."""

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


class Function(nn.Module):
    """:func:`nsa.native_sparse_attention` with the default pattern."""

    def __init__(self, config: NSAConfig) -> None:
        super().__init__()
        self.config, self.rope = config, Rope.from_config(config)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Attend."""
        backend = "reference" if inputs[0].dtype == torch.float64 else "auto"
        call: Callable[..., Tensor] = native_sparse_attention
        return call(*inputs, None, self.config, rope=self.rope, backend=backend)


class Llama(nn.Module):
    """Llama's attention by SDPA; a model computes cosines and sines once for all layers."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, shape: NSAConfig, width: int) -> None:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

        super().__init__()
        config = LlamaConfig.from_dict(
            {
                "hidden_size": width,
                "attn_implementation": "sdpa",
                "num_attention_heads": shape.num_heads,
                "num_key_value_heads": shape.num_kv_heads,
                "head_dim": shape.head_dim,
            }
        )
        self.attention, self.rotary = LlamaAttention(config, 0), LlamaRotaryEmbedding(config)
        self.register_buffer("cosines", torch.empty(0))
        self.register_buffer("sines", torch.empty(0))

    def keep_angles(self, tokens: int) -> None:
        """Compute the cosines and sines of a length."""
        like = self.attention.q_proj.weight
        positions = torch.arange(tokens, device=like.device)[None]
        self.cosines, self.sines = self.rotary(like, positions)

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        angles = (self.cosines, self.sines)
        out: Tensor = self.attention(x, position_embeddings=angles, attention_mask=None)[0]
        return out


def _inputs(plan: HostPlan, subject: nn.Module, tokens: int) -> list[Tensor]:
    """Random inputs in fp32 on the CPU: of the function q, k and v of each branch, and gates."""
    if isinstance(subject, Llama):
        subject.keep_angles(tokens)
    if not isinstance(subject, Function):
        return [torch.randn(1, tokens, plan.width)]
    config = subject.config
    keys, values = ((config.num_kv_heads, size) for size in (config.head_dim, config.value_dim))
    sizes = [(config.num_heads, config.head_dim), *[keys, values] * 3]
    gates = torch.rand(1, tokens, config.num_heads, 3)
    return [*(torch.randn(1, tokens, *size) for size in sizes), gates]


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
    results = Results(HostRow, plan.out, device, plan.commit)
    kinds = [("host.function", "bfloat16", "nsa")]  # a function has no weights
    kinds += itertools.product(("host.module",), plan.weights, plan.providers)
    for case, weights, provider in kinds:
        if case in plan.cases:
            named = {"case": case, "weights": weights, "provider": provider}
            for found in _measure(plan, case, getattr(torch, weights), provider, device):
                shape = {"shape": plan.shape.name, "width": plan.width}
                results.add(_progress, **named, **shape, **found)
    return results.finish(host_table)


def _progress(row: HostRow) -> str:
    name = f"  {row.case:14} {row.provider:6} {row.weights:9} {row.mode:16} {row.tokens:7,}"
    return f"{name} {row.host_ms_p50:8.3f} ms" if row.correct else f"{name} WRONG: {row.note}"


def _measure(
    plan: HostPlan, case: str, dtype: torch.dtype, provider: str, device: torch.device
) -> Iterator[Fields]:
    """The gate, then what a row says, for each mode and number of tokens.

    The gate's sequence is so short that every block is selected: where blocks compete, rounding
    decides between two with nearly equal scores (``nsa bench attention`` checks the selection).
    """
    torch.manual_seed(0)
    config = plan.shape.config()
    original: nn.Module = Function(config)
    if case == "host.module" and provider == "nsa":
        original = NativeSparseAttention(plan.width, config)
    elif case == "host.module":
        original = Llama(config, plan.width)
    original.to(dtype)
    compute_dtype = "bf16" if dtype == torch.float32 else "fp32"  # by autocast
    few = config.num_selected_blocks * config.block_size
    inputs = [x.to(dtype) for x in _inputs(plan, original, few)]
    gate = ModelGate(original, inputs, compute_dtype, torch.bfloat16, lambda _: "weights")
    for mode in plan.modes:
        release_memory(device)
        torch.compiler.reset()  # each mode compiles the same code anew
        subject = deepcopy(original).to(device)
        run: Callable[..., Tensor] = subject
        if mode in COMPILED:
            run = torch.compile(subject, **COMPILED[mode])
        verdict = gate.check(subject, run, device, BUDGET)
        for tokens in plan.tokens:
            found = {"mode": mode, "tokens": tokens, **asdict(verdict)}
            if verdict.correct:
                leaves = [x.to(device, dtype) for x in _inputs(plan, subject, tokens)]
                precision = autocast(device, compute_dtype)
                call, forget = _call(subject, run, leaves, precision, backward=mode != "fwd")
                found |= _times(call, forget, device, plan.calls)
            yield found


def _call(
    subject: nn.Module,
    run: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    precision: torch.autocast,
    *,
    backward: bool,
) -> tuple[Callable[[], None], Callable[[], None]]:
    """One forward or forward and backward, and what has to be done before the next one."""
    leaves = [x.requires_grad_(backward) for x in inputs]
    with torch.no_grad(), precision:
        gradient = random_gradient(subject(*leaves))

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


def _times(
    call: Callable[[], None],
    forget: Callable[[], None],
    device: torch.device,
    calls: int,
) -> Fields:
    """Time that the CPU spends on a call while the GPU is idle, and what the GPU then does."""
    samples = []
    for _ in range(WARM_UP_CALLS + calls):
        forget()
        synchronize(device)
        begin = time.perf_counter()
        call()
        samples.append(1000 * (time.perf_counter() - begin))
    synchronize(device)
    timing = percentiles(samples[WARM_UP_CALLS:], 1, "cpu")
    found: Fields = {f"host_ms_{p}": getattr(timing, p) for p in ("p50", "p20", "p80")}
    if device.type == "cuda":
        forget()
        events = gpu_events(profiled(call, device))
        gpu_us = sum(float(event.time_range.elapsed_us()) for event in events)
        found |= {"launches": len(events), "gpu_ms": gpu_us / 1000}
    return found


def host_table(rows: Sequence[HostRow]) -> str:
    """Rows as text, with the host time over that of Llama's layer, and targets."""

    def target(row: HostRow) -> str:
        values = {"of llama": of_llama(row, rows), "launches": row.launches}
        return verdicts(outcomes_of(row, values.__getitem__))

    cells = {
        **named("case", "provider", "weights", "mode"),
        "tokens": field("tokens", ","),
        "host ms": field("host_ms_p50", ".3f"),
        "p20": field("host_ms_p20", ".3f"),
        "p80": field("host_ms_p80", ".3f"),
        "launches": field("launches"),
        "GPU ms": field("gpu_ms", ".3f"),
        "of llama": lambda row: number(of_llama(row, rows), ".2f"),
        "target": target,
    }
    return "\n".join(align(table(cells, [row for row in rows if row.correct])))


def of_llama(row: HostRow, rows: Sequence[HostRow]) -> float | None:
    """Host time of this library's layer divided by Llama's in the same run; None without it."""
    same = ("run_id", "case", "mode", "shape", "width", "weights", "tokens")
    if row.case != "host.module" or row.provider != "nsa" or row.host_ms_p50 is None:
        return None
    for other in rows:
        alike = all(getattr(other, name) == getattr(row, name) for name in same)
        if other.provider == "llama" and other.host_ms_p50 and alike:
            return row.host_ms_p50 / other.host_ms_p50
    return None
