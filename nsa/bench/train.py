"""``nsa bench train``: training steps of the trainer, sparse and dense, on one or more GPUs."""

from __future__ import annotations

import functools
import itertools
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nsa.bench.attention import missing_kernel, own, split_variant
from nsa.bench.cases import CASES
from nsa.bench.clock import (
    Fields,
    Subject,
    elapsed_ms,
    gpu_events,
    kernel_fields,
    measure,
    not_run,
    percentiles,
    profiled,
    profiler,
    release_memory,
    synchronize,
    time_mark,
    verdict,
)
from nsa.bench.gate import judge_module, module_results
from nsa.bench.report import Results
from nsa.config import BRANCHES
from nsa.errors import check
from nsa.lm.baseline import dense_of_equal_size
from nsa.lm.config import LMConfig
from nsa.lm.flops import flops_per_token
from nsa.lm.model import LanguageModel
from nsa.train import environment
from nsa.train.config import CheckpointingConfig, TrainConfig
from nsa.train.distributed.launch import check_platform, communication_settings, read_launch
from nsa.train.distributed.processes import Processes, join
from nsa.train.execution.activations import checkpoint_activations
from nsa.train.execution.precision import autocast, choose_device
from nsa.train.load import load_config
from nsa.train.loss import NextTokenLoss
from nsa.train.run_folder import RunFolder
from nsa.train.telemetry.metrics import Row as MetricsRow
from nsa.train.telemetry.throughput import MIB, memory_row, peak_flops
from nsa.train.trainer import Trainer, TrainingStoppedError
from nsa.train.watch.out_of_memory import (
    check_run_fits,
    is_out_of_memory,
    memory_use,
    smaller_micro_batch,
)

PROVIDERS = ("nsa", "dense", "dense-matched")
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}  # names in rows
LOG_EVERY = 20  # maximum steps between rows of metrics
PROFILED_STEPS = 3
GATE_SEQUENCES = GATE_LAYERS = 2
_PARTS = ("gate.net", "phi", "norm", "attention", "mlp", "embedding")
# Each branch must run a kernel of these cases.
_BRANCH_CASES = {
    "cmp": ("attention.compressed",),
    "slc": ("attention.choice", "attention.selected"),
    "win": ("attention.window",),
}
_SETTINGS = (
    "micro_batch",
    "accumulation",
    "compile",
    "cuda_graphs",
    "loss_chunk",
    "telemetry",
    "log_every",
)
# Attention of other libraries. Every model uses matrix products of other libraries.
_FOREIGN_ATTENTION = ("flash", "fmha", "sdpa")
# Kernels of PyTorch's dense attention within documents: FlashAttention, memory-efficient, cuDNN,
# FlexAttention.
_DENSE_OF_DOCUMENTS = ("flash", "fmha", "cudnn", "triton_tem")


# --- The measured runs
class Run(NamedTuple):
    """One run to be measured.

    Attributes:
        name: provider in rows.
        config: the run.
        file: its unchanged configuration file.
    """

    name: str
    config: TrainConfig
    file: TrainConfig


def find_runs(
    path: Path,
    settings: Mapping[str, str],
    variants: Sequence[str],
    names: Sequence[str],
) -> list[Run]:
    """Return the runs to be measured.

    Args:
        path: the configuration.
        settings: values by dotted name, for all runs.
        variants: ``NAME:KEY=VALUE,...``, settings on top of the configuration.
        names: models.

    Raises:
        ValueError: a configuration is not valid, or two runs have the same name.
    """
    file, base = load_config(path), load_config(path, settings)
    found, taken = [Run(name, model_of(base, name), file) for name in names], [*PROVIDERS]
    for text in variants:
        name, changes = split_variant(text)
        found.append(Run(name, load_config(path, {**settings, **changes}), file))
        taken.append(name)
    rule = "differ from those of other runs and models"
    check(len(set(taken)) == len(taken), "the names of runs", rule, ", ".join(taken))
    return found


def model_of(base: TrainConfig, name: str) -> TrainConfig:
    """Return the run with another model, a member of ``PROVIDERS``."""
    if name == "dense-matched":
        return replace(base, model=dense_of_equal_size(base.model))
    if name == "nsa" and base.model.layers is not None:
        return base
    attention: Any = "nsa" if name == "nsa" else "dense"
    return replace(base, model=replace(base.model, attention=attention, layers=None))


