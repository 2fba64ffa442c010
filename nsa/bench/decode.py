"""``nsa bench decode``: attention of one step, and steps of whole models."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from nsa.attention import AttentionInputs
from nsa.bench.attention import Provider, missing_kernel
from nsa.bench.cases import Point, normal
from nsa.bench.clock import (
    MAX_SAMPLES,
    Fields,
    Subject,
    Timing,
    UnsupportedError,
    judge,
    measure,
    percentiles,
    synchronize,
)
from nsa.bench.host import BUDGET
from nsa.bench.report import Results
from nsa.bench.rows import DENSE_DECODE
from nsa.bench.train import model_of, selected_tokens
from nsa.cache import NSACache
from nsa.cache.chunk import new_tokens
from nsa.config import NSAConfig
from nsa.extras import install_command, missing
from nsa.lm.config import LMConfig
from nsa.lm.decoder import Decoder
from nsa.lm.dense_attention import dense_pattern
from nsa.lm.llama import llama_settings
from nsa.lm.model import LanguageModel
from nsa.ops._backend import kernels_run_on_cpu
from nsa.ops._sequences import Sequences
from nsa.rope import Rope
from nsa.testing import assert_within_budget, make_inputs
from nsa.testing.budget import CEILING
from nsa.testing.decode import fill_cache, reference_step
from nsa.train.config import TrainConfig

CASES = ("decode.attention", "decode.model")
ATTENTION = ("nsa", *DENSE_DECODE, "reference")
# Models; the last two are generated with by transformers: this library's and a Llama of equal size.
MODELS = ("nsa", "dense", "dense-matched", "hf", "transformers")
PROVIDERS = tuple(dict.fromkeys((*ATTENTION, *MODELS)))
_FOREIGN = (*DENSE_DECODE[:-1], "transformers")
# Default context lengths and numbers of sequences.
POINTS = {
    CASES[0]: ((65_536, 32), (16_384, 128)),
    CASES[1]: ((2048, 1), (65_536, 1), (1_048_576, 1), (16_384, 64), (65_536, 64)),
}
DTYPE = torch.bfloat16  # weights, products, attention and residual stream
GATE_LAYERS, GATE_STEPS = 2, 3  # on a GPU the third step replays the CUDA graph of the second
LONGEST_PROMPT = 65_536  # tokens that generate() computes before its steps
OTHER_STEPS = 10  # warm-up, profile and peak memory
# Backends of SDPA, and a part of the names of their kernels.
_SDPA = {
    "cudnn": (SDPBackend.CUDNN_ATTENTION, "cudnn"),
    "fa2": (SDPBackend.FLASH_ATTENTION, "flash_fwd"),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, "fmha"),
}
DENSE_KERNELS = ("decode_append", "decode_scan", "decode_merge")
KERNELS = (*DENSE_KERNELS, "decode_select")


def bench_decode(
    results: Results,
    shape: str,
    heads: NSAConfig,
    config: TrainConfig,
    name: str,
    *,
    cases: Sequence[str] = CASES,
    providers: Sequence[str] | None = None,
    points: Sequence[tuple[int, int]] | None = None,
    variants: Sequence[Provider] = (),
    changed: Fields | None = None,
) -> None:
    """Measure, print and write rows.

    Args:
        results: receives the rows.
        shape: name in rows of the heads of ``decode.attention``.
        heads: contains them.
        config: contains the model of ``decode.model``.
        name: name of that configuration in rows.
        cases: members of ``CASES``.
        providers: members of ``PROVIDERS``; None means, for attention, all but the reference (on a
            CPU only the reference), and for models, sparse and dense.
        points: context length and number of sequences; None means ``POINTS``.
        variants: this library with other fields of the pattern, see
            :func:`nsa.bench.attention.parse_variant`.
        changed: settings of ``config`` that differ from its file.
    """
    device, patterns = results.device, {each.name: dict(each.variant) for each in variants}
    attention = ATTENTION[:-1] if device.type == "cuda" else ATTENTION[-1:]
    known = {CASES[0]: (ATTENTION, attention), CASES[1]: (MODELS, MODELS[:2])}
    for case in cases:
        names = [each for each in providers or known[case][1] if each in known[case][0]]
        for (length, batch), each in product(points or POINTS[case], [*names, *patterns]):
            variant, kind = patterns.get(each), "nsa" if each in patterns else each
            changes: Fields = variant or {}
            given = replace(heads, **changes), length, batch, "random", DTYPE, device
            point = Point(shape, *given)
            row, make = point.fields() | {"variant": variant}, partial(attention_step, kind, point)
            if case == CASES[1]:
                row |= {"shape": name, "choice": "model", "changed": changed}
                model = model_of(config, kind).model
                model = replace(model, nsa=replace(model.nsa, **changes))
                make = partial(model_step, model, length, batch, device)
            if each in MODELS[3:]:
                make = partial(generate_step, each, config, length, batch, device)
            found = measure(make, device, is_ours=each not in _FOREIGN)
            results.add(**row, case=case, provider=each, mode="step", **found)


# --- Attention of one step
@torch.no_grad()
def attention_step(provider: str, point: Point) -> Subject:
    """Prepare a provider's attention of one new token, after a context of random keys and values.

    Raises:
        UnsupportedError: the provider needs a GPU.
    """
    config, is_reference = point.config, provider == "reference"
    if not is_reference and point.device.type != "cuda" and not kernels_run_on_cpu():
        raise UnsupportedError("it needs a CUDA GPU")
    kernels: tuple[str, ...] = KERNELS if provider == "nsa" else DENSE_KERNELS
    if provider == "dense-scan":
        config = dense_pattern(config, point.seq_len)
    if provider in ("nsa", "dense-scan", "reference"):
        call, exact, read = _cached(point, config, is_reference)
    else:
        call, exact, kernels = _static(point, config, provider)
        sizes = config.head_dim + config.value_dim
        read = point.tokens * config.num_kv_heads * sizes

    @torch.no_grad()
    def compare() -> dict[str, float]:
        out = call()
        sequences = sorted({0, out.shape[0] - 1})
        dtypes = (torch.float64, torch.float32)
        oracle, plain = (torch.cat([exact(b, dtype) for b in sequences]) for dtype in dtypes)
        found = assert_within_budget(out[sequences], plain.to(out.dtype), oracle, "out")
        return {"out": found.total}

    work = {"tokens": point.batch}
    if not is_reference:
        work["read"] = read * point.dtype.itemsize
    return Subject(
        torch.no_grad()(call),
        lambda: judge(compare),
        partial(missing_kernel, parts=(() if is_reference else kernels, ()), mode="fwd"),
        lambda: work,
        capture=not is_reference,
    )


Exact = Callable[[int, torch.dtype], Tensor]  # (sequence, dtype) -> attention [1, Hq, Dv]


def _cached(
    point: Point, config: NSAConfig, is_reference: bool
) -> tuple[Callable[[], Tensor], Exact, int]:
    """Return a step over a decode cache, its reference, and the number of elements it reads."""
    batch, length = point.batch, point.seq_len - 1
    x = make_inputs(config, [1] * batch, seed=1, dtype=point.dtype, device=point.device)
    is_sparse = config.branches != ("win",)
    sparse = (x.k_cmp_raw, x.v_cmp_raw, x.k_slc, x.v_slc) if is_sparse else [None] * 4
    gates = x.gates if is_sparse else None
    given = (x.q, *sparse, x.k_win, x.v_win, gates, None, None, x.q_idx, x.k_idx)
    inputs = AttentionInputs._make(given)
    rope, whole = Rope.from_config(config), NSACache(config, 1, batch, max_tokens=point.seq_len)
    (layer,) = whole.layers
    if not is_reference and not layer.has_kernels:
        raise UnsupportedError("steps of this pattern run the operators of the forward pass")
    layer.attend(inputs, rope=rope, sequences=Sequences(None, batch, 1, 1, point.device))
    fill_cache(whole, length - 1)
    tensors = layer.tensors
    assert tensors is not None

    def exact(sequence: int, dtype: torch.dtype) -> Tensor:
        return reference_step(config, tensors, length, inputs, rope, sequence, dtype)

    if is_reference:
        return lambda: torch.cat([exact(i, point.dtype) for i in range(batch)]), exact, 0
    from nsa.ops.decode.launch import append, attend

    def step(reads: Tensor | None = None) -> Tensor:
        append(new_tokens(inputs, tensors), tensors, None, rope, config, 1)
        return attend(inputs.q, None, x.q_idx, gates, tensors, config, 1, reads)[0]

    reads = torch.zeros(batch * config.num_kv_heads, 4, dtype=torch.int64, device=point.device)
    step(reads)
    with_values, scored = int(reads[:, :3].sum()), int(reads[:, 3].sum())
    sizes = config.head_dim + config.value_dim
    return step, exact, with_values * sizes + scored * config.scoring.head_dim


def _static(
    point: Point, config: NSAConfig, provider: str
) -> tuple[Callable[[], Tensor], Exact, tuple[str, ...]]:
    """Return PyTorch dense attention over static keys and values, its reference and its kernels.

    With ``-folded``, query heads of a group are the rows of one query tile.
    """
    heads, batch = config.num_kv_heads, point.batch
    q = normal((batch, config.num_heads, 1, config.head_dim), point, seed=1)
    k = normal((batch, heads, point.seq_len, config.head_dim), point, seed=2)
    v = normal((batch, heads, point.seq_len, config.value_dim), point, seed=3)

    def exact(sequence: int, dtype: torch.dtype) -> Tensor:
        queries = q[sequence].to(dtype).view(heads, -1, config.head_dim)
        scores = queries @ k[sequence].to(dtype).mT * config.head_dim**-0.5
        return (scores.softmax(-1) @ v[sequence].to(dtype)).flatten(0, 1)[None]

    kind = provider.removeprefix("dense-").removesuffix("-folded")
    queries = q.view(batch, heads, -1, config.head_dim) if provider.endswith("folded") else q
    if kind == "flex":
        from torch.nn.attention.flex_attention import flex_attention

        torch.compiler.reset()  # compile each point separately, with static shapes
        attend: Any = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        kernel = "triton_"
    else:
        backend, kernel = _SDPA[kind]
        attend = sdpa_kernel(backend)(scaled_dot_product_attention)

    def call() -> Tensor:
        out: Tensor = attend(queries, k, v, enable_gqa=queries is q)
        return out.reshape(batch, config.num_heads, config.value_dim)

    return call, exact, (kernel,)


# --- Models
def new_model(config: LMConfig, device: torch.device) -> LanguageModel:
    """Make a model with random weights in ``DTYPE``, equal on every device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LanguageModel(config).to(device, DTYPE).eval()


