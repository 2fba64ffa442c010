"""``nsa bench host``: CPU time of a layer, compared with transformers' Llama attention."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nsa.attention import native_sparse_attention
from nsa.bench.cases import Shape
from nsa.bench.clock import Subject, Timing, Verdict, measure, percentiles, synchronize
from nsa.bench.gate import ModelGate, random_gradient
from nsa.bench.table import Results
from nsa.config import NSAConfig
from nsa.extras import require
from nsa.module import NativeSparseAttention
from nsa.rope import Rope
from nsa.train.execution.precision import autocast

CASES = ("host.function", "host.module")
PROVIDERS = ("nsa", "llama")
# Options of torch.compile by mode; the other modes are eager.
COMPILED: dict[str, dict[str, Any]] = {
    "compiled": {},
    "reduce_overhead": {"mode": "reduce-overhead"},
}
MODES = ("fwd", "fwd_bwd", *COMPILED)
WEIGHTS = ("bfloat16", "float32")  # float32 runs under autocast to bfloat16
WARM_UP_CALLS = 5
# Allowed error as a multiple of the CPU's: for the worst of 12,288 rows in bfloat16, two correct
# results differ by more than a factor of two.
BUDGET = 3.0


class Function(nn.Module):
    """:func:`nsa.native_sparse_attention` with the default pattern."""

    def __init__(self, config: NSAConfig) -> None:
        super().__init__()
        self.config, self.rope = config, Rope.from_config(config)

    def inputs(self, tokens: int, width: int) -> list[Tensor]:
        """Draw q, k and v of each branch, and gates, in fp32 on the CPU."""
        config = self.config
        keys, values = ((config.num_kv_heads, n) for n in (config.head_dim, config.value_dim))
        sizes = [(config.num_heads, config.head_dim), *[keys, values] * 3]
        gates = torch.rand(1, tokens, config.num_heads, 3)
        return [*(torch.randn(1, tokens, *size) for size in sizes), gates]

    def forward(self, *inputs: Tensor) -> Tensor:
        """Attend."""
        backend = "reference" if inputs[0].dtype == torch.float64 else "auto"
        call: Callable[..., Tensor] = native_sparse_attention
        return call(*inputs, None, self.config, rope=self.rope, backend=backend)


class Llama(nn.Module):
    """Llama's attention by SDPA; cosines and sines are computed once, as a model does."""

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

    def inputs(self, tokens: int, width: int) -> list[Tensor]:
        """Draw an input, and compute the cosines and sines of its length."""
        like = self.attention.q_proj.weight
        positions = torch.arange(tokens, device=like.device)[None]
        self.cosines, self.sines = self.rotary(like, positions)
        return [torch.randn(1, tokens, width)]

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        angles = (self.cosines, self.sines)
        out: Tensor = self.attention(x, position_embeddings=angles, attention_mask=None)[0]
        return out


def _inputs(subject: nn.Module, tokens: int, width: int) -> list[Tensor]:
    if isinstance(subject, Function | Llama):
        return subject.inputs(tokens, width)
    return [torch.randn(1, tokens, width)]


def bench_host(
    shape: Shape,
    width: int,
    tokens: Sequence[int],
    device: torch.device,
    *,
    cases: Sequence[str] = CASES,
    providers: Sequence[str] = PROVIDERS,
    modes: Sequence[str] = MODES,
    weights: Sequence[str] = WEIGHTS,
    calls: int = 40,
    out: Path | None = None,
    commit: str | None = None,
) -> bool:
    """Measure, print and write rows.

    Args:
        shape: heads.
        width: size of the layer's input.
        tokens: sequence lengths, tokens.
        device: the measured device.
        cases: members of ``CASES``.
        providers: members of ``PROVIDERS``.
        modes: members of ``MODES``.
        weights: members of ``WEIGHTS``.
        calls: number of timed calls.
        out: JSONL file to append to; None prints the rows only.
        commit: recorded if the checkout has no git.

    Returns:
        Whether every result is correct.

    Raises:
        UsageError: transformers is requested but not installed.
    """
    if "llama" in providers and "host.module" in cases:
        require("nsa bench host", "hf")
    results = Results(out, device, commit)
    kinds = [("host.function", "bfloat16", "nsa")]  # a function has no weights
    kinds += itertools.product(("host.module",), weights, providers)
    config = shape.config()
    # So short that every block is selected: otherwise rounding could decide between blocks with
    # nearly equal scores (`nsa bench attention` checks the selection).
    gate_tokens = config.num_selected_blocks * config.block_size
    for case, name, provider in kinds:
        if case not in cases:
            continue
        torch.manual_seed(0)
        layer: nn.Module = Function(config)
        if case == "host.module":
            is_ours = provider == "nsa"
            layer = NativeSparseAttention(width, config) if is_ours else Llama(config, width)
        dtype = getattr(torch, name)
        compute_dtype = "bf16" if name == "float32" else "fp32"  # of autocast
        inputs = [x.to(dtype) for x in _inputs(layer.to(dtype), gate_tokens, width)]
        gate = ModelGate(layer, inputs, compute_dtype, torch.bfloat16, lambda _: "weights")
        row = {"case": case, "provider": provider, "shape": shape.name, "dtype": name, "batch": 1}
        for mode in modes:
            torch.compiler.reset()  # each mode compiles the same code again
            copy = deepcopy(layer).to(device)
            run = torch.compile(copy, **COMPILED[mode]) if mode in COMPILED else copy
            verdict = gate.check(copy, run, device, BUDGET)
            for length in tokens:
                leaves = [x.to(device, dtype) for x in _inputs(copy, length, width)]
                precision, backward = autocast(device, compute_dtype), mode != "fwd"
                make = partial(_subject, copy, run, leaves, precision, backward, calls, verdict)
                found = measure(make, device)
                extra = {"mode": mode, "seq_len": length, "settings": {"width": width}}
                results.add(**row, **extra, **found)
    return results.finish()


def _subject(
    layer: nn.Module,
    run: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    precision: torch.autocast,
    backward: bool,
    calls: int,
    verdict: Verdict,
) -> Subject:
    """Prepare a forward pass, or forward and backward, for :func:`host_times`."""
    device, leaves = inputs[0].device, [x.requires_grad_(backward) for x in inputs]
    with torch.no_grad(), precision:
        gradient = random_gradient(layer(*leaves))

    def forget() -> None:
        for leaf in (*leaves, *layer.parameters()):
            leaf.grad = None

    def call() -> None:
        with torch.set_grad_enabled(backward):
            with precision:
                out = run(*leaves)
            if backward:
                out.backward(gradient)

    def profiled_call() -> None:
        forget()
        call()

    return Subject(
        profiled_call, lambda: verdict, time=partial(host_times, call, forget, device, calls)
    )


def host_times(
    call: Callable[[], None], forget: Callable[[], None], device: torch.device, calls: int
) -> Timing:
    """Time a call on the CPU while the GPU is idle.

    Args:
        call: the call.
        forget: called before each call, outside the measured time.
        device: the GPU, which is idle before each call.
        calls: number of timed calls.
    """
    samples = []
    for _ in range(WARM_UP_CALLS + calls):
        forget()
        synchronize(device)
        begin = time.perf_counter()
        call()
        samples.append(1000 * (time.perf_counter() - begin))
    return percentiles(samples[WARM_UP_CALLS:], 1, "host")
