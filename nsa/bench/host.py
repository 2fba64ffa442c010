"""``nsa bench host``: CPU time of a layer, compared with transformers' Llama attention."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from nsa.bench.clock import Fields, Subject, Timing, measure, percentiles, synchronize
from nsa.bench.gate import judge_module, module_results, random_gradient
from nsa.bench.report import Results
from nsa.config import NSAConfig
from nsa.errors import check
from nsa.extras import require
from nsa.module import NativeSparseAttention
from nsa.train.execution.precision import autocast

PROVIDERS = ("nsa", "llama")
MODES = ("fwd", "fwd_bwd", "compiled")
DTYPE = torch.bfloat16
WARM_UP_CALLS, CALLS = 5, 40
# Allowed error as a multiple of the CPU's: for the worst of 12,288 rows in bfloat16, two correct
# results differ by more than a factor of two.
BUDGET = 3.0


class Llama(nn.Module):
    """Llama's attention by SDPA; cosines and sines of a length are computed once, as a model does.

    Args:
        shape: heads.
        width: size of the input.
        tokens: maximum length.
    """

    cosines: Tensor
    sines: Tensor

    def __init__(self, shape: NSAConfig, width: int, tokens: int) -> None:
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
        self.attention = LlamaAttention(config, 0)
        rotary, positions = LlamaRotaryEmbedding(config), torch.arange(tokens)[None]
        for name, x in zip(("cosines", "sines"), rotary(torch.empty(0), positions), strict=True):
            self.register_buffer(name, x)

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        angles = (self.cosines[:, : x.shape[1]], self.sines[:, : x.shape[1]])
        out: Tensor = self.attention(x, position_embeddings=angles, attention_mask=None)[0]
        return out


def bench_host(
    results: Results,
    shape: str,
    config: NSAConfig,
    tokens: Sequence[int],
    *,
    providers: Sequence[str] = PROVIDERS,
    modes: Sequence[str] = MODES,
    lora: int = 0,
) -> None:
    """Measure, print and write rows of a layer with bfloat16 weights.

    Args:
        results: receives the rows.
        shape: name of the heads in rows.
        config: the heads; the layer's input has the size of all queries.
        tokens: sequence lengths, tokens.
        providers: members of ``PROVIDERS``.
        modes: members of ``MODES``.
        lora: rank of adapters on all projections, trained alone; 0 means none.

    Raises:
        UsageError: transformers is requested but not installed.
        ValueError: ``lora`` is given and peft is not installed.
    """
    if "llama" in providers:
        require("nsa bench host", "hf")
    hint = "Install it with: pip install peft"
    check(not lora or find_spec("peft") is not None, "lora", "be 0 without peft", lora, hint)
    device, cpu = results.device, torch.device("cpu")
    width = config.num_heads * config.head_dim
    # So short that every block is selected: otherwise rounding could decide between blocks with
    # nearly equal scores (`nsa bench attention` checks the selection).
    gate_tokens = config.num_selected_blocks * config.block_size
    for provider in providers:
        torch.manual_seed(0)
        layer: nn.Module = NativeSparseAttention(width, config)
        if provider == "llama":
            layer = Llama(config, width, max(gate_tokens, *tokens))
        settings = {"width": width}
        if lora:
            from peft import LoraConfig, inject_adapter_in_model

            adapters = LoraConfig(r=lora, target_modules=r".*_proj", init_lora_weights=False)
            layer, settings["lora"] = inject_adapter_in_model(adapters, layer), lora
        layer, x = layer.to(DTYPE), torch.randn(1, gate_tokens, width, dtype=DTYPE)
        exact = deepcopy(layer).double()
        plain = module_results(layer, layer, [x], autocast(cpu, "fp32"))
        oracle = module_results(exact, exact, [x.double()], autocast(cpu, "fp32"))
        for mode in modes:
            torch.compiler.reset()  # each mode compiles the same code again
            copy = deepcopy(layer).to(device)
            run = torch.compile(copy) if mode == "compiled" else copy
            found = module_results(copy, run, [x.to(device)], autocast(device, "fp32"))
            checked = judge_module(found, plain, oracle, DTYPE, BUDGET)
            for length in tokens:
                inputs = torch.randn(1, length, width).to(device, DTYPE)
                make = partial(_subject, copy, run, inputs, mode != "fwd", checked)
                row: Fields = {"case": "host.module", "provider": provider, "shape": shape}
                row |= {"dtype": "bfloat16", "mode": mode, "settings": settings}
                results.add(**row, seq_len=length, batch=1, **measure(make, device))


def _subject(
    layer: nn.Module,
    run: Callable[..., Tensor],
    x: Tensor,
    backward: bool,
    checked: Fields,
) -> Subject:
    """Prepare a forward pass, or forward and backward, for :func:`host_times`."""
    x.requires_grad_(backward)
    with torch.no_grad():
        gradient = random_gradient(layer(x))

    def forget() -> None:
        for leaf in (x, *layer.parameters()):
            leaf.grad = None

    def call() -> None:
        with torch.set_grad_enabled(backward):
            out = run(x)
            if backward:
                out.backward(gradient)

    def profiled_call() -> None:
        forget()
        call()

    timed = partial(host_times, call, forget, x.device)
    return Subject(profiled_call, lambda: checked, time=timed)


def host_times(
    call: Callable[[], None], forget: Callable[[], None], device: torch.device
) -> Timing:
    """Time a call on the CPU while the GPU is idle.

    Args:
        call: the call.
        forget: called before each call, outside the measured time.
        device: the GPU, which is idle before each call.
    """
    samples = []
    for _ in range(WARM_UP_CALLS + CALLS):
        forget()
        synchronize(device)
        begin = time.perf_counter()
        call()
        samples.append(1000 * (time.perf_counter() - begin))
    return percentiles(samples[WARM_UP_CALLS:], 1, "host")
