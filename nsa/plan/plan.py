"""A run before it runs: what it is, what it needs, how long it takes and what it costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from nsa.bench.rows import Row
from nsa.bench.subjects import DTYPES, differences
from nsa.errors import UserError
from nsa.lm.flops import flops_per_token
from nsa.lm.model import LanguageModel
from nsa.plan.gpus import CPU, GIB, Gpu
from nsa.plan.memory import Footprint, state_memory, step_memory
from nsa.train.config import CheckpointingConfig, ParallelConfig, TrainConfig

# What a process takes beside its tensors: the driver's context and the libraries' kernels; and what the allocator cannot use.
CONTEXT_BYTES = GIB
FRAGMENTATION = 0.05
# Share of a GPU's peak that training is taken to reach where nothing like it was measured.
ASSUMED_MFU = 0.25
LOGITS_CHUNK = 1024
# Policies that keep less than each one, the least costly first.
_COSTLIER: dict[str, tuple[Literal["operators", "full"], ...]] = {
    "none": ("operators", "full"), "range": ("operators", "full"), "every": ("operators", "full"), "operators": ("full",),
    "full": (),
}  # fmt: skip


@dataclass(frozen=True)
class Speed:
    """How fast a run is expected to be.

    Attributes:
        tokens_per_s: of all GPUs together.
        why: where the figure is from.
    """

    tokens_per_s: float
    why: str


@dataclass(frozen=True)
class RunPlan:
    """What a run will need.

    Attributes:
        config: the run.
        parameters: by part of the model, ``total`` among them.
        flops_per_token: operations of one training token, see ``nsa.lm.flops``.
        footprint: memory of one process at the peak of a step; of a CPU what is held in any case.
        gpu: what it is planned for; None for nothing in particular.
        speed: None where it cannot be said.
    """

    config: TrainConfig
    parameters: dict[str, int]
    flops_per_token: float
    footprint: Footprint
    gpu: Gpu | None
    speed: Speed | None

    @property
    def tokens(self) -> int:
        """Tokens trained on."""
        return self.config.steps * self.config.global_batch * self.config.seq_len

    @property
    def needed_bytes(self) -> int:
        """Memory that a GPU must have."""
        return needed_bytes(self.footprint)

    @property
    def seconds(self) -> float | None:
        """Training and evaluations; the start, checkpoints and the sample are not counted."""
        if self.speed is None:
            return None
        config = self.config
        evaluations = 0 if config.eval_windows == 0 else 1 + (config.steps // config.eval_every if config.eval_every else 0)
        forward = evaluations * config.eval_windows * config.seq_len / 3  # a third of a training token's work
        return (self.tokens + forward) / self.speed.tokens_per_s

    def cost(self, price_per_gpu_hour: float) -> float | None:
        """Price of all GPUs for the expected time."""
        return None if self.seconds is None else self.seconds / 3600 * self.config.world_size * price_per_gpu_hour


def needed_bytes(footprint: Footprint) -> int:
    """Memory that a GPU must have for a step."""
    return math.ceil(footprint.peak * (1 + FRAGMENTATION)) + CONTEXT_BYTES


def make_plan(config: TrainConfig, gpu: Gpu | None, rows: Iterable[Row] = (), mfu: float | None = None) -> RunPlan:
    """Plan a run.

    Args:
        config: the run.
        gpu: what it is planned for.
        rows: measured steps, of any GPU and model.
        mfu: share of the peak to take for granted; None looks at the rows first.
    """
    with torch.device("meta"):
        model = LanguageModel(config.model)
    flops = flops_per_token(model, config.seq_len)
    speed = None if gpu is None else expected_speed(config, model.num_parameters()["total"], flops, gpu, list(rows), mfu)
    footprint = state_memory(config) if gpu is not None and gpu.name == CPU else step_memory(config)
    return RunPlan(config, model.num_parameters(), flops, footprint, gpu, speed)


def expected_speed(
    config: TrainConfig, parameters: int, flops: float, gpu: Gpu, rows: Sequence[Row], mfu: float | None
) -> Speed | None:
    """From a measured row of this very model and length, or the MFU of the nearest one, or an assumed MFU.

    Several GPUs are taken to be as fast as one, times their number.
    """
    peak = gpu.peak_flops if config.compute_dtype == "bf16" else None  # that of fp32 products is another
    if mfu is None:
        like = [row for row in rows if _is_like(row, config, gpu)]
        same = [
            row for row in like if row.settings and row.settings["parameters"] == parameters and row.seq_len == config.seq_len
        ]
        if same:
            # Of several the one whose step is most like this one.
            row = min(same, key=lambda row: (_apart(row, config), _negative_date(row)))
            assert row.tokens_per_s is not None
            return Speed(row.tokens_per_s * config.world_size, f"measured: {_describe(row)}")
        with_mfu = [row for row in like if row.mfu]
        if with_mfu and peak:
            row = min(with_mfu, key=lambda row: (abs(math.log(row.seq_len / config.seq_len)), _apart(row, config)))
            assert row.mfu is not None
            return Speed(row.mfu * peak / flops * config.world_size, f"MFU {row.mfu:.2f} as of {_describe(row)}")
    if peak is None:
        return None
    share = ASSUMED_MFU if mfu is None else mfu
    why = "assumed, nothing like it was measured" if mfu is None else "given"
    return Speed(share * peak / flops * config.world_size, f"MFU {share:.2f}, {why}")


def _is_like(row: Row, config: TrainConfig, gpu: Gpu) -> bool:
    if row.case != "train" or row.mode != "fwd_bwd" or row.tokens_per_s is None or row.settings is None:
        return False
    kind = (gpu.name, DTYPES[config.compute_dtype], config.model.attention)
    return (row.gpu, row.dtype, row.settings["attention"]) == kind


def _apart(row: Row, config: TrainConfig) -> tuple[bool, bool, float, bool, bool]:
    """What differs, weightiest first.

    Returns:
        Compilation, checkpointing, the factor between the tokens of a micro-batch, document masks,
        CUDA graphs.
    """
    assert row.settings is not None
    factor = math.log(row.settings["micro_batch"] * row.seq_len / (config.micro_batch * config.seq_len))
    recomputed = row.settings["checkpointing"] != config.checkpointing.policy
    masked = row.is_masked != config.data.document_mask
    graphs = row.settings["cuda_graphs"] != config.cuda_graphs
    return row.settings["compile"] != config.compile, recomputed, abs(factor), masked, graphs


def _negative_date(row: Row) -> tuple[int, ...]:
    """Orders the newest first."""
    return tuple(-ord(letter) for letter in row.date)


def _describe(row: Row) -> str:
    assert row.settings is not None
    how = "compiled" if row.settings["compile"] else "not compiled"
    policy = f"checkpointing {row.settings['checkpointing']}"
    policy += ", document masks" * row.is_masked
    return f"{row.shape}, {row.provider}, S {row.seq_len:,} x {row.settings['micro_batch']}, {how}, {policy}, {row.date[:10]}"


def refuse_what_does_not_fit(plan: RunPlan) -> None:
    """Raise if the run does not fit into the GPU's memory, with a change under which it would.

    Raises:
        UserError: it does not fit.
    """
    gpu = plan.gpu
    if gpu is None or plan.needed_bytes <= gpu.memory_gib * GIB:
        return
    rule = f"fit into the {gpu.memory_gib:.1f} GiB of {gpu.name}"
    raise UserError("nsa plan", "the run", rule, f"{plan.needed_bytes / GIB:.1f} GiB", suggestion(plan.config, gpu))


def suggestion(config: TrainConfig, gpu: Gpu) -> str:
    """The smallest change under which the run fits, as words of the command line."""
    for changed in alternatives(config) if gpu.name != CPU else ():
        needed = needed_bytes(step_memory(changed))
        if needed <= gpu.memory_gib * GIB:
            words = (f"--{name.replace('_', '-')} {_word(value)}" for name, value in differences(config, changed).items())
            return f"It takes {needed / GIB:.1f} GiB with {' '.join(words)}."
    return "Nothing that trains the same makes it fit; take a smaller model, shorter windows or a GPU with more memory."


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def alternatives(config: TrainConfig) -> Iterator[TrainConfig]:
    """Changes that need less memory and train the same, the least costly first; all but the first build on each other."""
    if not config.compile:
        yield replace(config, compile=True)
    if config.loss_chunk == 0 and config.model.vocab_size > config.model.width:
        config = replace(config, loss_chunk=LOGITS_CHUNK)
        yield config
    while config.micro_batch > 1:
        smaller = max(part for part in range(1, config.micro_batch) if config.micro_batch % part == 0)
        factor = config.micro_batch // smaller
        config = replace(config, micro_batch=smaller, accumulation=config.accumulation * factor)
        yield config
    for policy in _COSTLIER[config.checkpointing.policy]:
        config = replace(config, checkpointing=CheckpointingConfig(policy=policy))
        yield config
    if config.world_size > 1 and config.parallel.strategy == "ddp":
        yield replace(config, cuda_graphs=False, parallel=ParallelConfig(strategy="fsdp"))
    for world_size in (2, 4, 8):
        if world_size > config.world_size and config.global_batch % world_size == 0:
            accumulation = config.global_batch // world_size
            shared = ParallelConfig(strategy="fsdp")
            yield replace(config, cuda_graphs=False, world_size=world_size, accumulation=accumulation, parallel=shared)
