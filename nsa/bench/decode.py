"""``nsa bench decode``: attention of one step, steps of whole models, and ``generate()``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from nsa.attention import AttentionInputs
from nsa.bench.attention import missing_kernel
from nsa.bench.cases import CASES as OPERATORS
from nsa.bench.cases import Point, Shape, normal
from nsa.bench.clock import (
    Subject,
    Timing,
    UnsupportedError,
    Verdict,
    judge,
    measure,
    percentiles,
    samples_ms,
    synchronize,
)
from nsa.bench.host import BUDGET
from nsa.bench.rows import DENSE_DECODE
from nsa.bench.table import Results
from nsa.bench.train import PROVIDERS as MODELS
from nsa.bench.train import find_subjects
from nsa.cache import NSACache
from nsa.cache.chunk import new_tokens
from nsa.config import NSAConfig
from nsa.errors import check
from nsa.extras import install_command, missing
from nsa.lm.config import LMConfig
from nsa.lm.decoder import Decoder
from nsa.lm.dense_attention import dense_pattern
from nsa.lm.model import LanguageModel
from nsa.ops._backend import kernels_run_on_cpu
from nsa.ops._sequences import Sequences
from nsa.rope import Rope
from nsa.testing import assert_within_budget, make_inputs
from nsa.testing.budget import CEILING
from nsa.testing.decode import fill_cache, reference_step

WHERE = "nsa bench decode"
CASES = ("decode.attention", "decode.model")
ATTENTION = ("nsa", *DENSE_DECODE, "reference")
GENERATORS = {"hf": "nsa", "transformers": "dense"}  # models of transformers' generate()
PROVIDERS = tuple(dict.fromkeys((*ATTENTION, *MODELS, *GENERATORS)))
# Providers that may not support a point; errors of other providers are bugs of this library.
FOREIGN = (*DENSE_DECODE[:-1], "transformers")
ATTENTION_POINTS = ((65_536, 32), (16_384, 128))  # context length, number of sequences
MODEL_POINTS = ((2048, 1), (65_536, 1), (1_048_576, 1), (16_384, 64), (65_536, 64))
PREFILLS = (65_536,)
SHORTEST = 128
LONGEST_PROMPT = 65_536  # limit of generate(), which computes the prompt
DTYPE = torch.bfloat16  # weights, products, attention and residual stream
GATE_LAYERS, GATE_STEPS = 2, 3  # on a GPU the third step replays the CUDA graph of the second
WARM_UP_STEPS, EXTRA_STEPS, PREFILL_CALLS = 3, 8, 5
# Backends of SDPA, and a part of the names of their kernels.
_SDPA = {
    "cudnn": (SDPBackend.CUDNN_ATTENTION, "cudnn"),
    "fa2": (SDPBackend.FLASH_ATTENTION, "flash_fwd"),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, "fmha"),
}
DENSE_KERNELS = ("decode_append", "decode_scan", "decode_merge")
KERNELS = (*DENSE_KERNELS, "decode_select")


def bench_decode(
    shape: Shape,
    config: Path,
    name: str,
    device: torch.device,
    *,
    cases: Sequence[str] = CASES,
    providers: Sequence[str] | None = None,
    points: Sequence[tuple[int, int]] | None = None,
    prefills: Sequence[int] | None = None,
    steps: int = 64,
    out: Path | None = None,
    commit: str | None = None,
) -> bool:
    """Measure, print and write rows.

    Args:
        shape: heads of ``decode.attention``.
        config: configuration of ``decode.model``.
        name: name of that configuration in rows.
        device: the measured device.
        cases: members of ``CASES``.
        providers: members of ``PROVIDERS``; None means, for attention, all but the reference (on a
            CPU only the reference), and for models, sparse and dense.
        points: context length and number of sequences; None means the defaults of each case.
        prefills: prompt lengths, tokens; None means the default, or none if points are given.
        steps: timed steps of a model.
        out: JSONL file to append to; None prints the rows only.
        commit: recorded if the checkout has no git.

    Returns:
        Whether every measured row is correct.

    Raises:
        ValueError: there is no GPU, or a context is too short.
    """
    hint = "Without one give short contexts: nsa bench decode --config cpu-small --points 256"
    fits = device.type == "cuda" or points is not None
    check(fits, WHERE, "this machine", "have a CUDA GPU", "none", hint)
    shortest = min([*(length for length, _ in points or ()), *(prefills or ()), SHORTEST])
    check(shortest >= SHORTEST, WHERE, "tokens of context", f"be at least {SHORTEST}", shortest)
    results = Results(out, device, commit)
    wanted = list[tuple[dict[str, Any], Callable[[], Subject]]]()
    if CASES[0] in cases:
        names: Sequence[str] = ATTENTION[:-1] if device.type == "cuda" else ATTENTION[-1:]
        names = [each for each in providers or names if each in ATTENTION]
        for (length, batch), each in product(points or ATTENTION_POINTS, names):
            point = Point(shape, length, batch, "random", DTYPE, device)
            row = {"case": CASES[0], **point.fields(), "provider": each, "mode": "step"}
            wanted.append((row, partial(attention_step, each, point)))
    if CASES[1] in cases:
        prefills = (() if points else PREFILLS) if prefills is None else prefills
        sizes = [("step", *point) for point in points or MODEL_POINTS]
        sizes += [("prefill", length, 1) for length in prefills]
        names = [each for each in providers or MODELS[:2] if each in (*MODELS, *GENERATORS)]
        for (mode, length, batch), each in product(sizes, names):
            row = {"case": CASES[1], "shape": name, "choice": "model", "dtype": "bfloat16"}
            row |= {"provider": each, "mode": mode, "seq_len": length, "batch": batch}
            (run,) = find_subjects([config], {}, names=[GENERATORS.get(each, each)])
            given = (run.config.model, length, batch, steps, device)
            if mode == "prefill":
                if each not in GENERATORS:
                    wanted.append((row, partial(prefill, run.config.model, length, device)))
            elif each in GENERATORS:
                wanted.append((row, partial(generate, each, *given)))
            else:
                wanted.append((row, partial(model_step, *given)))
    for row, make in wanted:
        results.add(**row, **measure(make, device, is_ours=row["provider"] not in FOREIGN))
    return results.finish()


# --- Attention of one step
@torch.no_grad()
def attention_step(provider: str, point: Point) -> Subject:
    """Prepare a provider's attention of one new token, after a context of random keys and values.

    Raises:
        UnsupportedError: the provider needs a GPU.
    """
    config, read = point.shape.config(), None
    is_reference = provider == "reference"
    if not is_reference and point.device.type != "cuda" and not kernels_run_on_cpu():
        raise UnsupportedError("it needs a CUDA GPU")
    if provider in ("nsa", "dense-scan", "reference"):
        if provider == "dense-scan":
            config = dense_pattern(config, point.seq_len)
        call, exact, read = _cached(point, config, is_reference)
        kernels: tuple[str, ...] = KERNELS if provider == "nsa" else DENSE_KERNELS
    else:
        call, exact, kernels = _static(point, config, provider)
        read = point.tokens * config.num_kv_heads

    def compare(errors: dict[str, float]) -> None:
        out = call()
        sequences = sorted({0, out.shape[0] - 1})
        oracle, plain = (
            torch.cat([exact(b, dtype) for b in sequences])
            for dtype in (torch.float64, torch.float32)
        )
        found = assert_within_budget(out[sequences], plain.to(out.dtype), oracle, "out")
        errors["out"] = found.total

    work = {"tokens": point.batch}
    if not is_reference:
        work["read"] = bytes_of_keys(read, config, point.dtype)
    return Subject(
        torch.no_grad()(call),
        lambda: judge(torch.no_grad()(compare)),
        partial(missing_kernel, parts=(() if is_reference else kernels, ()), mode="fwd"),
        lambda: work,
        capture=not is_reference,
    )


Exact = Callable[[int, torch.dtype], Tensor]  # (sequence, dtype) -> attention [1, Hq, Dv]


def _cached(
    point: Point, config: NSAConfig, is_reference: bool
) -> tuple[Callable[[], Tensor], Exact, int]:
    """Return a step over a decode cache, its reference, and the number of keys it reads."""
    batch, length = point.batch, point.seq_len - 1
    x = make_inputs(config, [1] * batch, seed=1, dtype=point.dtype, device=point.device)
    sparse = (x.k_cmp_raw, x.v_cmp_raw, x.k_slc, x.v_slc) if config.scores_blocks else [None] * 4
    gates = x.gates if config.scores_blocks else torch.ones_like(x.gates)
    inputs = AttentionInputs._make((x.q, *sparse, x.k_win, x.v_win, gates, None, None))
    rope, whole = Rope.from_config(config), NSACache(config, 1, batch, max_tokens=point.seq_len)
    (layer,) = whole.layers
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
        return attend(inputs.q, None, inputs.gates, tensors, config, 1, reads)[0]

    reads = torch.zeros(batch * config.num_kv_heads, 3, dtype=torch.int64, device=point.device)
    step(reads)
    return step, exact, int(reads.sum())


def bytes_of_keys(keys: int, config: NSAConfig, dtype: torch.dtype) -> int:
    """Bytes of a number of keys and values of one head."""
    return keys * (config.head_dim + config.value_dim) * dtype.itemsize


def _static(
    point: Point, config: NSAConfig, provider: str
) -> tuple[Callable[[], Tensor], Exact, tuple[str, ...]]:
    """Return PyTorch dense attention over static keys and values, its reference and its kernels.

    With ``-folded``, query heads of a group are the rows of one query tile.
    """
    heads, batch, seq_len = config.num_kv_heads, point.batch, point.seq_len
    q = normal((batch, config.num_heads, 1, config.head_dim), point, seed=1)
    k, v = (
        normal((batch, heads, seq_len, size), point, seed)
        for seed, size in ((2, config.head_dim), (3, config.value_dim))
    )

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


def _timed(call: Callable[[], object], calls: int, method: str, device: torch.device) -> Timing:
    """Time warmed-up calls, including host time between them."""
    for _ in range(WARM_UP_STEPS):
        call()
    synchronize(device)
    times = samples_ms(call, device, calls)
    return percentiles(times, 1, method if device.type == "cuda" else "cpu")


@torch.no_grad()
def model_step(
    config: LMConfig, context: int, batch: int, steps: int, device: torch.device
) -> Subject:
    """Prepare greedy decode steps after a context of random keys; tokens stay on the device."""
    most = context + WARM_UP_STEPS + steps + EXTRA_STEPS
    model = new_model(config, device)
    decoder = Decoder(model, batch, max_tokens=most)
    tokens = decoder.prefill([[0]] * batch).argmax(-1, keepdim=True)
    fill_cache(decoder.cache, context - 2)

    @torch.no_grad()
    def step() -> None:
        nonlocal tokens
        tokens = decoder.step(tokens).argmax(-1)

    @torch.no_grad()
    def work() -> dict[str, int]:
        heads, layers = config.nsa.num_kv_heads, decoder.cache.layers
        keys = len(layers) * batch * heads * max(decoder.cache.lengths)
        if device.type != "cuda" and not kernels_run_on_cpu():
            return {"tokens": batch}
        if config.attention == "nsa":
            reads = torch.zeros(batch * heads, 3, dtype=torch.int64, device=device)
            for layer in layers:
                layer.reads = reads
            decoder.take(tokens)  # eager: captured kernels do not count reads
            keys = int(reads.sum())
        parts = model.num_parameters()
        weights = parts["total"] - parts["embedding"] * (not config.tie_head)
        read = bytes_of_keys(keys, config.nsa, DTYPE) + weights * DTYPE.itemsize
        return {"tokens": batch, "read": read}

    kernels = KERNELS if config.attention == "nsa" else DENSE_KERNELS
    timed = partial(_timed, step, steps, "CUDA graph of a step, argmax apart", device)
    fault = partial(missing_kernel, parts=(kernels, ()), mode="fwd")
    return Subject(step, partial(check_decoder, config, device), fault, work, timed)


@torch.no_grad()
def prefill(config: LMConfig, length: int, device: torch.device) -> Subject:
    """Prepare the prefill of one sequence, from token ids on the host to logits."""
    decoder = Decoder(new_model(config, device), max_tokens=length)
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(config.vocab_size, (length,), generator=generator).tolist()

    @torch.no_grad()
    def call() -> Tensor:
        decoder.cache.free(0)
        return decoder.prefill([text])

    kernels = OPERATORS["attention"].kernels[0] if config.attention == "nsa" else ()
    timed = partial(_timed, call, PREFILL_CALLS, "launches", device)
    fault = partial(missing_kernel, parts=(kernels, ()), mode="fwd")
    check = partial(check_decoder, config, device)
    return Subject(call, check, fault, lambda: {"tokens": length}, timed)


@cache
def check_decoder(config: LMConfig, device: torch.device) -> Verdict:
    """Compare logits of a prompt and of steps after it with full passes in fp64 on the CPU.

    The model has two layers and so few tokens that every block is selected: otherwise rounding
    could decide between blocks with nearly equal scores.
    """
    pattern, cpu = config.nsa, torch.device("cpu")
    config = replace(config, num_layers=min(config.num_layers, GATE_LAYERS))
    length = pattern.num_selected_blocks * pattern.block_size
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(config.vocab_size, (2, length), generator=generator)
    model = new_model(config, cpu)

    def expected(whole: LanguageModel) -> Tensor:
        with torch.no_grad():
            return torch.stack([whole(text)[-GATE_STEPS - 1 :] for text in texts])

    def compare(errors: dict[str, float]) -> None:
        plain, exact = expected(model), expected(deepcopy(model).double())
        decoder = Decoder(deepcopy(model).to(device), 2, max_tokens=length)
        found = [decoder.prefill(texts[:, :-GATE_STEPS].tolist())[:, None]]
        for token in texts[:, -GATE_STEPS:].to(device).split(1, dim=1):
            found.append(decoder.step(token).clone())
        logits = torch.cat(found, 1).cpu()
        errors["logits"] = assert_within_budget(logits, plain, exact, "logits", BUDGET).total

    return judge(compare)


# --- generate() of transformers
def new_generator(name: str, config: LMConfig, max_tokens: int) -> Any:
    """Make a transformers model with random weights: this library's, or a Llama of equal size."""
    if name == "hf":
        from nsa.hf import NSAForCausalLM, NSALMConfig

        return NSAForCausalLM(NSALMConfig.of(config, max_position_embeddings=max_tokens))
    from transformers import LlamaConfig, LlamaForCausalLM

    matrices = 3 if config.mlp == "swiglu" else 2
    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.nsa.num_heads,
        "num_key_value_heads": config.nsa.num_kv_heads,
        "head_dim": config.nsa.head_dim,
        "intermediate_size": config.mlp_hidden_size * matrices // 3,  # Llama's MLP has three
        "max_position_embeddings": max_tokens,
        "tie_word_embeddings": config.tie_head,
    }
    return LlamaForCausalLM(LlamaConfig.from_dict(sizes))