@torch.no_grad()
def model_step(config: LMConfig, context: int, batch: int, device: torch.device) -> Subject:
    """Prepare greedy decode steps after a context of random keys; tokens stay on the device."""
    most = context + MAX_SAMPLES + OTHER_STEPS
    decoder = Decoder(new_model(config, device), batch, max_tokens=most)
    tokens = decoder.prefill([[0]] * batch).argmax(-1, keepdim=True)
    fill_cache(decoder.cache, context - 2)

    @torch.no_grad()
    def step() -> None:
        nonlocal tokens
        tokens = decoder.step(tokens).argmax(-1)

    kernels: tuple[str, ...] = ()
    if all(layer.has_kernels for layer in decoder.cache.layers):
        kernels = DENSE_KERNELS if config.attention_kind == "dense" else KERNELS
    fault = partial(missing_kernel, parts=(kernels, ()), mode="fwd")
    check = partial(check_decoder, config, device)
    return Subject(step, check, fault, lambda: {"tokens": batch}, capture=False)


@cache
def check_decoder(config: LMConfig, device: torch.device) -> Fields:
    """Compare logits of a prompt and of steps after it with full passes in fp64 on the CPU.

    The model has few layers and so few tokens that every block is selected: otherwise rounding
    could decide between blocks with nearly equal scores.
    """
    config = config.sample(GATE_LAYERS)
    length = min(map(selected_tokens, config.kinds))
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(config.vocab_size, (2, length), generator=generator)
    model = new_model(config, torch.device("cpu"))

    @torch.no_grad()
    def expected(whole: LanguageModel) -> Tensor:
        return torch.stack([whole(text)[-GATE_STEPS - 1 :] for text in texts])

    def compare() -> dict[str, float]:
        plain, exact = expected(model), expected(deepcopy(model).double())
        decoder = Decoder(deepcopy(model).to(device), 2, max_tokens=length)
        found = [decoder.prefill(texts[:, :-GATE_STEPS].tolist())[:, None]]
        for token in texts[:, -GATE_STEPS:].to(device).split(1, dim=1):
            found.append(decoder.step(token).clone())
        logits = torch.cat(found, 1).cpu()
        return {"logits": assert_within_budget(logits, plain, exact, "logits", BUDGET).total}

    return judge(compare)


