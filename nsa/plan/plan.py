"""A run before it runs: what it is, what it needs, how long it takes and what it costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from nsa.bench.rows import Row
from nsa.bench.train import DTYPES, differences
from nsa.errors import UserError
from nsa.lm.baseline import parameters_by_part
from nsa.lm.flops import flops_per_token
from nsa.plan.gpus import CPU, GIB, Gpu
from nsa.plan.memory import Footprint, state_memory, step_memory
from nsa.train.config import CheckpointingConfig, ParallelConfig, TrainConfig
from nsa.train.telemetry.throughput import peak_of
from nsa.train.watch.out_of_memory import smaller_micro_batch

# Share of a GPU's peak that training is assumed to reach where nothing like it was measured.
ASSUMED_MFU = 0.25


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
    def seconds(self) -> float | None:
        """Training and evaluations; the start, checkpoints and the sample are not counted."""
        if self.speed is None:
            return None
        config = self.config
        evaluations = 1 + config.steps // (config.eval_every or math.inf)
        # A token of a forward pass is a third of the work of a training token.
        forward = evaluations * config.eval_windows * config.seq_len / 3
        return (self.tokens + forward) / self.speed.tokens_per_s

    @property
    def gpu_hours(self) -> float | None:
        """Hours of all GPUs together."""
        return None if self.seconds is None else self.seconds / 3600 * self.config.world_size


def make_plan(
    config: TrainConfig,
    gpu: Gpu | None,
    rows: Iterable[Row] = (),
    mfu: float | None = None,
) -> RunPlan:
    """Plan a run.

    Args:
        config: the run.
        gpu: what it is planned for.
        rows: measured steps, of any GPU and model.
        mfu: share of the peak to assume; None looks at the rows first.
    """
    on_cpu = gpu and gpu.name == CPU
    footprint = state_memory(config) if on_cpu else step_memory(config)
    parameters = parameters_by_part(config.model)
    flops = flops_per_token(config.model, config.seq_len)
    speed = expected_speed(config, parameters["total"], flops, gpu, rows, mfu) if gpu else None
    return RunPlan(config, parameters, flops, footprint, gpu, speed)


def expected_speed(
    config: TrainConfig,
    parameters: int,
    flops: float,
    gpu: Gpu,
    rows: Iterable[Row],
    mfu: float | None,
) -> Speed | None:
    """From a measured row of this very model and length, or the MFU of the nearest one, or a guess.

    Several GPUs are assumed to be as fast as one, times their number.
    """
    share, why = mfu or ASSUMED_MFU, "given" if mfu else "assumed, nothing like it was measured"
    row = None if mfu else _nearest(rows, config, parameters, gpu)
    if row is not None and row.tokens_per_s:
        other_model = row.settings and row.settings["parameters"] != parameters
        if row.seq_len == config.seq_len and not other_model:
            return Speed(row.tokens_per_s * config.world_size, f"measured: {_describe(row)}")
        if row.mfu:
            share, why = row.mfu, f"as of {_describe(row)}"
    # The known peak is that of bf16 products.
    peak = peak_of(gpu.name) if config.compute_dtype == "bf16" else None
    if peak is None:
        return None
    return Speed(share * peak / flops * config.world_size, f"MFU {share:.2f}, {why}")


def _nearest(
    rows: Iterable[Row],
    config: TrainConfig,
    parameters: int,
    gpu: Gpu,
) -> Row | None:
    """The row of this GPU, precision and attention whose step is most like the run's."""
    kind = ("train", "fwd_bwd", gpu.name, DTYPES[config.compute_dtype], config.model.attention)
    wanted = {
        "parameters": parameters,
        "compile": config.compile,
        "checkpointing": config.checkpointing.policy,
        "document_mask": config.data.document_mask,
        "cuda_graphs": config.cuda_graphs,
    }

    def is_like(row: Row) -> bool:
        attention = row.settings and row.settings.get("attention")
        found = (row.case, row.mode, row.gpu, row.dtype, attention)
        return found == kind and row.tokens_per_s is not None

    def distance(row: Row) -> tuple[float, ...]:
        """What differs, weightiest first; lengths and tokens of a micro-batch by their factors."""
        settings = row.settings or {}
        differs = [settings.get(name, False) != value for name, value in wanted.items()]
        length = row.seq_len / config.seq_len
        tokens = length * settings["micro_batch"] / config.micro_batch
        return abs(math.log(length)), *differs[:3], abs(math.log(tokens)), *differs[3:]

    newest_first = sorted(filter(is_like, rows), key=lambda row: row.date, reverse=True)
    return min(newest_first, key=distance, default=None)


def _describe(row: Row) -> str:
    settings = row.settings or {}
    how = "compiled" if settings["compile"] else "not compiled"
    policy = f"checkpointing {settings['checkpointing']}" + ", document masks" * row.is_masked
    batch = f"S {row.seq_len:,} x {settings['micro_batch']}"
    return f"{row.shape}, {row.provider}, {batch}, {how}, {policy}, {row.date[:10]}"


def refuse_what_does_not_fit(plan: RunPlan) -> None:
    """Raise if the run does not fit into the GPU's memory, with a change under which it would.

    Raises:
        UserError: it does not fit.
    """
    gpu, needed = plan.gpu, plan.footprint.needed
    if gpu is None or needed <= gpu.memory_gib * GIB:
        return
    rule = f"fit into the {gpu.memory_gib:.1f} GiB of {gpu.name}"
    hint = suggestion(plan.config, gpu)
    raise UserError("nsa plan", "the run", rule, f"{needed / GIB:.1f} GiB", hint)


def suggestion(config: TrainConfig, gpu: Gpu) -> str:
    """The smallest change under which the run fits, as words of the command line."""
    for changed in alternatives(config) if gpu.name != CPU else ():
        needed = step_memory(changed).needed
        if needed <= gpu.memory_gib * GIB:
            found = differences(config, changed).items()
            words = (f"--{name.replace('_', '-')} {value}".lower() for name, value in found)
            return f"It takes {needed / GIB:.1f} GiB with {' '.join(words)}."
    advice = "take a smaller model, shorter windows or a GPU with more memory"
    return f"Nothing that trains the same makes it fit; {advice}."


def alternatives(config: TrainConfig) -> Iterator[TrainConfig]:
    """Changes that need less memory and train the same, the least costly first.

    Each keeps those before it.
    """
    if config.loss_chunk == 0 and config.model.vocab_size > config.model.width:
        config = replace(config, loss_chunk=1024)
        yield config
    while (windows := smaller_micro_batch(config)) is not None:
        accumulation = config.accumulation * config.micro_batch // windows
        config = replace(config, micro_batch=windows, accumulation=accumulation)
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
