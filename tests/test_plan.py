"""`nsa plan`: memory beside measured and computed memory, speed, cost, and runs that do not fit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import cli, configs
from nsa.bench.cases import parse_shape
from nsa.bench.rows import Row, newest_rows, read_rows
from nsa.bench.train import differences
from nsa.cli.bench import carried_rows
from nsa.errors import UserError
from nsa.lm.config import LMConfig
from nsa.lm.model import LanguageModel
from nsa.plan import (
    ASSUMED_MFU,
    ATTENTION,
    GRADIENTS,
    KNOWN,
    MLP,
    OPTIMIZER,
    STREAM,
    UPDATE,
    WEIGHTS,
    Gpu,
    alternatives,
    attention_backward_bytes,
    check_plan_fits,
    expected_speed,
    find_gpu,
    make_plan,
    saved_bytes,
    step_memory,
)
from nsa.train.config import CheckpointingConfig, DataConfig, TrainConfig
from nsa.train.execution.activations import kept_bytes
from nsa.train.load import load_config
from nsa.train.loss import NextTokenLoss
from nsa.train.optim import ModelOptimizer
from nsa.train.telemetry.throughput import peak_of
from tests.bench.rows import make_row
from tests.bench.test_documented_figures import ROOT
from tests.bench.test_train import write_config
from tests.train.cases import MODEL

H200, MIB = KNOWN["h200"], 2**20
WITHIN = 0.15  # of a measured peak
BENCHMARKS = ROOT / "benchmarks"
TOKENS, PARAMETERS = 65_536, 78_601_392


# --- memory: measured -----------------------------------------------------------------------------
# Source of a measured peak, MiB, name of the configuration, and settings that differ from it.
Peak = tuple[str, float, str, dict[str, Any]]


def acceptance_peaks() -> Iterator[Peak]:
    """Configurations of the package on one GPU."""
    for path in sorted((BENCHMARKS / "acceptance").glob("*.jsonl")):
        for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            if row["peak_mib"]:
                config = "gpu-small" if row["config"] == "make train" else row["config"]
                yield f"acceptance run, {path.stem}", row["peak_mib"], config, {}


def training_peaks() -> Iterator[Peak]:
    """Dense and NSA, compiled or not, with and without CUDA graphs, policies of checkpointing."""
    files = ("memory/h200", "switches/h200", "results/h200-train", "results/h200-shipped")
    for row in read_rows([BENCHMARKS / f"{name}.jsonl" for name in files]):
        if row.mode == "fwd_bwd" and row.peak_mib and row.settings:
            same = ("micro_batch", "accumulation", "compile", "cuda_graphs", "loss_chunk")
            words = {name: row.settings[name] for name in same}
            words["model.mlp_hidden_size"] = row.settings["mlp_hidden_size"]
            words["checkpointing.policy"] = row.settings["checkpointing"]
            words["data.document_mask"] = row.is_masked
            words |= {"seq_len": row.seq_len, "global_batch": row.batch}
            config = "78m" if row.settings["attention"] == "nsa" else "78m-dense"
            yield f"{row.provider}, {row.commit}", row.peak_mib, config, words


def scaling_peaks() -> Iterator[Peak]:
    """One to four processes, DDP and FSDP2; rows with CUDA graphs leave the graphs' memory out."""
    lines = (BENCHMARKS / "scaling/h200.jsonl").read_text(encoding="utf-8").splitlines()
    for row in map(json.loads, lines):
        if not row["cuda_graphs"]:
            same = ("micro_batch", "accumulation", "global_batch", "compile", "cuda_graphs")
            words = {name: row[name] for name in same}
            for name in ("strategy", "gradient_compression", "gather_dtype"):
                words[f"parallel.{name}"] = row[name]
            words |= {"world_size": row["processes"], "data.document_mask": False}
            yield f"{row['strategy']} {row['commit']}", row["peak_mib"], row["config"], words