# --- generate() of transformers
def new_generator(name: str, config: TrainConfig, most: int) -> Any:
    """Make a transformers model with random weights for ``most`` tokens, see ``MODELS``."""
    if name == "hf":
        from nsa.hf import NSAForCausalLM, NSALMConfig

        model = model_of(config, "nsa").model
        return NSAForCausalLM(NSALMConfig.of(model, max_position_embeddings=most))
    from transformers import LlamaConfig, LlamaForCausalLM

    dense = model_of(config, "dense").model
    matrices = 3 if dense.mlp == "swiglu" else 2  # Llama's MLP has three
    dense = replace(dense, mlp="swiglu", mlp_hidden_size=dense.mlp_hidden_size * matrices // 3)
    return LlamaForCausalLM(LlamaConfig(**llama_settings(dense), max_position_embeddings=most))


def generate_step(
    name: str, config: TrainConfig, context: int, batch: int, device: torch.device
) -> Subject:
    """Prepare ``generate`` with a static cache, whose steps are timed one by one.

    The logits of the last step are compared with a full pass of the same model.

    Raises:
        UnsupportedError: transformers is not installed, or the prompt would take minutes.
    """
    if missing("hf"):
        raise UnsupportedError(f"transformers is not installed: {install_command('hf')}")
    if context * batch > LONGEST_PROMPT:
        raise UnsupportedError(f"measured with at most {LONGEST_PROMPT:,} tokens of prompts")
    torch.manual_seed(0)
    model = new_generator(name, config, context + MAX_SAMPLES + 1).to(device, DTYPE).eval()
    prompt = torch.randint(1, config.model.vocab_size, (batch, context), device=device)
    marks, last = list[float](), list[Tensor]()

    def note(ids: Tensor, logits: Tensor) -> Tensor:
        synchronize(device)
        marks.append(1000 * time.perf_counter())
        last[:] = [logits.clone()]
        return logits

    def call() -> Tensor:
        marks.clear()
        ids: Tensor = model.generate(
            prompt,
            do_sample=False,
            cache_implementation="static",  # compiles Llama's steps on a GPU
            eos_token_id=None,
            pad_token_id=0,
            attention_mask=torch.ones_like(prompt),
            logits_processor=[note],
            max_new_tokens=MAX_SAMPLES + 1,
        )
        return ids

    @torch.no_grad()
    def compare() -> dict[str, float]:
        call()  # compiles
        exact = model(call()[:, :-1], logits_to_keep=1).logits[:, -1].float()
        error = float((last[0].float() - exact).norm() / exact.norm())
        assert error <= CEILING[DTYPE], f"logits: error {error:.3g}"
        return {"logits": error}

    def timing() -> Timing:
        return percentiles([b - a for a, b in pairwise(marks)], 1, "generate, static cache")

    return Subject(call, lambda: judge(compare), work=lambda: {"tokens": batch}, time=timing)
