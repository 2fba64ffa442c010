"""``nsa bench train``: the whole training step, by the trainer itself, of NSA and dense models in one run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nsa.bench.attention import judges_kernels, release_memory
from nsa.bench.cases import CASES, MODES
from nsa.bench.gate import Verdict
from nsa.bench.providers import own
from nsa.bench.rows import Origin, Row, RowFile, origin, row_of
from nsa.bench.subjects import DTYPES, Batching, Subject, as_measured, differences
from nsa.bench.table import progress_line, train_table
from nsa.bench.train_gate import check_model, gate_config
from nsa.bench.train_run import Measured, measure_forward, measure_steps
from nsa.errors import check
from nsa.lm.flops import flops_per_token
from nsa.train.config import TrainConfig
from nsa.train.distributed.launch import check_platform, read_launch
from nsa.train.telemetry.throughput import peak_flops
from nsa.train.trainer import Trainer, TrainingStoppedError
from nsa.train.watch.out_of_memory import check_run_fits, is_out_of_memory, memory_use, smaller_micro_batch

# Cases of whose kernels each branch has to run one.
_BRANCH_CASES = {
    "cmp": ("attention.compressed",),
    "slc": ("attention.choice", "attention.selected"),
    "win": ("attention.window",),
}
# Fields of a row that only a run has, and a forward pass alone has not.
_OF_A_RUN = (
    "loss_nats",
    "compilations_after_5",
    "slowest_over_median",
    "host_ms_p50",
    "first_step_s",
)
# Attention that is not ours. Matrix products are libraries' in any model.
_FOREIGN_ATTENTION = ("flash", "fmha", "sdpa")
# Kernels of PyTorch's dense attention over documents that do not see each other: FlashAttention,
# the memory-efficient kernel, cuDNN, FlexAttention.
_DENSE_OF_DOCUMENTS = ("flash", "fmha", "cudnn", "triton_tem")


@dataclass(frozen=True)
class TrainPlan:
    """What ``nsa bench train`` is asked to measure.

    Attributes:
        shape: name of the model, the first configuration's.
        subjects: runs to be compared.
        batchings: changes of length and batch; every subject is measured with each.
        modes: ``fwd``, ``fwd_bwd``.
        warmup: steps before anything is looked at.
        steps: timed steps.
        out: JSONL file to append to; None keeps the rows to itself.
        commit: to record where the checkout has no git.
    """

    shape: str
    subjects: Sequence[Subject]
    batchings: Sequence[Batching] = (Batching(),)
    modes: Sequence[str] = MODES
    warmup: int = 20
    steps: int = 40
    out: Path | None = None
    commit: str | None = None


def bench_train(plan: TrainPlan, device: torch.device) -> bool:
    """Measure, print and write rows.

    Returns:
        Whether every row that was tried is correct; those that do not fit into memory do not count.

    Raises:
        ValueError: the plan does not fit this machine, or a configuration its data.
    """
    check_platform("nsa bench train")
    launcher = read_launch().launcher
    check(not launcher, "nsa bench train", "the command", "be started as one process", launcher)
    hint = "Give --device cpu to measure on this CPU all the same."
    for subject in plan.subjects:
        fits = device.type == "cuda" or subject.config.device == "cpu"
        check(fits, "nsa bench train", "the machine", "have a CUDA GPU", "none", hint)
        check_run_fits("nsa bench train", subject.config, device)
    file, here = RowFile(plan.out), origin(device, plan.commit)
    verdicts: dict[TrainConfig, Verdict] = {}
    print(
        f"run {here.run_id} on {here.gpu or here.device}, commit {here.commit}{' with changes' * bool(here.dirty)}", flush=True
    )
    for batching in plan.batchings:
        for subject in plan.subjects:
            point = _Point.of(subject, batching)
            size = f"S {point.config.seq_len:,} x {point.config.global_batch}"
            changed = "; ".join(f"{name} {value}" for name, value in point.changed.items())
            said = f"\n{plan.shape}, {subject.name}, {size}"
            print(f"{said}, changed: {changed}" if changed else said, flush=True)
            for row in _measure(plan, point, device, here, verdicts):
                file.add(row)
                print(progress_line(row), flush=True)
    print("\n" + train_table(file.rows), flush=True)
    return all(row.correct is not False for row in file.rows)


@dataclass(frozen=True)
class _Point:
    """One run to be measured, and what a row says about where it comes from.

    Attributes:
        name: as provider in the rows.
        config: the run with all changes that were asked for.
        changed: what differs from the configuration file, by dotted name.
        variant: what differs from the first configuration with the same changes; None for that one
            and the dense models beside it.
    """

    name: str
    config: TrainConfig
    changed: dict[str, Any]
    variant: dict[str, Any] | None

    @classmethod
    def of(cls, subject: Subject, batching: Batching) -> _Point:
        config = batching.apply(subject.config)
        base = None if subject.base is None else batching.apply(subject.base)
        variant = None if base is None else differences(base, config)
        return cls(subject.name, config, differences(subject.file, config), variant)


def _measure(
    plan: TrainPlan,
    point: _Point,
    device: torch.device,
    here: Origin,
    verdicts: dict[TrainConfig, Verdict],
) -> Iterator[Row]:
    """A row for each mode."""
    config = as_measured(point.config, plan.warmup, plan.steps)
    common: dict[str, Any] = {
        "case": "train",
        "provider": point.name,
        "variant": point.variant,
        "changed": point.changed,
        "shape": plan.shape,
        "choice": "model",
        "seq_len": config.seq_len,
        "batch": config.global_batch,
        "dtype": DTYPES[config.compute_dtype],
        **dict.fromkeys(("tbps_useful", "overlap", "recall")),
    }
    small = gate_config(config)
    if small not in verdicts:
        verdicts[small] = check_model(config, device)
    verdict = verdicts[small]
    release_memory(device)
    if not verdict.correct:
        for mode in plan.modes:
            yield _row(here, common, mode, verdict)
        return
    trainer: Trainer | None = None
    training, failure = None, verdict
    try:
        training, trainer = measure_steps(config, device, plan.warmup, plan.steps)
    except RuntimeError as error:
        failure = _failure(error, config, verdict)
    for mode in MODES[::-1]:
        if mode not in plan.modes:
            continue
        found = training if mode == "fwd_bwd" else None
        if trainer is not None and found is None:
            try:
                found = measure_forward(trainer, device, plan.steps)
            except RuntimeError as error:
                failure = _failure(error, config, verdict)
        if trainer is None or found is None:
            yield _row(here, common, mode, failure)
            continue
        details = {**common, "settings": _settings(config, trainer)}
        yield _judged_row(here, details, mode, verdict, found, trainer, device)
    del trainer
    release_memory(device)


def _failure(error: RuntimeError, config: TrainConfig, verdict: Verdict) -> Verdict:
    """Why there is no figure: too little memory, or a run that stopped itself."""
    if isinstance(error, TrainingStoppedError):
        return Verdict(False, verdict.errors, str(error))
    if not is_out_of_memory(error):
        raise error  # a bug
    micro_batch = smaller_micro_batch(config)
    hint = "" if micro_batch is None else f". Give --micro-batch {micro_batch}"
    return Verdict(None, verdict.errors, f"not run: {memory_use(error)}{hint}")


def _judged_row(
    here: Origin, common: dict[str, Any], mode: str, verdict: Verdict, found: Measured, trainer: Trainer, device: torch.device
) -> Row:
    """The row with its figures, unless what ran was not what should have."""
    config = trainer.config
    fault = fault_of(config, list(found.kernel_us), mode) if judges_kernels(device) else None
    if fault is None and found.nonfinite:
        fault = f"loss or gradient was not finite in {found.nonfinite} steps"
    kernels = {"kernels": sorted(found.kernel_us), "kernel_us": found.kernel_us}
    if fault is not None:
        return _row(here, {**common, **kernels}, mode, Verdict(False, verdict.errors, fault))
    per_step = config.global_batch * config.seq_len
    tokens_per_s = found.timing.samples * per_step / found.seconds
    flops = tokens_per_s * flops_per_token(trainer.model, config.seq_len) / (1 if mode == "fwd_bwd" else 3)
    peak = peak_flops(device, config.compute_dtype)
    figures = {
        **{f"ms_{name}": round(getattr(found.timing, name), 4) for name in ("p50", "p20", "p80")},
        "tflops_useful": round(flops / 1e12, 4), "tokens_per_s": round(tokens_per_s, 1),
        "mfu": None if peak is None else round(flops / peak, 4),
        "peak_mib": None if found.peak_mib is None else round(found.peak_mib, 1),
        "reserved_mib": None if found.reserved_mib is None else round(found.reserved_mib, 1),
        **{name: _rounded(getattr(found, name)) for name in _OF_A_RUN},
        "timing": found.timing.method, "samples": found.timing.samples,
    }  # fmt: skip
    return _row(here, {**common, **kernels, **figures}, mode, verdict)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _row(here: Origin, values: dict[str, Any], mode: str, verdict: Verdict) -> Row:
    empty: dict[str, Any] = {
        **dict.fromkeys(("ms_p50", "ms_p20", "ms_p80", "tflops_useful", "peak_mib", "timing", "samples")),
        "kernels": [], "kernel_us": {},
    }  # fmt: skip
    return row_of(here, **{**empty, **values}, mode=mode, correct=verdict.correct, errors=verdict.errors, note=verdict.note)


def _settings(config: TrainConfig, trainer: Trainer) -> dict[str, Any]:
    """What a reader of a row wants to know of the run besides its configuration's name."""
    return {
        "attention": config.model.attention, "parameters": trainer.model.num_parameters()["total"],
        "mlp_hidden_size": config.model.mlp_hidden_size, "vocab_size": config.model.vocab_size,
        "micro_batch": config.micro_batch, "accumulation": config.accumulation, "compile": config.compile,
        "cuda_graphs": config.cuda_graphs, "checkpointing": config.checkpointing.policy, "loss_chunk": config.loss_chunk,
        "optimizer": config.optim.name, "grad_clip": config.optim.grad_clip, "telemetry": config.telemetry,
        "log_every": config.log_every, "data": trainer.data.description["source"],
        "document_mask": config.data.document_mask,
    }  # fmt: skip


def fault_of(config: TrainConfig, kernels: Sequence[str], mode: str) -> str | None:
    """Why the kernels that ran are not those of this model's attention; None if they are."""
    if config.model.attention == "dense":
        parts = _DENSE_OF_DOCUMENTS if config.data.document_mask else ("cudnn",)
        if any(part in name.lower() for name in kernels for part in parts):
            return None
        return f"no kernel with {' or '.join(parts)} in its name ran"
    ours = own(kernels)
    for case in (CASES[name] for branch in config.model.nsa.branches for name in _BRANCH_CASES[branch]):
        for prefix in case.kernels[0] + (case.kernels[1] if mode == "fwd_bwd" else ()):
            if not any(name.startswith(prefix) for name in ours):
                return f"no kernel {prefix}* of this library ran"
    foreign = [name for name in kernels if any(part in name.lower() for part in _FOREIGN_ATTENTION)]
    return f"{foreign[0]} ran, which is attention of another library" if foreign else None
