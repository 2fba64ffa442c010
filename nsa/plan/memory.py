"""Memory of a training step, by formulas in the sizes of the model and of a micro-batch.

Small parts are left out; ``tests/plan/test_memory.py`` compares the formulas with measured peaks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from nsa.lm.baseline import parameters_by_part
from nsa.lm.config import LMConfig
from nsa.lm.recomputation import Keeps
from nsa.train.config import TrainConfig
from nsa.train.execution.activations import kept_bytes
from nsa.train.muon import BATCH_ELEMENTS

WEIGHTS, OPTIMIZER, GRADIENTS = "weights", "optimizer", "gradients"
STREAM = "saved for backward: residual stream and norms"
ATTENTION = "saved for backward: attention"
MLP = "saved for backward: MLP"
UPDATE = "matrices that Muon updates"
# cuBLAS has a workspace for each thread and stream that multiplies (on an H200).
WORKSPACE_BYTES = 32 * 2**20
# Log-probabilities, their gradient and that of the logits, fp32.
BYTES_PER_LOGIT = 12
# Of Muon: a square matrix at first and now, the polynomial of its Gram matrix, and their product,
# all in bf16.
BYTES_PER_UPDATED = 8
# What a process takes in addition to its tensors: what the allocator cannot use, and the driver's
# context and the libraries' kernels.
FRAGMENTATION, CONTEXT_BYTES = 0.05, 2**30


@dataclass(frozen=True)
class Footprint:
    """Bytes in tensors when a training step holds most.

    Attributes:
        parts: bytes by what they are for.
        is_all: False where more is held than the parts say.
    """

    parts: dict[str, int]
    is_all: bool = True

    @property
    def peak(self) -> int:
        """All of them."""
        return sum(self.parts.values())

    @property
    def needed(self) -> int:
        """Memory that a GPU must have."""
        return int(self.peak * (1 + FRAGMENTATION)) + CONTEXT_BYTES


def state_memory(config: TrainConfig) -> Footprint:
    """What one process holds whatever a step does: weights, gradients and the optimizer's state.

    That is all that can be said of a CPU, where attention runs as the reference, whose steps depend
    on the data.
    """
    state = _state(config)
    return Footprint({**state, GRADIENTS: state[WEIGHTS]}, is_all=False)


def step_memory(config: TrainConfig) -> Footprint:
    """What one process of a run on GPUs holds when most is held, once the first step is done.

    That is when a layer or the loss runs backward, or in the optimizer's step.
    """
    state, held = _state(config), _in_backward(config)
    moments = [held + _activations(config, at) for at in range(config.model.num_layers + 1)]
    update = Counter({GRADIENTS: state[WEIGHTS]})
    if config.optim.name == "muon":
        update[UPDATE] = BYTES_PER_UPDATED * _updated_together(config.model)
    moments.append(update)
    # One for each thread and stream that multiplies: the program's, autograd's, that of a capture.
    cublas = (3 if config.cuda_graphs else 2) * WORKSPACE_BYTES
    most = max(moments, key=lambda parts: parts.total())
    return Footprint({**state, **most, "cuBLAS": cublas})


@lru_cache
def _parameters(model: LMConfig) -> tuple[int, int]:
    """Numbers of parameters in the layers, and of embedding and head."""
    outside = model.vocab_size * model.width * (1 if model.tie_head else 2)
    return parameters_by_part(model)["total"] - outside, outside


def _state(config: TrainConfig) -> dict[str, int]:
    """Weights and moments of one process: two a parameter, of the matrices of Muon one."""
    (inside, outside), shares = _parameters(config.model), _shares(config)
    moments = (1 if config.optim.name == "muon" else 2) * inside + 2 * outside
    return {WEIGHTS: 4 * (inside + outside) // shares, OPTIMIZER: 4 * moments // shares}


def _updated_together(model: LMConfig) -> int:
    """Elements of the largest batch of matrices that Muon multiplies, at most."""
    pattern = model.nsa
    heads = pattern.num_heads * max(pattern.head_dim, pattern.value_dim)
    alone = model.width * max(model.mlp_hidden_size, heads)
    return max(alone, min(BATCH_ELEMENTS, _parameters(model)[0]))


def _in_backward(config: TrainConfig) -> Counter[str]:
    """What one process holds all through the backward pass of a step's last micro-batch."""
    model, parallel, found = config.model, config.parallel, Counter[str]()
    inside, outside = _parameters(model)
    layer = inside // model.num_layers
    # Those of the micro-batches before, which FSDP holds whole, or what a CUDA graph adds to.
    if config.accumulation > 1 or config.cuda_graphs:
        found[GRADIENTS] = 4 * (inside + outside)
    element = 2 if parallel.gather_dtype == "bf16" else 4
    if config.compute_dtype == "bf16":
        # Copies of fp32 weights; those of layers that are computed again come one at a time, but
        # they are small.
        copied = (element - 2) * inside
        found["weights in bf16"] = 2 * model.vocab_size * model.width + copied
    if _shares(config) > 1:
        # One layer at work and its neighbour, and all the time what belongs to no layer.
        found["gathered weights"] = 4 * outside + 2 * element * layer
        found["gradients that are sent"] = 8 * layer
    elif config.world_size > 1 and not config.cuda_graphs:  # DDP's buckets
        bucket = 6 if parallel.gradient_compression == "bf16" else 4
        found["gradients that are sent"] = bucket * (inside + outside)
    return found


