"""``nsa bench train``: whole training steps by the trainer itself, of NSA and dense models."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from nsa.bench.attention import Fields, judges_kernels
from nsa.bench.cases import CASES, MODES
from nsa.bench.clock import release_memory
from nsa.bench.gate import Verdict
from nsa.bench.implementations import missing_kernel
from nsa.bench.rows import Results, Row
from nsa.bench.subjects import DTYPES, Batching, Subject, as_measured, differences
from nsa.bench.table import progress_line, result_table, settings_text
from nsa.bench.train_gate import check_model, gate_config
from nsa.bench.train_run import Measured, measure_forward, measure_steps
from nsa.errors import check
from nsa.lm.flops import flops_per_token
from nsa.train.config import TrainConfig
from nsa.train.distributed.launch import check_platform, read_launch
from nsa.train.telemetry.throughput import peak_flops
from nsa.train.trainer import Trainer, TrainingStoppedError
from nsa.train.watch.out_of_memory import (
    check_run_fits,
    is_out_of_memory,
    memory_use,
    smaller_micro_batch,
)

# Cases of whose kernels each branch has to run one.
_BRANCH_CASES = {
    "cmp": ("attention.compressed",),
    "slc": ("attention.choice", "attention.selected"),
    "win": ("attention.window",),
}
# Settings of a run that its row repeats; others have a section of the configuration.
_SETTINGS = (
    "micro_batch",
    "accumulation",
    "compile",
    "cuda_graphs",
    "loss_chunk",
    "telemetry",
    "log_every",
)
# Attention that is not of this library. Matrix products are other libraries' in any model.
_FOREIGN_ATTENTION = ("flash", "fmha", "sdpa")
# Kernels of PyTorch's dense attention within documents: FlashAttention, the memory-efficient
# kernel, cuDNN, FlexAttention.
_DENSE_OF_DOCUMENTS = ("flash", "fmha", "cudnn", "triton_tem")


@dataclass(frozen=True)
class TrainPlan:
    """What ``nsa bench train`` is asked to measure.

    Attributes:
        shape: name of the model, the first configuration's.
        subjects: runs to be compared.
        batchings: changes of length and batch; every subject is measured with each.
        modes: ``fwd``, ``fwd_bwd``.
        warmup: steps before the profiled one.
        steps: timed steps.
        out: JSONL file to append to; None keeps the rows to itself.
        commit: to record where the checkout has no git.
    """

    shape: str
    subjects: Sequence[Subject]
    batchings: Sequence[Batching]
    modes: Sequence[str]
    warmup: int
    steps: int
    out: Path | None
    commit: str | None


def bench_train(plan: TrainPlan, device: torch.device) -> bool:
    """Measure, print and write rows.

    Returns:
        Whether every row that was tried is correct; those that do not fit into memory do not count.

    Raises:
        ValueError: the plan does not fit this machine, or a configuration its data.
    """
    where = "nsa bench train"
    check_platform(where)
    launcher = read_launch().launcher
    check(not launcher, where, "the command", "be started as one process", launcher)
    hint = "Give --device cpu to measure on this CPU all the same."
    for subject in plan.subjects:
        fits = device.type == "cuda" or subject.config.device == "cpu"
        check(fits, where, "the machine", "have a CUDA GPU", "none", hint)
        check_run_fits(where, subject.config, device)
    results = Results(Row, plan.out, device, plan.commit)
    verdicts: dict[TrainConfig, Verdict] = {}
    for batching, subject in itertools.product(plan.batchings, plan.subjects):
        config = batching.apply(subject.config)
        changed = differences(subject.file, config)
        said = f"{plan.shape}, {subject.name}, S {config.seq_len:,} x {config.global_batch}"
        print(
            f"\n{said}, changed: {settings_text(changed)}" if changed else f"\n{said}",
            flush=True,
        )
        base = subject.base and batching.apply(subject.base)
        common: Fields = {
            "case": "train",
            "provider": subject.name,
            "variant": base and differences(base, config),
            "changed": changed,
            "shape": plan.shape,
            "choice": "model",
            "seq_len": config.seq_len,
            "batch": config.global_batch,
            "dtype": DTYPES[config.compute_dtype],
            "kernels": [],
            "kernel_us": {},
        }
        for found in _measure(plan, config, device, verdicts):
            results.add(progress_line, **{**common, **found})
    return results.finish(result_table)


def _measure(
    plan: TrainPlan, config: TrainConfig, device: torch.device, verdicts: dict[TrainConfig, Verdict]
) -> Iterator[Fields]:
    """What the rows of each mode say."""
    config = as_measured(config, plan.warmup, plan.steps)
    small = gate_config(config)
    if small not in verdicts:
        verdicts[small] = check_model(config, device)
    verdict = failure = verdicts[small]
    found: dict[str, Fields] = {}
    release_memory(device)
    if verdict.correct:
        try:
            steps, trainer = measure_steps(config, device, plan.warmup, plan.steps)
            found["fwd_bwd"] = _fields(trainer, steps, verdict, "fwd_bwd", device)
            if "fwd" in plan.modes:
                forward = measure_forward(trainer, device, plan.steps)
                found["fwd"] = _fields(trainer, forward, verdict, "fwd", device)
            del trainer
        except RuntimeError as error:
            failure = _failure(error, config, verdict)
    for mode in reversed(MODES):
        if mode in plan.modes:
            yield {"mode": mode, **found.get(mode, asdict(failure))}
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


def _fields(
    trainer: Trainer,
    found: Measured,
    verdict: Verdict,
    mode: str,
    device: torch.device,
) -> Fields:
    """What a row says, without figures if what ran was not what should have."""
    config = trainer.config
    fault = fault_of(config, list(found.kernel_us), mode) if judges_kernels(device) else None
    if fault is None and found.nonfinite:
        fault = f"loss or gradient was not finite in {found.nonfinite} steps"
    row: Fields = {
        **asdict(verdict),
        "settings": _settings(trainer),
        "kernel_us": found.kernel_us,
        "kernels": sorted(found.kernel_us),
    }
    if fault is not None:
        return {**row, "correct": False, "note": fault}
    per_step = config.global_batch * config.seq_len
    tokens_per_s = found.timing.samples * per_step / found.seconds
    passes = 1 if mode == "fwd_bwd" else 3  # of the forward pass in what a token is counted with
    flops = tokens_per_s * flops_per_token(config.model, config.seq_len) / passes
    peak = peak_flops(device, config.compute_dtype)
    seen = {name: value for name, value in vars(found).items() if name in Row.__annotations__}
    return {
        **row,
        **seen,
        **found.timing.fields(),
        "tflops_useful": flops / 1e12,
        "tokens_per_s": tokens_per_s,
        "mfu": None if peak is None else flops / peak,
    }


def _settings(trainer: Trainer) -> dict[str, Any]:
    """What a row says of the run in addition to its configuration's name."""
    config = trainer.config
    return {
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


def fault_of(config: TrainConfig, kernels: Sequence[str], mode: str) -> str | None:
    """Why the kernels that ran are not those of this model's attention; None if they are."""
    if config.model.attention == "dense":
        parts = _DENSE_OF_DOCUMENTS if config.data.document_mask else ("cudnn",)
        ran = any(part in name.lower() for name in kernels for part in parts)
        return None if ran else f"no kernel with {' or '.join(parts)} in its name ran"
    for branch in config.model.nsa.branches:
        for name in _BRANCH_CASES[branch]:
            fault = missing_kernel(kernels, CASES[name], mode)
            if fault is not None:
                return fault
    foreign = [name for name in kernels if any(part in name.lower() for part in _FOREIGN_ATTENTION)]
    return f"{foreign[0]} ran, which is attention of another library" if foreign else None
