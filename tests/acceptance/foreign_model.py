"""Training of the module in another decoder, eager and compiled.

The decoder uses only :class:`nsa.NativeSparseAttention` of the package. It trains under
``torch.autocast`` with activation checkpointing on batches of many shapes, eager and with
``torch.compile``. Losses must agree within the error of bf16, and no shape after the warm-up may
cause another compilation.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Sequence

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nsa import NativeSparseAttention, NSAConfig
from nsa.train.data.documents import corpus_files
from tests.acceptance.checks import MIN_GAIN_NATS

VOCABULARY = 256
# The error of the compiled model relative to fp32 may be twice that of the eager model, which must
# be small itself.
NOISE_FACTOR, NOISE_FLOOR_NATS, NOISE_CEILING_NATS = 2.0, 2e-3, 0.1


WIDTH, NUM_LAYERS, CONFIG = 512, 2, NSAConfig(num_heads=8, num_kv_heads=2)
# Batch sizes and lengths that may compile: each class of shapes twice. PyTorch compiles separately
# for a size of 1. Those after the warm-up come eight times.
WARMUP = ((4, 1024), (3, 1536), (2, 640), (1, 1024), (1, 2048), (1, 768))
LATER = ((2, 2048), (1, 1280), (6, 512), (3, 1111), (1, 3072), (8, 300), (5, 896), (2, 64))
ROUNDS = 8

# Measured fields of the row, notes, and faults.
Found = tuple[dict[str, float], list[str], list[str]]


class Layer(nn.Module):
    """Norm and attention, norm and MLP, with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = NativeSparseAttention(WIDTH, CONFIG)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[B, T, width]`` to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(x)


class Decoder(nn.Module):
    """Byte-level decoder whose layers store only their input for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of ``targets``, the bytes that follow ``tokens``, both ``[B, T]``.

        Two arguments, because with a dynamic length T - 1 the compiler of torch 2.11 fails in a
        layer norm, with any attention.
        """
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def measure() -> Found:
    """Train three times from the same weights on the same batches: fp32, bf16, bf16 compiled."""
    torch.manual_seed(0)
    model = Decoder().cuda()
    nn.init.normal_(model.embedding.weight, std=0.02)
    batches = make_batches()
    losses, graphs = [], list[int]()
    for autocast, compiled in ((False, False), (True, False), (True, True)):
        torch._dynamo.reset()
        counters.clear()
        found, graphs = train(copy.deepcopy(model), batches, autocast, compiled)
        losses.append(found)
    numbers = range(len(WARMUP), len(batches))
    recompiled = [list(batches[i].shape) for i in numbers if graphs[i] > graphs[i - 1]]
    return judge(losses, recompiled)


def make_batches() -> list[Tensor]:
    """Random byte sequences from the package's plays, int64 ``[B, T + 1]``."""
    play = next(iter(corpus_files().documents)).text
    text = torch.frombuffer(bytearray(play), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    batches = []
    for batch, length in (*WARMUP, *LATER * ROUNDS):
        begins = torch.randint(len(text) - length - 1, (batch,), generator=generator)
        batches.append(torch.stack([text[begin : begin + length + 1] for begin in begins]))
    return [batch.cuda() for batch in batches]


def train(
    model: Decoder, batches: Sequence[Tensor], autocast: bool, compiled: bool
) -> tuple[list[float], list[int]]:
    """Train a model in place.

    Args:
        model: the model.
        batches: see :func:`make_batches`.
        autocast: whether matrix products run in bf16.
        compiled: whether the model is compiled.

    Returns:
        Loss of each batch, and the number of graphs compiled so far.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    forward = torch.compile(model) if compiled else model
    losses, graphs = [], []
    for tokens in batches:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = forward(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        graphs.append(counters["stats"]["unique_graphs"])
    return losses, graphs


def judge(losses: Sequence[Sequence[float]], recompiled: Sequence[list[int]]) -> Found:
    """Compare the losses in fp32, in bf16, and in bf16 compiled; see :func:`measure`."""
    exact, eager, compiled = losses
    errors = [
        math.sqrt(statistics.fmean((a - b) ** 2 for a, b in zip(x, exact, strict=True)))
        for x in (eager, compiled)
    ]
    first = statistics.fmean(compiled[: len(WARMUP)])
    last = statistics.fmean(compiled[-len(LATER) :])
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    faults, limit = [], max(NOISE_FACTOR * errors[0], NOISE_FLOOR_NATS)
    if recompiled:
        faults.append(f"{len(recompiled)} recompilations, the first for tokens {recompiled[0]}")
    if not errors[0] <= NOISE_CEILING_NATS:
        faults.append(f"bf16 is {errors[0]:.4f} nats from fp32, at most {NOISE_CEILING_NATS}")
    elif not errors[1] <= limit:
        faults.append(f"compiled, it is {errors[1]:.4f} nats from fp32, at most {limit:.4f}")
    elif not first - last >= MIN_GAIN_NATS:
        faults.append(f"the loss fell by {first - last:.3f} nats, at least {MIN_GAIN_NATS}")
    figures = {"compilations_after_5": len(recompiled), "loss_first": first, "loss_last": last}
    remarks = [
        f"{len(compiled)} steps, {graphs} graphs, {breaks} graph breaks",
        f"distance from fp32: eager {errors[0]:.5f} nats, compiled {errors[1]:.5f}",
    ]
    return figures, remarks, faults
