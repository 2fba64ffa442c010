"""The formulas of planned memory beside what PyTorch does on a CPU, and how the parts add up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.lm.model import LanguageModel
from nsa.plan.memory import (
    ATTENTION,
    GRADIENTS,
    MLP,
    OPTIMIZER,
    STREAM,
    UPDATE,
    WEIGHTS,
    saved_bytes,
    step_memory,
)
from nsa.train.config import DataConfig, TrainConfig
from nsa.train.load import load_config
from nsa.train.loss import NextTokenLoss
from nsa.train.optim import ModelOptimizer
from tests.train.cases import MODEL

TOKENS = 65_536
PARAMETERS = 78_601_392
# 32 windows of 2,048 tokens, nothing accumulated, not compiled, no CUDA graphs.
LARGE = {"micro_batch": 32, "accumulation": 1, "global_batch": 32, "compile": False}


def parts(**changes: Any) -> dict[str, int]:
    given = {**LARGE, "cuda_graphs": False, **changes}
    words = {name.replace("__", "."): str(value) for name, value in given.items()}
    return step_memory(load_config("78m", words)).parts


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


def test_parts_of_a_sparse_step():
    """Known by hand: 12 query heads in 2 groups of 64 elements, width 768, 12 layers."""
    found = parts()
    assert (found[WEIGHTS], found[OPTIMIZER]) == (4 * PARAMETERS, 8 * PARAMETERS)
    assert GRADIENTS not in found
    # q, four outputs, keys and values of two branches, gates, statistics, block indices, order.
    attention = 5 * 1536 + 2 * 512 + 144 + 3 * 48 + 2 * 128
    layer = {ATTENTION: attention, MLP: 2 * 2 * 3072, STREAM: 2 * (4 + 2) * 768}
    for part, size in layer.items():
        assert found[part] == 12 * TOKENS * size


def test_gradients_that_wait_are_counted():
    assert parts(accumulation=2, global_batch=64)[GRADIENTS] == 4 * PARAMETERS
    assert parts(cuda_graphs=True)[GRADIENTS] == 4 * PARAMETERS
    for dtype, size in (("none", 4), ("bf16", 6)):
        replica = {"world_size": 2, "global_batch": 64, "parallel__gradient_compression": dtype}
        assert parts(**replica)["gradients that are sent"] == size * PARAMETERS
    small = parts(micro_batch=1, global_batch=1, seq_len=64)  # most is held in the update
    assert small[GRADIENTS] == 4 * PARAMETERS


def test_what_muon_updates_together_is_counted():
    small = {"micro_batch": 1, "global_batch": 1, "seq_len": 64}  # most is held in the update
    assert UPDATE not in parts(**small)
    by_muon = {**small, "optim__name": "muon"}
    assert parts(**by_muon)[UPDATE] == 8 * 2**23
    assert parts(**by_muon, model__mlp_hidden_size=16384)[UPDATE] == 8 * 768 * 16384


@pytest.mark.parametrize(("dtype", "size"), [("fp32", 4), ("bf16", 2)])
def test_what_is_divided_by_fsdp(dtype, size):
    sharded = {"world_size": 4, "parallel__strategy": "fsdp", "parallel__gather_dtype": dtype}
    found = parts(**sharded, global_batch=128)
    assert (found[WEIGHTS], found[OPTIMIZER]) == (PARAMETERS, 2 * PARAMETERS)
    outside = 2 * 256 * 768
    assert found["gathered weights"] == 4 * outside + 2 * size * ((PARAMETERS - outside) // 12)
    waiting = parts(**sharded, accumulation=2, global_batch=256)
    assert (GRADIENTS in found, waiting[GRADIENTS]) == (False, 4 * PARAMETERS)


def test_what_checkpointing_leaves():
    policies = ("none", "every", "operators", "full")
    found = [parts(checkpointing__policy=policy) for policy in policies]
    layer = TOKENS * 2 * 2 * 3072
    assert [one[MLP] // layer for one in found] == [12, 7, 1, 1]  # one is computed again
    none, _, operators, full = (one[ATTENTION] for one in found)
    assert full < operators < none
    assert found[-1][STREAM] == TOKENS * 768 * (11 * 4 + 2 * (4 + 2))


@pytest.mark.parametrize(("chunk", "positions"), [(0, TOKENS), (1024, 1024)])
def test_logits(chunk, positions):
    large = {"model__vocab_size": 50_257, "data__tokenizer": "gpt2"}
    logits = parts(**large, loss_chunk=chunk)["logits and head"]
    assert logits == (12 * positions + 4 * 768) * 50_257
