"""Memory, time and cost of a run before it runs, for ``nsa plan``.

Memory of a step follows from formulas in the sizes of the model and of a micro-batch. Small parts
are left out; ``tests/test_plan.py`` compares the formulas with measured peaks.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache
from statistics import harmonic_mean
from typing import Any

import torch

from nsa.bench.rows import Row
from nsa.bench.train import DTYPES, differences
from nsa.errors import UserError, fail
from nsa.lm.baseline import parameters_by_part
from nsa.lm.config import LMConfig
from nsa.lm.flops import flops_per_token
from nsa.lm.recomputation import Keeps
from nsa.train.config import CheckpointingConfig, ParallelConfig, TrainConfig
from nsa.train.environment import cpu
from nsa.train.execution.activations import kept_bytes
from nsa.train.optim import BATCH_ELEMENTS
from nsa.train.telemetry.throughput import peak_of
from nsa.train.watch.out_of_memory import smaller_micro_batch

GIB = 2**30
# Part of a GPU's peak that training is assumed to reach if nothing similar was measured.
ASSUMED_MFU = 0.25


# --- GPUs -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Gpu:
    """A GPU, or a CPU.

    Attributes:
        name: name that the driver reports; ``CPU``.
        memory_gib: memory that PyTorch reports, which is less than on the data sheet.
    """

    name: str
    memory_gib: float


CPU = "CPU"
KNOWN = {
    "b200": Gpu("NVIDIA B200", 178.4),
    "h200": Gpu("NVIDIA H200", 139.8),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 79.2),
    "h100-pcie": Gpu("NVIDIA H100 PCIe", 79.2),
    "h100-nvl": Gpu("NVIDIA H100 NVL", 93.1),
    "a100": Gpu("NVIDIA A100-SXM4-80GB", 79.2),
    "a100-40": Gpu("NVIDIA A100-SXM4-40GB", 39.4),
    "a100-pcie": Gpu("NVIDIA A100 80GB PCIe", 79.2),
    "a100-pcie-40": Gpu("NVIDIA A100-PCIE-40GB", 39.4),
    "l40s": Gpu("NVIDIA L40S", 44.4),
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", 23.5),
}


def find_gpu(name: str | None, memory_gib: float | None) -> Gpu | None:
    """The named GPU, or the GPU of this machine; None if there is none.

    Args:
        name: a key of ``KNOWN``, the name that a driver reports, ``cpu``, or None. Case, spaces,
            dashes and the maker's name do not matter.
        memory_gib: replaces the device's memory; alone it means a GPU of unknown speed.

    Raises:
        UserError: the name is unknown.
    """
    found = None
    if name is not None:
        gpus = {_short(word): gpu for key, gpu in KNOWN.items() for word in (key, gpu.name)}
        # The system may not report its memory.
        gpus["cpu"] = Gpu(CPU, cpu()["memory_gib"] or math.inf)
        found = gpus.get(_short(name))
        if found is None:
            hint = "For another GPU give --memory-gib alone."
            fail("--gpu", f"be one of {', '.join(KNOWN)}, cpu", repr(name), hint)
    elif torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found = Gpu(properties.name, properties.total_memory / GIB)
    return Gpu(found.name if found else "a GPU", memory_gib) if memory_gib else found


def _short(name: str) -> str:
    return re.sub(r"nvidia|geforce|[^a-z0-9]", "", name.lower())


# --- memory ---------------------------------------------------------------------------------------
WEIGHTS, OPTIMIZER, GRADIENTS = "weights", "optimizer", "gradients"
STREAM = "saved for backward: residual stream and norms"
ATTENTION = "saved for backward: attention"
MLP = "saved for backward: MLP"
UPDATE = "matrices that Muon updates"
# cuBLAS has a workspace for each thread and stream that multiplies (on an H200).
WORKSPACE_BYTES = 32 * 2**20
# Log-probabilities, their gradient and the gradient of the logits, fp32.
BYTES_PER_LOGIT = 12
# Muon: a square matrix before and after, the polynomial of its Gram matrix, and their product, in
# bf16.
BYTES_PER_UPDATED = 8
# A process needs more than its tensors: memory that the allocator cannot use, the driver's context
# and the kernels of libraries.
FRAGMENTATION, CONTEXT_BYTES = 0.05, 2**30


@dataclass(frozen=True)
class Footprint:
    """Bytes in tensors at the peak of a training step.

    Attributes:
        parts: bytes by purpose.
        is_all: False if a step holds more than the parts.
    """

    parts: dict[str, int]
    is_all: bool = True

    @property
    def peak(self) -> int:
        """Sum of the parts."""
        return sum(self.parts.values())

    @property
    def needed(self) -> int:
        """Memory that a GPU must have."""
        return int(self.peak * (1 + FRAGMENTATION)) + CONTEXT_BYTES


def state_memory(config: TrainConfig) -> Footprint:
    """Weights, gradients and optimizer state of one process.

    A CPU's steps need more, which depends on the data: attention runs as the reference there.
    """
    state = _state(config)
    return Footprint({**state, GRADIENTS: state[WEIGHTS]}, is_all=False)


def step_memory(config: TrainConfig) -> Footprint:
    """Memory of one process on a GPU at the peak of a step after the first one.

    The peak is in the backward pass of a layer or of the loss, or in the optimizer's step.
    """
    state, common = _state(config), _in_backward(config)
    layers = of_layers(config)
    moments = [common + _activations(config, layers, at) for at in range(len(layers) + 1)]
    update = Counter({GRADIENTS: state[WEIGHTS]})
    if config.optim.name == "muon":
        update[UPDATE] = BYTES_PER_UPDATED * _updated_together(config.model)
    most = max(*moments, update, key=Counter.total)
    # Workspaces of the main thread, of autograd's thread, and of a capture.
    cublas = (3 if config.cuda_graphs else 2) * WORKSPACE_BYTES
    return Footprint({**state, **most, "cuBLAS": cublas})


def of_layers(config: TrainConfig) -> list[TrainConfig]:
    """The run with a model whose layers are all like a layer, for each layer."""
    runs = [config] * config.model.num_layers
    for kind, indices in config.model.kinds.items():
        run = replace(config, model=kind)
        for index in indices:
            runs[index] = run
    return runs


@lru_cache
def _parameters(model: LMConfig) -> tuple[int, int]:
    """Numbers of parameters in the layers, and of embedding and head."""
    outside = model.vocab_size * model.width * (1 if model.tie_head else 2)
    return parameters_by_part(model)["total"] - outside, outside


def _state(config: TrainConfig) -> dict[str, int]:
    """Weights and moments of one process: two moments per parameter, one for Muon's matrices."""
    (inside, outside), parts = _parameters(config.model), _fsdp_processes(config)
    moments = (1 if config.optim.name == "muon" else 2) * inside + 2 * outside
    return {WEIGHTS: 4 * (inside + outside) // parts, OPTIMIZER: 4 * moments // parts}


def _updated_together(model: LMConfig) -> int:
    """Elements of the largest batch of matrices that Muon multiplies, at most."""
    patterns = [kind.nsa for kind in model.kinds]
    heads = max(x.num_heads * max(x.head_dim, x.value_dim) for x in patterns)
    alone = model.width * max(model.mlp_hidden_size, heads)
    return max(alone, min(BATCH_ELEMENTS, _parameters(model)[0]))


def _in_backward(config: TrainConfig) -> Counter[str]:
    """Memory of one process during the whole backward pass of the last micro-batch."""
    model, parallel, found = config.model, config.parallel, Counter[str]()
    inside, outside = _parameters(model)
    # Gradients of earlier micro-batches, which FSDP keeps whole, or those that a CUDA graph adds
    # to.
    if config.accumulation > 1 or config.cuda_graphs:
        found[GRADIENTS] = 4 * (inside + outside)
    element = 2 if parallel.gather_dtype == "bf16" else 4
    if config.compute_dtype == "bf16":
        # Copies of fp32 weights. Recomputed layers copy one at a time, but the copies are small.
        copied = (element - 2) * inside
        found["weights in bf16"] = 2 * model.vocab_size * model.width + copied
    if _fsdp_processes(config) > 1:
        # Two neighbouring layers, and always the embedding and the head.
        layer = inside // model.num_layers
        found["gathered weights"] = 4 * outside + 2 * element * layer
        found["gradients that are sent"] = 8 * layer
    elif config.world_size > 1 and not config.cuda_graphs:  # DDP's buckets
        bucket = 6 if parallel.gradient_compression == "bf16" else 4
        found["gradients that are sent"] = bucket * (inside + outside)
    return found


def _activations(config: TrainConfig, layers: Sequence[TrainConfig], layer: int) -> Counter[str]:
    """Activations while a layer runs backward, when the layers above it are done.

    Args:
        config: the run.
        layers: see :func:`of_layers`.
        layer: index of the layer; the number of layers means the loss, which is first.
    """
    model, tokens = config.model, config.micro_batch * config.seq_len
    found, logits = Counter[str](), 0  # bytes per token
    for below in range(layer):
        found.update(saved_bytes(layers[below], config.checkpointing.keeps(below)))
    if layer == model.num_layers:
        found[STREAM] += (4 + _element(config)) * model.width  # the last norm's
        chunk = min(config.loss_chunk or tokens, tokens)
        logits = (BYTES_PER_LOGIT * chunk + 4 * model.width) * model.vocab_size  # and dW
    else:
        one = layers[layer]
        whole = saved_bytes(one, "everything")  # from the forward pass or recomputed
        found.update(whole)
        # The gradient of the residual stream; then gradients inside the MLP, or those of attention,
        # which are allocated when the MLP's tensors have been freed.
        attention = attention_backward_bytes(one) - whole[MLP]
        found["gradients inside a layer"] = 4 * model.width + max(whole[MLP] // 2, attention)
    sizes = {part: size * tokens for part, size in found.items()}
    return Counter({**sizes, "logits and head": logits})


def saved_bytes(config: TrainConfig, keeps: Keeps) -> dict[str, int]:
    """Bytes per token that a layer saves for its backward pass, by part.

    Args:
        config: the run, from :func:`of_layers`.
        keeps: tensors that are not recomputed.
    """
    model, pattern, element = config.model, config.model.nsa, _element(config)
    kept = kept_bytes(model, "attention", element)
    stream = kept.pop("input")
    if keeps == "input":
        return {STREAM: stream}
    attention = sum(kept.values())
    if keeps == "attention":
        return {STREAM: stream, ATTENTION: attention}
    keys = pattern.num_kv_heads * _head_bytes(config)
    attention += element * pattern.num_heads * pattern.head_dim + keys
    if model.attention == "nsa":
        # Keys and values of another branch, gates in fp32. Those of the third branch are read as
        # overlapping blocks, which the gradient of a mean does not need.
        overlap = pattern.compress_block_size // pattern.compress_stride
        read = overlap if pattern.phi != "mean" and pattern.compresses_keys else 0
        attention += (1 + read) * keys + 12 * pattern.num_heads
        attention += _index_bytes(config)
        if pattern.has_index:  # two numbers of each selection, and two by index head
            heads = pattern.num_kv_heads * (1 + pattern.index_heads)
            attention += 8 * heads * pattern.num_selected_blocks
    if _is_masked_dense(config):
        attention += _chunk_bytes(config) + 8 * config.seq_len  # heads; the mask in fp32
    # Before and after the activation; with a gate also the product and, uncompiled, both factors.
    results = 2 if model.mlp == "silu" else 3 if config.compile else 4
    # Inputs of attention and MLP, before and after their norms.
    stream = 2 * (4 + element) * model.width
    return {STREAM: stream, ATTENTION: attention, MLP: results * element * model.mlp_hidden_size}


def attention_backward_bytes(config: TrainConfig) -> int:
    """Bytes per token that the backward pass of attention adds to the saved tensors.

    These are gradients of its output and inputs, and scratch memory: sums of dk and dv in fp32 and
    four rows of dq per query for NSA; dq in fp32 and dk and dv per query head for dense attention.
    ``config`` is from :func:`of_layers`.
    """
    pattern = config.model.nsa
    keys = 7 if config.model.attention == "nsa" else 1
    heads = (3 * pattern.num_heads + keys * pattern.num_kv_heads) * _head_bytes(config)
    heads += _index_bytes(config)
    return heads + (_chunk_bytes(config) if _is_masked_dense(config) else 0)


def _index_bytes(config: TrainConfig) -> int:
    """Bytes per token of index queries and keys."""
    if config.model.attention == "dense" or not config.model.nsa.has_index:
        return 0
    heads = config.model.nsa.scoring
    return _element(config) * (heads.num_heads + heads.num_kv_heads) * heads.head_dim


def _is_masked_dense(config: TrainConfig) -> bool:
    """Whether dense attention uses a mask, as it does for documents in fp32."""
    dense = config.model.attention == "dense" and config.compute_dtype == "fp32"
    return dense and config.data.document_mask


def _chunk_bytes(config: TrainConfig) -> int:
    """Bytes per token of masked keys and values: two chunks, all query heads."""
    return 2 * config.model.nsa.num_heads * _head_bytes(config)


def _head_bytes(config: TrainConfig) -> int:
    """Bytes per token of a key head and a value head."""
    return _element(config) * (config.model.nsa.head_dim + config.model.nsa.value_dim)


def _element(config: TrainConfig) -> int:
    """Bytes of an element of a matrix product's result."""
    return 2 if config.compute_dtype == "bf16" else 4


def _fsdp_processes(config: TrainConfig) -> int:
    """Number of processes that weights, gradients and optimizer state are divided among."""
    return config.world_size if config.parallel.strategy == "fsdp" else 1


# --- the plan -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class RunPlan:
    """Needs of a run.

    Attributes:
        config: the run.
        parameters: number of parameters by part of the model, and ``total``.
        flops_per_token: operations per training token, see ``nsa.lm.flops``.
        footprint: memory of one process at the peak of a step; on a CPU, of the state only.
        gpu: device of the plan; None without one.
        tokens_per_s: expected speed of all GPUs together; None if it is unknown.
        speed_from: source of the speed.
    """

    config: TrainConfig
    parameters: dict[str, int]
    flops_per_token: float
    footprint: Footprint
    gpu: Gpu | None
    tokens_per_s: float | None
    speed_from: str | None

    @property
    def tokens(self) -> int:
        """Tokens trained on."""
        return self.config.steps * self.config.global_batch * self.config.seq_len

    @property
    def seconds(self) -> float | None:
        """Time of training and evaluations, without the start, checkpoints and the sample."""
        if self.tokens_per_s is None:
            return None
        config = self.config
        evaluations = 1 + config.steps // (config.eval_every or math.inf)
        # A token of a forward pass is a third of the work of a training token.
        forward = evaluations * config.eval_windows * config.seq_len / 3
        return (self.tokens + forward) / self.tokens_per_s

    @property
    def layers(self) -> list[dict[str, Any]]:
        """Equal layers: their indices, attention, and needs of one of them for a training token."""
        model, equal = self.config.model, dict[tuple[LMConfig, Keeps], list[int]]()
        for kind, indices in model.kinds.items():
            for n in indices:
                equal.setdefault((kind, self.config.checkpointing.keeps(n)), []).append(n)
        found = []
        for (kind, keeps), indices in equal.items():
            run, sizes = (
                replace(self.config, model=kind),
                [replace(kind, num_layers=n) for n in (1, 2)],
            )
            one, two = (flops_per_token(size, run.seq_len) for size in sizes)
            saved = sum(saved_bytes(run, keeps).values())
            needs = {"flops_per_token": two - one, "saved_bytes": saved}
            found.append({"layers": indices, "attention": kind.attention, **needs})
        return found

    def cost(self, price_per_gpu_hour: float | None) -> float | None:
        """Price of all GPUs together, in the currency of ``price_per_gpu_hour``."""
        if self.seconds is None or price_per_gpu_hour is None:
            return None
        return self.seconds / 3600 * self.config.world_size * price_per_gpu_hour

    def lines(self, name: str, price_per_gpu_hour: float | None) -> Iterator[str]:
        """The plan as text, for a configuration's ``name``."""
        config, gpu, footprint = self.config, self.gpu, self.footprint
        where = f", on {config.world_size} x {gpu.name} of {gpu.memory_gib:.1f} GiB" if gpu else ""
        yield f"{name}{where}"
        counts = self.parameters.items()
        parts = ", ".join(f"{part} {n:,}" for part, n in counts if part != "total" and n)
        yield f"  parameters  {self.parameters['total']:,}: {parts}"
        factors = f"{config.steps:,} steps x {config.global_batch} sequences x {config.seq_len:,}"
        yield f"  tokens      {self.tokens:,} = {factors}"
        yield f"  operations  {self.flops_per_token / 1e9:.4g} GFLOP a training token"
        for equal in self.layers if config.model.layers else ():
            work, saved = equal["flops_per_token"] / 1e9, equal["saved_bytes"] / 2**10
            where = f"layers {_ranges(equal['layers'])}: {equal['attention']}"
            yield f"    {where}, {work:.4g} GFLOP and {saved:.4g} KiB saved for backward, each"
        needed = f"{footprint.needed / GIB:.2f} GiB for each process"
        least = "at least " * (not footprint.is_all)
        yield f"  memory      {least}{needed}, {footprint.peak / GIB:.2f} in tensors"
        for part, size in footprint.parts.items():
            yield f"  {part:48}{size / GIB:9.3f} GiB"
        if self.tokens_per_s is None or self.seconds is None:
            unknown = f"no peak of {gpu.name} in {config.compute_dtype}" if gpu else "give --gpu"
            yield f"  time        not known: {unknown}"
            return
        yield f"  speed       {self.tokens_per_s:,.0f} tokens/s ({self.speed_from})"
        yield f"  time        {timedelta(seconds=round(self.seconds))}"
        if (cost := self.cost(price_per_gpu_hour)) is not None:
            hours = f"{self.cost(1):.2f} GPU hours x {price_per_gpu_hour:g}"
            yield f"  cost        {cost:,.2f} = {hours}"

    def to_json(self, name: str, price_per_gpu_hour: float | None) -> dict[str, Any]:
        """The plan for a program; sizes in bytes, times in seconds."""
        gpu, footprint = self.gpu, self.footprint
        sizes = {**footprint.parts, "peak": footprint.peak, "needed": footprint.needed}
        return {
            "config": name,
            "gpu": gpu and gpu.name,
            "gpus": self.config.world_size,
            "gpu_memory_bytes": gpu and round(gpu.memory_gib * GIB),
            "parameters": self.parameters,
            "tokens": self.tokens,
            "flops_per_token": self.flops_per_token,
            "layers": self.layers,
            "memory_bytes": sizes,
            "memory_is_all": footprint.is_all,
            "tokens_per_s": self.tokens_per_s,
            "speed_from": self.speed_from,
            "seconds": self.seconds,
            "cost": self.cost(price_per_gpu_hour),
        }


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers such as ``0, 2-5``."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in zip(starts, ends, strict=True))


def make_plan(
    config: TrainConfig,
    gpu: Gpu | None,
    rows: Iterable[Row] = (),
    mfu: float | None = None,
) -> RunPlan:
    """Plan a run; memory and operations are those of its longest sequences.

    Args:
        config: the run.
        gpu: device of the plan.
        rows: measured steps, of any GPU and model.
        mfu: assumed part of the peak; None looks at the rows first.
    """
    footprint = state_memory(config) if gpu and gpu.name == CPU else step_memory(config)
    parameters = parameters_by_part(config.model)
    flops = flops_per_token(config.model, config.seq_len)
    speed = _mean_speed(config, parameters["total"], gpu, [*rows], mfu) if gpu else None
    return RunPlan(config, parameters, flops, footprint, gpu, *(speed or (None, None)))


def _mean_speed(
    config: TrainConfig, parameters: int, gpu: Gpu, rows: Sequence[Row], mfu: float | None
) -> tuple[float, str] | None:
    """Tokens/s over all stages, whose steps have the same tokens, and the source of the last."""
    speeds, steps, begin, source = list[float](), list[int](), 0, ""
    for end, run in config.by_stage:
        flops = flops_per_token(run.model, run.seq_len)
        found = expected_speed(run, parameters, flops, gpu, rows, mfu)
        if found is None:
            return None
        speed, source = found
        speeds.append(speed)
        steps.append(max(min(end, config.steps) - begin, 0))
        begin = end
    return harmonic_mean(speeds, steps), source


def expected_speed(
    config: TrainConfig,
    parameters: int,
    flops: float,
    gpu: Gpu,
    rows: Iterable[Row],
    mfu: float | None,
) -> tuple[float, str] | None:
    """Tokens/s of all GPUs and their source; None if they are unknown.

    The source is a measured row of this model and length, the MFU of the most similar row, or a
    guess. Several GPUs are assumed to be as fast as one, times their number.
    """
    part, why = mfu or ASSUMED_MFU, "given" if mfu else "assumed, nothing like it was measured"
    row = None if mfu else _nearest(rows, config, parameters, gpu)
    if row is not None and row.tokens_per_s and row.settings:
        settings = row.settings
        how = "compiled" if settings["compile"] else "not compiled"
        how += f", checkpointing {settings['checkpointing']}" + ", document masks" * row.is_masked
        batch = f"S {row.seq_len:,} x {settings['micro_batch']}"
        described = f"{row.shape}, {row.provider}, {batch}, {how}, {row.date[:10]}"
        if (row.seq_len, settings["parameters"]) == (config.seq_len, parameters):
            return row.tokens_per_s * config.world_size, f"measured: {described}"
        if row.mfu:
            part, why = row.mfu, f"as of {described}"
    # The known peak is that of bf16 products.
    peak = peak_of(gpu.name) if config.compute_dtype == "bf16" else None
    speed = None if peak is None else part * peak / flops * config.world_size
    return None if speed is None else (speed, f"MFU {part:.2f}, {why}")


def _nearest(rows: Iterable[Row], config: TrainConfig, parameters: int, gpu: Gpu) -> Row | None:
    """The row of this GPU, precision and attention that is most similar to a step of the run."""
    kind = ("train", "fwd_bwd", gpu.name, DTYPES[config.compute_dtype], config.model.attention_kind)
    wanted = {
        "parameters": parameters,
        "compile": config.compile,
        "checkpointing": config.checkpointing.policy,
        "document_mask": config.data.document_mask,
        "cuda_graphs": config.cuda_graphs,
    }

    def is_comparable(row: Row) -> bool:
        attention = row.settings and row.settings.get("attention")
        found = (row.case, row.mode, row.gpu, row.dtype, attention)
        return found == kind and row.tokens_per_s is not None

    def distance(row: Row) -> tuple[float, ...]:
        """Differences, the most important first; lengths and tokens by their factors."""
        settings = row.settings or {}
        differs = [settings.get(name, False) != value for name, value in wanted.items()]
        length = row.seq_len / config.seq_len
        tokens = length * settings["micro_batch"] / config.micro_batch
        return abs(math.log(length)), *differs[:3], abs(math.log(tokens)), *differs[3:]

    newest_first = sorted(filter(is_comparable, rows), key=lambda row: row.date, reverse=True)
    return min(newest_first, key=distance, default=None)


def check_plan_fits(plan: RunPlan) -> None:
    """Check that the run fits into the GPU's memory; the error names a change that makes it fit.

    Raises:
        UserError: it does not fit.
    """
    gpu, needed = plan.gpu, plan.footprint.needed
    if gpu is None or needed <= gpu.memory_gib * GIB:
        return
    hint = "Nothing that trains the same makes it fit; "
    hint += "take a smaller model, shorter sequences or a GPU with more memory."
    for changed in alternatives(plan.config) if gpu.name != CPU else ():
        if (less := step_memory(changed).needed) <= gpu.memory_gib * GIB:
            found = differences(plan.config, changed).items()
            words = (f"--{name.replace('_', '-')} {value}".lower() for name, value in found)
            hint = f"It takes {less / GIB:.1f} GiB with {' '.join(words)}."
            break
    rule = f"fit into the {gpu.memory_gib:.1f} GiB of {gpu.name}"
    raise UserError("the run", rule, f"{needed / GIB:.1f} GiB", hint)


def alternatives(config: TrainConfig) -> Iterator[TrainConfig]:
    """Changes that need less memory and train the same, the least costly first.

    Each one includes those before it.
    """
    if config.loss_chunk == 0 and config.model.vocab_size > config.model.width:
        config = replace(config, loss_chunk=1024)
        yield config
    while (size := smaller_micro_batch(config)) is not None:
        accumulation = config.accumulation * config.micro_batch // size
        config = replace(config, micro_batch=size, accumulation=accumulation)
        yield config
    for less in (CheckpointingConfig("operators"), CheckpointingConfig("full")):
        if config.checkpointing.policy not in (less.policy, "full"):
            config = replace(config, checkpointing=less)
            yield config
    for world_size in (2, 4, 8):
        if world_size >= config.world_size and config.global_batch % world_size == 0:
            yield replace(
                config,
                cuda_graphs=False,
                world_size=world_size,
                accumulation=config.global_batch // world_size,
                parallel=ParallelConfig(strategy="fsdp"),
            )
