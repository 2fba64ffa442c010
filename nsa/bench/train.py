"""``nsa bench train``: training steps of the trainer, sparse and dense, on one or more GPUs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nsa.bench.attention import missing_kernel, own, split_variant
from nsa.bench.cases import CASES
from nsa.bench.clock import Verdict, judges_kernels, not_run, release_memory
from nsa.bench.gate import ModelGate
from nsa.bench.rows import UNMASKED, Row
from nsa.bench.table import Results
from nsa.bench.train_run import Measured, communication_ms, measure_forward, measure_steps
from nsa.errors import check
from nsa.lm.baseline import dense_of_equal_size
from nsa.lm.flops import flops_per_token
from nsa.lm.model import LanguageModel
from nsa.train import environment
from nsa.train.config import CheckpointingConfig, TrainConfig
from nsa.train.distributed.launch import check_platform, communication_settings, read_launch
from nsa.train.distributed.processes import Processes, join
from nsa.train.execution.activations import checkpoint_activations
from nsa.train.execution.precision import choose_device
from nsa.train.load import load_config
from nsa.train.loss import NextTokenLoss
from nsa.train.telemetry.throughput import peak_flops
from nsa.train.trainer import Trainer, TrainingStoppedError
from nsa.train.watch.out_of_memory import (
    check_run_fits,
    is_out_of_memory,
    memory_use,
    smaller_micro_batch,
)

Fields = dict[str, Any]  # fields of a row
WHERE = "nsa bench train"
PROVIDERS = ("nsa", "dense", "dense-matched")
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}  # names in rows
LOG_EVERY = 20  # maximum steps between rows of metrics
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
@dataclass(frozen=True)
class Subject:
    """One run to be measured.

    Attributes:
        name: provider in rows.
        config: the run.
        file: its unchanged configuration file.
        base: first configuration, whose differences are the row's ``variant``; or None.
    """

    name: str
    config: TrainConfig
    file: TrainConfig
    base: TrainConfig | None = None


def find_subjects(
    paths: Sequence[Path],
    settings: Mapping[str, str],
    variants: Sequence[str] = (),
    names: Sequence[str] | None = None,
    *,
    unmasked: bool = False,
) -> list[Subject]:
    """Return the runs to be measured.

    Args:
        paths: configurations; the first one is the base.
        settings: values by dotted name, for all configurations.
        variants: ``NAME:KEY=VALUE,...``, settings on top of the base.
        names: models of the base; None means all of ``PROVIDERS``, or the base's own if there are
            other configurations.
        unmasked: add the dense model with attention across documents.

    Raises:
        ValueError: a configuration is not valid, or two runs have the same name.
    """
    file, base = load_config(paths[0]), load_config(paths[0], settings)
    if names is None:
        names = PROVIDERS if len(paths) == 1 else (base.model.attention,)
    names = [*names, *[UNMASKED] * unmasked]
    found = [Subject(name, _model_of(base, name), file) for name in names]
    for path in paths[1:]:
        found.append(Subject(path.stem, load_config(path, settings), load_config(path), base))
    for text in variants:
        name, changes = split_variant(WHERE, text)
        found.append(Subject(name, load_config(paths[0], {**settings, **changes}), file, base))
    taken = {*PROVIDERS, UNMASKED}
    for subject in found[len(names) :]:
        rule = f"be none of {', '.join(sorted(taken))}"
        check(subject.name not in taken, WHERE, "the name of a run", rule, subject.name)
        taken.add(subject.name)
    return found


def _model_of(base: TrainConfig, name: str) -> TrainConfig:
    if name == "dense-matched":
        return replace(base, model=dense_of_equal_size(base.model))
    if name == UNMASKED:
        base = replace(base, data=replace(base.data, document_mask=False))
    return replace(base, model=replace(base.model, attention="nsa" if name == "nsa" else "dense"))


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
        micro_batch: sequences of one forward and backward; None keeps it.
        world_size: number of processes; above 1 each has micro-batches of at most this size.

    Raises:
        ValueError: the sequences of a step cannot be split evenly.
    """
    seq_len = seq_len or config.seq_len
    sequences = config.global_batch if tokens is None else max(1, tokens // seq_len)
    own, remainder = divmod(sequences, world_size)
    rule = f"be a multiple of the number of processes ({world_size})"
    check(remainder == 0, WHERE, "global_batch", rule, sequences)
    asked = micro_batch or config.micro_batch
    rule, hint = f"be at most the {sequences} sequences of a step", "Give --tokens, too."
    check(tokens is not None or asked <= sequences, WHERE, "--micro-batch", rule, asked, hint)
    size = min(asked, own)
    if world_size > 1:
        size = max(part for part in range(1, size + 1) if own % part == 0)
    accumulation, remainder = divmod(own, size)
    rule, hint = f"divide the {own} sequences of a step", "Give --micro-batch."
    check(remainder == 0, WHERE, "micro_batch", rule, size, hint)
    return replace(
        config,
        seq_len=seq_len,
        micro_batch=size,
        accumulation=accumulation,
        global_batch=sequences,
        world_size=world_size,
    )


def as_measured(config: TrainConfig, warmup: int, steps: int) -> TrainConfig:
    """Adapt a run to the benchmark; these changes are not part of a row's ``variant``.

    The run is long enough for the steps and writes at least one row of metrics. Evaluations,
    checkpoints and samples are disabled.
    """
    return replace(
        config,
        steps=max(config.steps, warmup + steps + 5),
        log_every=min(config.log_every or LOG_EVERY, steps),
        eval_windows=0,
        checkpoint_every=0,
        sample_tokens=0,
    )


def differences(base: TrainConfig, other: TrainConfig) -> dict[str, Any]:
    """Settings of ``other`` that differ from ``base``, by dotted name."""
    before, after = (dict(_flat(dataclasses.asdict(config))) for config in (base, other))
    return {
        name: after[name] for name in after if name not in before or before[name] != after[name]
    }


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


# --- The gate
def gate_config(config: TrainConfig) -> TrainConfig:
    """Config of the gate: two layers, and sequences so short that every block is selected.

    Otherwise rounding could decide between blocks with nearly equal scores, and gradients would
    have no bound; ``nsa bench attention`` checks the selection.
    """
    pattern = config.model.nsa
    model = replace(config.model, num_layers=min(config.model.num_layers, GATE_LAYERS))
    whole = config.checkpointing.policy == "range"  # the range may contain neither layer
    return replace(
        config,
        model=model,
        seq_len=min(config.seq_len, pattern.num_selected_blocks * pattern.block_size),
        checkpointing=CheckpointingConfig("full") if whole else config.checkpointing,
        steps=1,
        micro_batch=GATE_SEQUENCES,
        accumulation=1,
        world_size=1,
        global_batch=GATE_SEQUENCES,
    )


def check_model(config: TrainConfig, device: torch.device) -> Verdict:
    """Compare loss and gradients of a fresh model, by part, with the fp64 reference on the CPU.

    The model runs as in the trainer: same loss, compilation, activation checkpointing and
    precision.
    """
    config = gate_config(config)
    generator = torch.Generator().manual_seed(config.seed)
    shape = (GATE_SEQUENCES * config.seq_len + 1,)
    stream = torch.randint(config.model.vocab_size, shape, generator=generator)
    offsets = torch.arange(0, stream.shape[0], config.seq_len, dtype=torch.int32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = LanguageModel(config.model)
    # The mantissa of TF32 is between bf16 and fp32.
    rounded = config.compute_dtype == "bf16" or config.tf32
    gate = ModelGate(
        NextTokenLoss(model),
        [stream[:-1], stream[1:], offsets],
        config.compute_dtype,
        torch.bfloat16 if rounded else torch.float32,
        _part_of,
        output="loss",
        max_seqlen=config.seq_len,
    )
    subject = NextTokenLoss(deepcopy(model).to(device), config.loss_chunk)
    checkpoint_activations(subject.model, config.checkpointing)
    run = torch.compile(subject, fullgraph=True) if config.compile else subject
    return gate.check(subject, run, device)


def _part_of(parameter: str) -> str:
    name = parameter.removeprefix("model.")
    return next((part.partition(".")[0] for part in _PARTS if part in name), "head")


def fault_of(config: TrainConfig, kernels: Sequence[str], mode: str) -> str | None:
    """Reason why the profiled kernels are not those of the model's attention, or None."""
    if config.model.attention == "dense":
        parts = _DENSE_OF_DOCUMENTS if config.data.document_mask else ("cudnn",)
        ran = any(part in name.lower() for name in kernels for part in parts)
        return None if ran else f"no kernel with {' or '.join(parts)} in its name ran"
    cases = [CASES[name] for branch in config.model.nsa.branches for name in _BRANCH_CASES[branch]]
    missing = [missing_kernel(own(kernels), case.kernels, mode) for case in cases]
    foreign = [name for name in kernels if any(part in name.lower() for part in _FOREIGN_ATTENTION)]
    if foreign:
        missing.append(f"{foreign[0]} ran, which is attention of another library")
    return next(filter(None, missing), None)


# --- The benchmark
def bench_train(
    subjects: Sequence[Subject],
    shape: str,
    *,
    seqs: Sequence[int | None] = (None,),
    tokens: int | None = None,
    micro_batch: int | None = None,
    modes: Sequence[str] = ("fwd", "fwd_bwd"),
    warmup: int = 20,
    steps: int = 40,
    out: Path | None = None,
    commit: str | None = None,
) -> bool:
    """Measure, print and write rows; under torchrun all processes call it, the main one prints.

    Args:
        subjects: the runs.
        shape: name of the first configuration, for rows.
        seqs: lengths S; None keeps the configuration's.
        tokens: tokens of an optimizer step.
        micro_batch: sequences of one forward and backward.
        modes: ``fwd``, ``fwd_bwd``; several processes measure only ``fwd_bwd``.
        warmup: steps before the profiled ones.
        steps: timed steps.
        out: JSONL file to append to.
        commit: recorded if the checkout has no git.

    Returns:
        Whether every measured row is correct.

    Raises:
        ValueError: a run does not match this machine or the launch.
    """
    check_platform(WHERE)
    launch = read_launch()
    size = launch.world_size
    hint = "Start several processes by torchrun, which divide the global batch."
    for subject in subjects:
        given = subject.config.world_size
        check(given in (1, size), WHERE, "world_size", f"be 1 or {size}", given, hint)
    device = choose_device(subjects[0].config.device, launch.local_rank)
    hint = "Give --device cpu to measure on this CPU all the same."
    fits = device.type == "cuda" or subjects[0].config.device == "cpu"
    check(fits, WHERE, "the machine", "have a CUDA GPU", "none", hint)
    sizes: dict[str, Any] = {"tokens": tokens, "micro_batch": micro_batch, "world_size": size}
    runs = []
    for seq_len, subject in itertools.product(seqs, subjects):
        config = rebatch(subject.config, seq_len, **sizes)
        check_run_fits(WHERE, config, device)
        base = subject.base and rebatch(subject.base, seq_len, **sizes)
        row = {
            "provider": subject.name,
            "variant": base and differences(base, config),
            "changed": differences(subject.file, config),
            "seq_len": config.seq_len,
            "batch": config.global_batch,
            "dtype": DTYPES[config.compute_dtype],
        }
        runs.append((as_measured(config, warmup, steps), row))
    same: Fields = {"case": "train", "choice": "model", "shape": shape, "num_gpus": size}
    with join(launch, device) as processes:
        results = Results(out, device, commit) if processes.is_main else None
        verdicts: dict[TrainConfig, Verdict] = {}
        for config, row in runs:
            for found in _measure(config, device, processes, modes, (warmup, steps), verdicts):
                if results is not None:
                    results.add(**same, **row, **found)
        return True if results is None else results.finish()


def _measure(
    config: TrainConfig,
    device: torch.device,
    processes: Processes,
    modes: Sequence[str],
    counts: tuple[int, int],
    verdicts: dict[TrainConfig, Verdict],
) -> Iterator[Fields]:
    """Fields of the rows of each mode, ``fwd_bwd`` first."""
    small = gate_config(config)
    if small not in verdicts:
        verdicts[small] = check_model(config, device)
    verdict = verdicts[small]
    found, failure = dict[str, Fields](), asdict(verdict)
    alone = processes.world_size == 1
    modes = [mode for mode in ("fwd_bwd", "fwd") if mode in modes and (alone or mode == "fwd_bwd")]
    release_memory(device)
    if not processes.largest(not verdict.correct)[0]:
        try:
            steps, trainer = measure_steps(config, device, *counts, processes)
            found["fwd_bwd"] = _fields(trainer, steps, verdict, "fwd_bwd", device, processes)
            if "fwd" in modes:
                forward = measure_forward(trainer, device, counts[1])
                found["fwd"] = _fields(trainer, forward, verdict, "fwd", device, processes)
            del trainer
        except RuntimeError as error:
            if not alone:
                raise  # the other processes wait for this process
            failure = {**_failure(error, config), "errors": verdict.errors}
    for mode in modes:
        yield {"mode": mode, **found.get(mode, failure)}
    release_memory(device)


def _failure(error: RuntimeError, config: TrainConfig) -> Fields:
    """Fields of a row without a time: out of memory, or a stopped run."""
    if isinstance(error, TrainingStoppedError):
        return asdict(Verdict(False, {}, str(error)))
    if not is_out_of_memory(error):
        raise error  # a bug
    micro_batch = smaller_micro_batch(config)
    hint = "" if micro_batch is None else f". Give --micro-batch {micro_batch}"
    return not_run(f"{memory_use(error)}{hint}")


def _fields(
    trainer: Trainer,
    found: Measured,
    verdict: Verdict,
    mode: str,
    device: torch.device,
    processes: Processes,
) -> Fields:
    """Fields of a row, without times if unexpected kernels ran or a step was not finite."""
    config = trainer.config
    fault = fault_of(config, list(found.kernel_us), mode) if judges_kernels(device) else None
    if fault is None and found.nonfinite:
        fault = f"loss or gradient was not finite in {found.nonfinite} steps"
    row: Fields = {
        **asdict(verdict),
        "settings": _settings(trainer, processes),
        "kernel_us": found.kernel_us,
        "kernels": sorted(found.kernel_us),
    }
    if processes.world_size > 1 and found.trace is not None:
        row |= communication_ms(found.trace, processes)
        found.peak_mib = float(processes.largest(round(found.peak_mib or 0))[0])
    if fault is not None:
        return {**row, "correct": False, "note": fault}
    per_step = config.global_batch * config.seq_len
    tokens_per_s = found.timing.samples * per_step / found.seconds
    passes = 1 if mode == "fwd_bwd" else 3  # a training token counts as three forward passes
    flops = tokens_per_s * flops_per_token(config.model, config.seq_len) / passes
    peak = peak_flops(device, config.compute_dtype)
    seen = {name: value for name, value in vars(found).items() if name in Row.__annotations__}
    return {
        **row,
        **seen,
        **found.timing.fields(),
        "tflops_useful": flops / 1e12,
        "tokens_per_s": tokens_per_s,
        "mfu": None if peak is None else flops / peak / processes.world_size,
    }


def _settings(trainer: Trainer, processes: Processes) -> dict[str, Any]:
    """Settings of the run that are recorded in its row."""
    config = trainer.config
    found = {
        "attention": config.model.attention,
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
        found |= asdict(config.parallel)
        found |= {"nccl": environment.nccl(), "nccl_settings": communication_settings()}
    return found