@pytest.mark.parametrize("peaks", [acceptance_peaks, training_peaks, scaling_peaks])
def test_the_plan_is_near_every_measured_peak(peaks):
    found = list(peaks())
    assert len(found) >= 8
    for source, mib, config, settings in found:
        words = {name: str(value) for name, value in settings.items()}
        planned = step_memory(load_config(configs.RENAMED.get(config, config), words)).peak / MIB
        assert planned == pytest.approx(mib, rel=WITHIN), (source, config, settings)


def test_attention_needs_what_was_measured():
    """Forward and backward of the operators, in bytes above their inputs."""
    providers: dict[str, Any] = {"nsa": "nsa", "dense-cudnn": "dense"}
    rows = [row for row in newest_rows(read_rows(carried_rows("results"))) if row.peak_mib]
    # Shorter sequences need less: no rows of dq.
    rows = [row for row in rows if row.provider in providers and row.seq_len >= 8192]
    rows = [row for row in rows if (row.case, row.mode) == ("attention", "fwd_bwd")]
    assert len(rows) >= 20
    for row in rows:
        model = LMConfig(nsa=parse_shape(row.shape), attention=providers[row.provider])
        kept = kept_bytes(model, "attention")
        needed = attention_backward_bytes(TrainConfig(model=model)) + sum(kept.values())
        needed -= kept["input"] + kept["out"]  # the gradient of out is an input here
        peak = row.batch * row.seq_len * needed / MIB
        assert peak == pytest.approx(row.peak_mib, rel=WITHIN), (row.shape, row.provider)