def rebatch(
    config: TrainConfig,
    seq_len: int | None = None,
    tokens: int | None = None,
    micro_batch: int | None = None,
    world_size: int = 1,
) -> TrainConfig:
    """Change the length and batch of a run, and split its batch among processes.

    Args:
        config: the run.
        seq_len: length S; None keeps it.
        tokens: tokens of an optimizer step, at least one sequence; None keeps the sequences.
        micro_batch: maximum sequences of one forward and backward; None keeps it.
        world_size: number of processes.

    Raises:
        ValueError: the sequences of a step cannot be split evenly.
    """
    seq_len = seq_len or config.seq_len
    sequences = config.global_batch if tokens is None else max(1, tokens // seq_len)
    own, remainder = divmod(sequences, world_size)
    rule = f"be a multiple of the number of processes ({world_size})"
    check(remainder == 0, "global_batch", rule, sequences)
    size = min(micro_batch or config.micro_batch, own)
    rule, hint = f"divide the {own} sequences of a step", "Give --micro-batch."
    check(own % size == 0, "micro_batch", rule, size, hint)
    return replace(
        config,
        seq_len=seq_len,
        stages=(),
        micro_batch=size,
        accumulation=own // size,
        global_batch=sequences,
        world_size=world_size,
    )


def differences(base: Any, other: Any) -> dict[str, Any]:
    """Settings of a configuration ``other`` that differ from ``base``, by dotted name."""
    found: dict[str, Any] = {}
    for name in (entry.name for entry in fields(other)):
        before, value = getattr(base, name), getattr(other, name)
        if is_dataclass(value) and is_dataclass(before):
            inner = differences(before, value)
            found |= {f"{name}.{key}": changed for key, changed in inner.items()}
        elif value != before:
            found[name] = value
    return found


# --- The gate
def gate_config(config: TrainConfig) -> TrainConfig:
    """Config of the gate: few layers, and sequences so short that every block is selected.

    The layers are the first two and one of each of ``model.layers``.

    Otherwise rounding could decide between blocks with nearly equal scores, and gradients would
    have no bound; ``nsa bench attention`` checks the selection.
    """
    model = config.model.sample(GATE_LAYERS)
    whole = config.checkpointing.policy == "range"  # the range may contain neither layer
    return replace(
        config,
        model=model,
        seq_len=min(config.seq_len, *map(selected_tokens, model.kinds)),
        stages=(),
        checkpointing=CheckpointingConfig("full") if whole else config.checkpointing,
        steps=1,
        micro_batch=GATE_SEQUENCES,
        accumulation=1,
        world_size=1,
        global_batch=GATE_SEQUENCES,
    )


def selected_tokens(model: LMConfig) -> int:
    """Tokens in the selected blocks of a query."""
    return model.nsa.num_selected_blocks * model.nsa.block_size


@cache
def check_model(config: TrainConfig, device: torch.device) -> Fields:
    """Compare loss and gradients of a fresh model, by part, with the fp64 reference on the CPU.

    The model runs as in the trainer: same loss, compilation, activation checkpointing and
    precision.

    Args:
        config: a :func:`gate_config`.
        device: the measured device.
    """
    generator = torch.Generator().manual_seed(config.seed)
    shape = (GATE_SEQUENCES * config.seq_len + 1,)
    stream = torch.randint(config.model.vocab_size, shape, generator=generator)
    offsets = torch.arange(0, stream.shape[0], config.seq_len, dtype=torch.int32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = LanguageModel(config.model)

    def results(kind: str, subject: NextTokenLoss, run: Any, where: torch.device) -> Any:
        inputs = [x.to(where) for x in (stream[:-1], stream[1:], offsets)]
        named: dict[str, Any] = {"output": "loss", "part_of": _part_of}
        precision = autocast(where, kind)
        return module_results(subject, run, inputs, precision, **named, max_seqlen=config.seq_len)

    cpu, kind = torch.device("cpu"), config.compute_dtype
    plain, exact = NextTokenLoss(model), NextTokenLoss(deepcopy(model).double())
    subject = NextTokenLoss(deepcopy(model).to(device), config.loss_chunk)
    checkpoint_activations(subject.model, config.checkpointing)
    run = torch.compile(subject, fullgraph=True) if config.compile else subject
    expected = results(kind, plain, plain, cpu), results("fp32", exact, exact, cpu)
    # The mantissa of TF32 is between bf16 and fp32.
    rounded = kind == "bf16" or config.tf32
    dtype = torch.bfloat16 if rounded else torch.float32
    return judge_module(results(kind, subject, run, device), *expected, dtype)


def _part_of(parameter: str) -> str:
    name = parameter.removeprefix("model.")
    return next((part.partition(".")[0] for part in _PARTS if part in name), "head")


def fault_of(config: TrainConfig, kernels: Sequence[str], mode: str) -> str | None:
    """Reason why the profiled kernels are not those of the model's attention, or None."""
    kinds, missing = config.model.kinds, list[str | None]()
    if any(kind.attention == "dense" for kind in kinds):
        parts = _DENSE_OF_DOCUMENTS if config.data.document_mask else ("cudnn",)
        ran = any(part in name.lower() for name in kernels for part in parts)
        missing = [None if ran else f"no kernel with {' or '.join(parts)} in its name ran"]
    found = {branch for kind in kinds if kind.attention == "nsa" for branch in kind.nsa.branches}
    cases = [
        CASES[name] for branch in BRANCHES if branch in found for name in _BRANCH_CASES[branch]
    ]
    missing += [missing_kernel(own(kernels), case.kernels, mode) for case in cases]
    foreign = [name for name in kernels if any(part in name.lower() for part in _FOREIGN_ATTENTION)]
    if foreign and config.model.attention_kind == "nsa":
        missing.append(f"{foreign[0]} ran, which is attention of another library")
    return next(filter(None, missing), None)


# --- The benchmark
def bench_train(
    runs: Sequence[Run],
    shape: str,
    *,
    seqs: Sequence[int | None],
    tokens: int | None,
    micro_batch: int | None,
    modes: Sequence[str],
    warmup: int,
    steps: int,
    out: Path | None,
    commit: str | None,
) -> int:
    """Measure, print and write rows; under torchrun all processes call it, the main one prints.

    Args:
        runs: the runs.
        shape: name of the configuration, for rows.
        seqs: lengths S; None keeps the configuration's.
        tokens: tokens of an optimizer step.
        micro_batch: maximum sequences of one forward and backward.
        modes: ``fwd``, ``fwd_bwd``; several processes measure only ``fwd_bwd``.
        warmup: steps before the profiled ones.
        steps: timed steps.
        out: JSONL file to append to.
        commit: recorded if the checkout has no git.

    Returns:
        Exit code: 1 if a row is wrong.

    Raises:
        ValueError: a run does not match this machine or the launch.
    """
    check_platform()
    launch = read_launch()
    size = launch.world_size
    hint = "Start several processes by torchrun, which divide the global batch."
    for run in runs:
        given = run.config.world_size
        check(given in (1, size), "world_size", f"be 1 or {size}", given, hint)
    device = choose_device(runs[0].config.device, launch.local_rank)
    hint = "Give --device cpu to measure on this CPU all the same."
    fits = device.type == "cuda" or runs[0].config.device == "cpu"
    check(fits, "the machine", "have a CUDA GPU", "none", hint)
    measured = []
    for seq_len, run in itertools.product(seqs, runs):
        config = rebatch(run.config, seq_len, tokens, micro_batch, size)
        check_run_fits(config, device)
        row = {
            "provider": run.name,
            "changed": differences(run.file, config),
            "seq_len": config.seq_len,
            "batch": config.global_batch,
            "dtype": DTYPES[config.compute_dtype],
        }
        measured.append((config, row))
    same: Fields = {"case": "train", "choice": "model", "shape": shape, "num_gpus": size}
    modes = ["fwd_bwd"] if size > 1 else modes
    with join(launch, device) as processes:
        results = Results(out, device, commit) if processes.is_main else None
        for config, row in measured:
            found = _measure(config, device, processes, modes, (warmup, steps))
            for mode in ("fwd_bwd", "fwd"):
                if results is not None and mode in modes:
                    results.add(**same, **row, mode=mode, **found[mode])
        return 0 if results is None else results.finish()


def _measure(
    config: TrainConfig,
    device: torch.device,
    processes: Processes,
    modes: Sequence[str],
    counts: tuple[int, int],
) -> dict[str, Fields]:
    """Fields of the rows by mode."""
    checked = check_model(gate_config(config), device)
    found = dict.fromkeys(("fwd_bwd", "fwd"), checked)
    release_memory(device)
    if processes.largest(not checked["correct"])[0]:
        return found
    try:
        steps, trainer = measure_steps(config, device, *counts, processes)
        found["fwd_bwd"] = _judged(trainer, {**checked, **steps}, processes)
        if "fwd" in modes:
            found["fwd"] = checked
            forward = measure_forward(trainer, checked, device)
            found["fwd"] = {**forward, "settings": found["fwd_bwd"]["settings"]}
        del trainer
    except TrainingStoppedError as error:  # on all processes
        found = dict.fromkeys(found, verdict(False, note=str(error)))
    except RuntimeError as error:
        if not is_out_of_memory(error) or processes.world_size > 1:
            raise  # a bug, or other processes wait for this process
        micro_batch = smaller_micro_batch(config)
        hint = "" if micro_batch is None else f". Give --micro-batch {micro_batch}"
        failure = {**not_run(f"{memory_use(error)}{hint}"), "errors": checked["errors"]}
        found = {mode: row if "ms_p50" in row else failure for mode, row in found.items()}
    release_memory(device)
    return found


def _judged(trainer: Trainer, found: Fields, processes: Processes) -> Fields:
    """Fields of a row with settings, and without times if unexpected kernels ran."""
    config = trainer.config
    found["settings"] = {
        "attention": config.model.attention_kind,
        "parameters": trainer.model.num_parameters()["total"],
        "mlp_hidden_size": config.model.mlp_hidden_size,
        "vocab_size": config.model.vocab_size,
        **{name: getattr(config, name) for name in _SETTINGS},
        "checkpointing": config.checkpointing.policy,
        "optimizer": config.optim.name,
        "grad_clip": config.optim.grad_clip,
        "data": trainer.data.description["source"],
        "document_mask": config.data.document_mask,
    }
    if processes.world_size > 1:
        nccl = {"nccl": environment.nccl(), "nccl_settings": communication_settings()}
        found["settings"] |= {**asdict(config.parallel), **nccl}
    fault = fault_of(config, found["kernels"], "fwd_bwd") if "kernels" in found else None
    if fault is None:
        return found
    kept = {name: found[name] for name in ("errors", "settings", "kernels", "kernel_us")}
    return {**kept, "correct": False, "note": fault}


class MeasuredError(Exception):
    """All timed steps are done; stops the run before it writes a checkpoint."""


def measure_steps(
    config: TrainConfig,
    device: torch.device,
    warmup: int,
    steps: int,
    processes: Processes | None = None,
) -> tuple[Fields, Trainer]:
    """Train in a temporary folder; time the steps after the warm-up and the profiled steps.

    Evaluations, checkpoints and samples are disabled. A step's time includes data, forward,
    backward, optimizer and metrics. The host waits for the device only before the first and after
    the last timed step.

    Args:
        config: the run.
        device: the device of the trainer.
        warmup: steps before the profiled ones.
        steps: timed steps.
        processes: the processes of the run; None means a single process.

    Returns:
        Fields of a row, and the trainer after its last step. Peak memory is that of all tensors
        since the start; the memory of a CUDA graph is counted at its capture.
    """
    torch.compiler.reset()  # otherwise another length makes shapes dynamic
    on_gpu, processes = device.type == "cuda", processes or Processes()
    first = warmup + PROFILED_STEPS
    config = replace(
        config,
        steps=max(config.steps, first + steps + 2),
        log_every=min(config.log_every or LOG_EVERY, steps),
        eval_windows=0,
        checkpoint_every=0,
        sample_tokens=0,
        nonfinite="stop",
    )
    if on_gpu:
        # The profiler records kernels only of CUDA graphs captured after its first use.
        profiled(lambda: None, device)
        torch.cuda.reset_peak_memory_stats(device)
    marks, ends, rows, trace = list[Any](), list[float](), list[MetricsRow](), profiler()

    def on_step() -> None:
        """Mark the time between two steps."""
        done = len(marks)
        if done == first:
            synchronize(device)
            if on_gpu:
                trace.stop()
            ends.append(time.perf_counter())
        marks.append(time_mark(device))
        if on_gpu and done == warmup:
            synchronize(device)
            trace.start()
        if done == first + steps:
            synchronize(device)
            ends.append(time.perf_counter())
            raise MeasuredError

    trainer = _train(config, processes, on_row=rows.append, on_step=on_step)
    found = percentiles(elapsed_ms(marks[first:], device), 1, "steps of the trainer")._asdict()
    tokens_per_s = steps * config.global_batch * config.seq_len / (ends[1] - ends[0])
    found |= _speed(config, tokens_per_s, "fwd_bwd", device)
    found["loss_nats"] = float(rows[-1]["loss_nats"]) if rows else None
    if on_gpu:
        memory = memory_row(device)
        found["peak_mib"] = memory["memory_allocated_mib"]
        found["reserved_mib"] = memory["memory_reserved_mib"]
        found |= kernel_fields(trace, PROFILED_STEPS)
        if processes.world_size > 1:
            found["peak_mib"] = float(processes.largest(round(found["peak_mib"]))[0])
            found |= communication_ms(trace, processes)
    return found, trainer


def _train(config: TrainConfig, processes: Processes, **given: Any) -> Trainer:
    """Run in a temporary folder until all steps are timed."""
    with tempfile.TemporaryDirectory() as own_folder:
        path = Path(processes.all_of(own_folder)[0]) / "run"
        with processes.main_first():
            main = processes.is_main
            run_folder = RunFolder.create(path, config) if main else RunFolder.open(path)
        trainer = Trainer(config, run_folder, processes=processes, stops_at_once=True, **given)
        with suppress(MeasuredError):
            given["on_step"]()  # before the first step
            trainer.run()
            raise AssertionError("the run ended before all steps were timed")
        processes.wait_for_all()  # before the main process removes the folder
    return trainer


def measure_forward(trainer: Trainer, checked: Fields, device: torch.device) -> Fields:
    """Return the fields of a row of the forward pass and loss of one step's tokens.

    Peak memory is that of weights and forward pass.

    Args:
        trainer: returned by :func:`measure_steps`.
        checked: verdict about the model.
        device: the device of the run.
    """
    config = trainer.config
    batches = [batch.to(device) for batch in trainer.next_batches()]
    trainer.state.optimizer.zero_grad()

    @torch.no_grad()
    def forward() -> None:
        with autocast(device, config.compute_dtype):
            for batch in batches:
                trainer.loss(batch.tokens, batch.targets, batch.cu_seqlens, batch.max_seqlen)

    fault = functools.partial(fault_of, config, mode="fwd")
    work = {"tokens": config.global_batch * config.seq_len}
    subject = Subject(forward, lambda: checked, fault, lambda: work, capture=False)
    found = measure(lambda: subject, device)
    if found.get("peak_mib") is not None:
        found["peak_mib"] += sum(weight.nbytes for weight in trainer.model.parameters()) / MIB
    if "tokens_per_s" in found:
        found |= _speed(config, found["tokens_per_s"], "fwd", device)
    return found


def _speed(config: TrainConfig, tokens_per_s: float, mode: str, device: torch.device) -> Fields:
    """Row fields of a speed in tokens/s over all processes."""
    a_token = flops_per_token(config.model, config.seq_len, backward=mode == "fwd_bwd")
    flops = tokens_per_s * a_token
    peak = peak_flops(device, config.compute_dtype)
    mfu = None if peak is None else flops / peak / config.world_size
    return {"tokens_per_s": tokens_per_s, "tflops_useful": flops / 1e12, "mfu": mfu}


# --- Communication
def communication_ms(trace: Any, processes: Processes) -> dict[str, float]:
    """Row fields of communication: ms per profiled step, mean over the processes."""
    events = gpu_events(trace)
    spans = [(event.time_range.start, event.time_range.end, event.name) for event in events]
    totals = processes.total(*map(round, communication_us(spans)))
    names = ("communication_ms", "exposed_ms", "idle_ms")
    each = 1000 * processes.world_size * PROFILED_STEPS
    return {name: total / each for name, total in zip(names, totals, strict=True)}


def communication_us(spans: Sequence[tuple[float, float, str]]) -> tuple[float, float, float]:
    """Return three durations from the profile of one process, microseconds.

    The time in which an NCCL kernel ran, including waits for slower processes; the part of it in
    which nothing else ran on the GPU; the idle time between the first and the last kernel.

    Args:
        spans: start, end and name of kernels, copies and fills, microseconds.
    """
    sent, computed = (
        _covered(span for span in spans if ("nccl" in span[2].lower()) is sends)
        for sends in (True, False)
    )
    ran = _covered(spans)
    whole = max(span[1] for span in spans) - min(span[0] for span in spans) if spans else 0.0
    return sent, ran - computed, whole - ran


def _covered(spans: Iterable[tuple[float, float, str]]) -> float:
    """Length of the union of spans."""
    total, reached = 0.0, float("-inf")
    for begin, end, _ in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