def generate(
    name: str, config: LMConfig, context: int, batch: int, steps: int, device: torch.device
) -> Subject:
    """Prepare ``generate()`` with a static cache; compare its last logits with a full pass.

    Raises:
        UnsupportedError: transformers is not installed, there are several sequences, or the prompt
            would take minutes.
    """
    if missing("hf"):
        raise UnsupportedError(f"transformers is not installed: {install_command('hf')}")
    if batch > 1 or context > LONGEST_PROMPT:
        limit = f"one sequence of at most {LONGEST_PROMPT:,} tokens"
        raise UnsupportedError(f"measured with {limit}")
    from transformers import LogitsProcessor

    torch.manual_seed(0)
    model = new_generator(name, config, context + steps + 1).to(device, DTYPE).eval()
    prompt = torch.randint(config.vocab_size, (1, context), device=device)
    marks, last = list[float](), list[Tensor]()

    class Clock(LogitsProcessor):
        """Records the time and the logits of every step."""

        def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
            synchronize(device)
            marks.append(1000 * time.perf_counter())
            last[:] = [logits[0].clone()]
            return logits

    options: dict[str, Any] = {
        "do_sample": False,
        "cache_implementation": "static",  # compiles Llama's steps on a GPU
        "eos_token_id": None,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(prompt),  # otherwise padding ids are masked
        "logits_processor": [Clock()],
        "max_new_tokens": steps + 1,
    }

    def call() -> Tensor:
        marks.clear()
        ids: Tensor = model.generate(prompt, **options)
        return ids

    @torch.no_grad()
    def compare(errors: dict[str, float]) -> None:
        call()  # compiles
        ids = call()
        exact = model(ids[:, :-1], logits_to_keep=1).logits[0, -1].float()
        errors["logits"] = float((last[0].float() - exact).norm() / exact.norm())
        assert errors["logits"] <= CEILING[DTYPE], f"logits: error {errors['logits']:.3g}"

    def timed() -> Timing:
        times = [end - start for start, end in pairwise(marks)]
        return percentiles(times, 1, "generate() with a static cache")

    return Subject(call, lambda: judge(compare), work=lambda: {"tokens": 1}, time=timed)