def _activations(config: TrainConfig, layer: int) -> Counter[str]:
    """What the forward pass left and a layer's backward pass makes, the layers above it being done.

    Args:
        config: the run.
        layer: index of the layer; the number of layers for the loss, which comes first.
    """
    model, tokens = config.model, config.micro_batch * config.seq_len
    element = _element(config)
    found = Counter[str]()  # bytes a token
    for below in range(layer):
        found.update(saved_bytes(config, config.checkpointing.keeps(below)))
    logits = 0
    if layer == model.num_layers:
        found[STREAM] += (4 + element) * model.width  # the last norm's
        chunk = min(config.loss_chunk or tokens, tokens)
        logits = (BYTES_PER_LOGIT * chunk + 4 * model.width) * model.vocab_size  # and dW
    else:
        whole = saved_bytes(config, "everything")  # from the forward pass or computed again
        # The gradient of the residual stream; then those inside the MLP, or those of attention,
        # whose turn comes when what the MLP had saved is gone.
        attention = attention_backward_bytes(config) - whole[MLP]
        found.update(whole)
        found["gradients inside a layer"] = 4 * model.width + max(whole[MLP] // 2, attention)
    sizes = {part: size * tokens for part, size in found.items()}
    return Counter({**sizes, "logits and head": logits})


def saved_bytes(config: TrainConfig, keeps: Keeps) -> dict[str, int]:
    """What a layer saves for its backward pass, bytes a token by part.

    Args:
        config: the run.
        keeps: what is not computed again.
    """
    model, pattern, element = config.model, config.model.nsa, _element(config)
    kept = kept_bytes(model, "attention", element)
    stream = kept.pop("input")
    if keeps == "input":
        return {STREAM: stream}
    attention = sum(kept.values())
    if keeps == "attention":
        return {STREAM: stream, ATTENTION: attention}
    keys = element * pattern.num_kv_heads * (pattern.head_dim + pattern.value_dim)
    attention += element * pattern.num_heads * pattern.head_dim + keys
    if model.attention == "nsa":
        # Keys and values of another branch, gates in fp32. Those of the third branch are read as
        # blocks that overlap, which the gradient of a mean does not need.
        overlap = pattern.compress_block_size // pattern.compress_stride
        read = 0 if pattern.phi == "mean" else overlap
        attention += (1 + read) * keys + 12 * pattern.num_heads
    if _is_masked_dense(config):
        attention += _chunk_bytes(config) + 8 * config.seq_len  # heads; the mask in fp32
    # Before and after the activation; with a gate the product too, and without compilation both
    # of its factors.
    results = 2 if model.mlp == "silu" else 3 if config.compile else 4
    # Inputs of attention and MLP, before and after their norms.
    stream = 2 * (4 + element) * model.width
    return {STREAM: stream, ATTENTION: attention, MLP: results * element * model.mlp_hidden_size}


def attention_backward_bytes(config: TrainConfig) -> int:
    """What the backward pass of attention adds to what was saved, bytes a token.

    It writes and reads gradients of its output and its inputs, and scratch: sums of dk and dv in
    fp32 and, of NSA, four rows of dq a query, or of dense attention dq in fp32 and a dk and dv a
    query head.
    """
    pattern = config.model.nsa
    size = _element(config) * (pattern.head_dim + pattern.value_dim)
    keys = 7 if config.model.attention == "nsa" else 1
    heads = (3 * pattern.num_heads + keys * pattern.num_kv_heads) * size
    return heads + (_chunk_bytes(config) if _is_masked_dense(config) else 0)


def _is_masked_dense(config: TrainConfig) -> bool:
    """Whether dense attention takes a mask, as it does for documents in fp32."""
    dense = config.model.attention == "dense" and config.compute_dtype == "fp32"
    return dense and config.data.document_mask


def _chunk_bytes(config: TrainConfig) -> int:
    """Keys and values under a mask, of two chunks and of all query heads: bytes a token."""
    pattern = config.model.nsa
    return 2 * _element(config) * pattern.num_heads * (pattern.head_dim + pattern.value_dim)


def _element(config: TrainConfig) -> int:
    """Bytes of an element of what matrix products give."""
    return 2 if config.compute_dtype == "bf16" else 4


def _shares(config: TrainConfig) -> int:
    """Processes that divide weights, gradients and the optimizer's state among them."""
    return config.world_size if config.parallel.strategy == "fsdp" else 1