# --- memory: computed -----------------------------------------------------------------------------
def saved_by_autograd(config: TrainConfig, *ends: int) -> int:
    """Bytes that a forward pass of 512 tokens on this CPU saves, without parameters."""
    model = LanguageModel(config.model)
    found: dict[int, int] = {}

    def save(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tokens = torch.zeros(512, dtype=torch.int64)
    offsets = torch.tensor([0, *ends], dtype=torch.int32)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        loss = NextTokenLoss(model)(tokens, tokens.clone(), offsets, 256)
    assert loss.requires_grad  # and keeps what was saved
    for parameter in model.parameters():
        found.pop(parameter.data_ptr(), None)
    return sum(found.values())


@pytest.mark.parametrize("ends", [(256, 512), (100, 256, 512)], ids=["whole", "documents"])
@pytest.mark.parametrize("mlp", ["silu", "swiglu"])
def test_a_dense_layer_saves_what_autograd_saves(mlp, ends):
    """On a CPU a norm saves more than on a GPU, which is little beside an MLP of this size."""
    model = replace(MODEL, width=64, mlp_hidden_size=512, mlp=mlp, attention="dense")
    data = DataConfig(document_mask=len(ends) == 3)
    config = TrainConfig(model=model, data=data, compute_dtype="fp32", seq_len=256)
    deeper = replace(config, model=replace(model, num_layers=2))
    saved = (saved_by_autograd(deeper, *ends) - saved_by_autograd(config, *ends)) / 512
    assert sum(saved_bytes(config, "everything").values()) == pytest.approx(saved, rel=0.15)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_optimizer_has_the_state_that_is_planned(name):
    config = load_config("cpu-small", {"optim.name": name})
    optimizer = ModelOptimizer(LanguageModel(config.model), config.optim)
    state = sum(tensor.nbytes for tensor in optimizer.state_tensors().values())
    assert step_memory(config).parts[OPTIMIZER] == pytest.approx(state, rel=0.02)


# 32 sequences of 2,048 tokens, nothing accumulated, not compiled, no CUDA graphs.
LARGE = "micro_batch=32 accumulation=1 global_batch=32 compile=false cuda_graphs=false"
SMALL = "micro_batch=1 global_batch=1 seq_len=64"
SHARDED = "world_size=4 global_batch=128 parallel.strategy=fsdp"
GPT2 = "model.vocab_size=50257 data.tokenizer=gpt2"
OUTSIDE = 2 * 256 * 768  # parameters of embedding and head
SENT, GATHERED, LOGITS = "gradients that are sent", "gathered weights", "logits and head"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "",  # 12 query heads in 2 groups of 64 elements, width 768, 12 layers
            {
                WEIGHTS: 4 * PARAMETERS,
                OPTIMIZER: 8 * PARAMETERS,
                GRADIENTS: None,
                # q, four outputs, keys and values of two branches, gates, statistics, block
                # indices, order
                ATTENTION: 12 * TOKENS * (5 * 1536 + 2 * 512 + 144 + 3 * 48 + 2 * 128),
                MLP: 12 * TOKENS * 2 * 2 * 3072,
                STREAM: 12 * TOKENS * 2 * (4 + 2) * 768,
            },
        ),
        (
            "model.nsa.scores=token_max model.nsa.branches=[slc,win] model.nsa.phi=mlp",
            # a branch less, and nothing of the compression
            {ATTENTION: 12 * TOKENS * (4 * 1536 + 2 * 512 + 144 + 2 * 48 + 2 * 128)},
        ),
        (
            "model.nsa.scores=index model.nsa.index_dim=32 model.nsa.index_heads=3",
            # 6 index queries and 2 keys, 32 selections with 3 heads
            {
                ATTENTION: 12
                * TOKENS
                * (5 * 1536 + 2 * 512 + 144 + 3 * 48 + 2 * 128 + 8 * 64 + 8 * 32 * 4)
            },
        ),
        ("accumulation=2 global_batch=64", {GRADIENTS: 4 * PARAMETERS}),
        ("cuda_graphs=true", {GRADIENTS: 4 * PARAMETERS}),
        ("world_size=2 global_batch=64", {SENT: 4 * PARAMETERS}),
        (
            "world_size=2 global_batch=64 parallel.gradient_compression=bf16",
            {SENT: 6 * PARAMETERS},
        ),
        # The peak is in the update.
        (SMALL, {GRADIENTS: 4 * PARAMETERS, UPDATE: None}),
        (f"{SMALL} optim.name=muon", {UPDATE: 8 * 2**23}),
        (f"{SMALL} optim.name=muon model.mlp_hidden_size=16384", {UPDATE: 8 * 768 * 16384}),
        (
            SHARDED,
            {
                WEIGHTS: PARAMETERS,
                OPTIMIZER: 2 * PARAMETERS,
                GRADIENTS: None,
                GATHERED: 4 * OUTSIDE + 8 * ((PARAMETERS - OUTSIDE) // 12),
            },
        ),
        (
            f"{SHARDED} parallel.gather_dtype=bf16",
            {GATHERED: 4 * OUTSIDE + 4 * ((PARAMETERS - OUTSIDE) // 12)},
        ),
        (f"{SHARDED} accumulation=2 global_batch=256", {GRADIENTS: 4 * PARAMETERS}),
        # With checkpointing one layer is recomputed at a time.
        ("checkpointing.policy=every", {MLP: 7 * TOKENS * 2 * 2 * 3072}),
        (
            "checkpointing.policy=operators",
            {
                MLP: TOKENS * 2 * 2 * 3072,
                ATTENTION: TOKENS * (11 * 6544 + 9248),  # 2,704 are recomputed
            },
        ),
        (
            "checkpointing.policy=full",
            {MLP: TOKENS * 2 * 2 * 3072, STREAM: TOKENS * 768 * (11 * 4 + 2 * (4 + 2))},
        ),
        (GPT2, {LOGITS: (12 * TOKENS + 4 * 768) * 50_257}),
        (f"{GPT2} loss_chunk=1024", {LOGITS: (12 * 1024 + 4 * 768) * 50_257}),
    ],
)
def test_parts_of_a_step(words, expected):
    given = dict(word.split("=") for word in f"{LARGE} {words}".split())
    found = step_memory(load_config("78m", given)).parts
    assert {part: found.get(part) for part in expected} == expected


# --- time and cost --------------------------------------------------------------------------------
def seed(**changes: Any) -> TrainConfig:
    return replace(load_config("78m"), **changes)


def step(**values: Any) -> Row:
    """A measured training step of the 78m model on an H200."""
    settings = {
        "attention": "nsa",
        "parameters": PARAMETERS,
        "micro_batch": 32,
        "compile": True,
        "cuda_graphs": True,
        "checkpointing": "none",
        **values.pop("settings", {}),
    }
    given = {"case": "train", "mode": "fwd_bwd", "gpu": H200.name, "tokens_per_s": 400e3}
    return make_row(**{**given, "mfu": 0.4, **values}, settings=settings)


def speed(rows: list[Row], mfu: float | None = None, **changes: Any) -> tuple[float, str]:
    config = seed(micro_batch=32, accumulation=1, global_batch=32, **changes)
    found = expected_speed(config, PARAMETERS, 0.5e9, H200, rows, mfu)
    assert found is not None
    return found


FULL = {"checkpointing": "full", "micro_batch": 2}


@pytest.mark.parametrize(
    ("other", "changes", "wanted"),
    [
        ({"date": "2026-02-01T00:00:00+00:00"}, {}, 300e3),
        ({"settings": {"micro_batch": 2}}, {}, 400e3),
        ({"settings": {"document_mask": True}}, {}, 300e3),  # the run's documents are masked, too
        ({"settings": {"compile": False}}, {}, 400e3),
        ({"settings": {"cuda_graphs": False}}, {"cuda_graphs": False}, 300e3),
        ({"settings": FULL}, {}, 400e3),
        ({"settings": FULL}, {"checkpointing": CheckpointingConfig("full")}, 300e3),
    ],
    ids=str,
)
def test_the_row_that_is_most_like_the_run(other, changes, wanted):
    rows = [step(), step(**other, tokens_per_s=300e3)]
    for given in (rows, rows[::-1]):
        assert speed(given, **changes)[0] == wanted


def test_the_source_of_a_speed():
    how = "measured: seed, nsa, S 2,048 x 32, compiled, checkpointing none, 2026-01-02"
    assert speed([step()]) == (400e3, how)
    assert speed([step()], mfu=0.1)[1] == "MFU 0.10, given"
    long = step(seq_len=65_536, mfu=0.3)
    per_s, why = speed([long, step(settings={"parameters": 1}, mfu=0.2)])
    assert per_s == pytest.approx(0.2 * 989.4e12 / 0.5e9)
    assert why.startswith("MFU 0.20, as of seed, nsa, S 2,048 x 32")
    assert speed([long])[1].startswith("MFU 0.30, as of")
    for other in (
        {"gpu": "NVIDIA A100"},
        {"mode": "fwd"},
        {"dtype": "float32"},
        {"case": "attention"},
        {"settings": {"attention": "dense"}},
    ):
        why = speed([step(**other)])[1]
        assert why == f"MFU {ASSUMED_MFU:.2f}, assumed, nothing like it was measured", other


def test_time_and_operations():
    config = seed(eval_windows=60, eval_every=1000, world_size=2, global_batch=8)
    plan = make_plan(config, H200, [step()])
    assert plan.tokens == 50_000 * 8 * 2048
    seconds = (plan.tokens + 51 * 60 * 2048 / 3) / 800e3
    assert (plan.seconds, plan.cost(2)) == pytest.approx((seconds, seconds / 900))
    assert make_plan(config, find_gpu(None, 10.0)).cost(2) is None
    assert make_plan(seed(compute_dtype="fp32"), H200).seconds is None  # the peak is that of bf16
    # 6 operations a parameter in a product; 12 layers, 12 heads of 128 elements, 6 for each key.
    dense = make_plan(load_config("78m-dense"), None)
    in_products = 256 * 768 + 12 * (768 * 1024 + 768 * 768 + 2 * 768 * 3072)
    attended = 6 * 12 * 12 * 128 * 1024.5
    assert dense.flops_per_token == pytest.approx(6 * in_products + attended)


def test_names_of_gpus():
    for key, gpu in KNOWN.items():
        assert find_gpu(key.upper().replace("-", " "), None) == find_gpu(gpu.name, None) == gpu
        assert peak_of(gpu.name)
    for other in ("GB200", "H200 NVL", "RTX 3090", "CPU H200", "", "40GB"):
        with pytest.raises(UserError, match="For another GPU give --memory-gib alone"):
            find_gpu(other, None)


def test_a_run_that_does_not_fit_is_refused_with_a_way_out():
    config = seed(micro_batch=32, accumulation=1, global_batch=32)
    why = r"must fit into the 24.0 GiB of NVIDIA H200, got 26.. GiB. It takes 14.. GiB with "
    with pytest.raises(UserError, match=why + "--micro-batch 16 --accumulation 2"):
        check_plan_fits(make_plan(config, find_gpu("h200", 24.0)))
    check_plan_fits(make_plan(config, H200))
    check_plan_fits(make_plan(config, None))
    with pytest.raises(UserError, match="Nothing that trains the same"):
        check_plan_fits(make_plan(config, Gpu("a GPU", 1.0)))


def test_changes_that_need_less_train_the_same():
    model = replace(seed().model, vocab_size=50_257)
    large = seed(model=model, cuda_graphs=False, micro_batch=6, accumulation=1, global_batch=6)
    pieces = {"loss_chunk": 1024}
    single = {"micro_batch": 1, "accumulation": 6, **pieces}
    full = {**single, "checkpointing.policy": "full"}
    assert [differences(large, config) for config in alternatives(large)] == [
        pieces,
        {"micro_batch": 3, "accumulation": 2, **pieces},
        single,
        {**single, "checkpointing.policy": "operators"},
        full,
        {**full, "accumulation": 3, "world_size": 2, "parallel.strategy": "fsdp"},
    ]
    several = alternatives(replace(large, world_size=2, global_batch=12))
    assert [config.world_size for config in several][-2:] == [2, 4]


# --- the command ----------------------------------------------------------------------------------
def test_the_command(capsys):
    words = ["plan", "78m", "--gpu", "h100", "--price-per-gpu-hour", "2"]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert said.startswith("78m, on 1 x NVIDIA H100 80GB HBM3 of 79.2 GiB\n")
    for line in (
        "tokens      409,600,000 = 50,000 steps x 4 sequences x 2,048",
        "saved for backward: attention",
        "time        0:",
        "GPU hours x 2",
    ):
        assert line in said
    assert cli.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cost"] == pytest.approx(found["seconds"] / 1800)
    sizes = found["memory_bytes"]
    assert 2 * sizes["peak"] == sum(sizes.values()) - sizes["needed"]


def test_a_cpu(capsys):
    """Only the state of the model is known there."""
    words = ["plan", "cpu-small", "--gpu", "cpu", "--optim.name", "adamw"]
    assert cli.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory_bytes"]["peak"] == 16 * 990_384  # its parameters
    assert cli.main([*words, "--memory-gib", "0.5"]) == 2
    said = capsys.readouterr()
    assert "at least 1.02 GiB for each process" in said.out
    assert "the run must fit into the 0.5 GiB of CPU, got 1.0 GiB" in said.err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--mfu 2", "--mfu must be at most 1"),
        ("--price-per-gpu-hour 0", "--price-per-gpu-hour must be positive"),
        ("--memory-gib 0.5", "the run must fit into the 0.5 GiB of a GPU"),
        ("--gpu v100", "--gpu must be one of b200, h200, "),
        ("--steps 0", "steps must be positive"),
    ],
)
def test_mistakes(words, why, tmp_path, capsys):
    assert cli.main(["plan", str(write_config(tmp_path)), *words.split()]) == 2
    assert why in capsys.readouterr().err
