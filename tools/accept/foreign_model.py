"""``python -m tools.accept.foreign_model``: the module in another decoder, eager and compiled.

The decoder here uses nothing of the package but :class:`nsa.NativeSparseAttention`. It trains under
``torch.autocast`` with activation checkpointing on batches of many sizes, as it is and through
``torch.compile``. The two must agree within the error that bf16 makes anyway, and after the warm-up
no size may compile anything anew.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.exc import RecompileError
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nsa import NativeSparseAttention, NSAConfig

VOCABULARY = 256
LEAST_GAIN_NATS = 0.5
# The compiled model's distance from fp32 may be so many times the eager model's; that one must be
# small itself.
NOISE_FACTOR, NOISE_FLOOR_NATS, NOISE_CEILING_NATS = 2.0, 2e-3, 0.1


@dataclass(frozen=True)
class Size:
    """A model, and the batches that it trains on.

    Attributes:
        width: of the residual stream.
        num_layers: layers.
        config: pattern of its attention.
        warmup: batch sizes and lengths before compiling is refused: each class of shapes twice.
            PyTorch compiles for a size of 1 apart.
        later: those that follow.
        rounds: how often all of these follow.
    """

    width: int
    num_layers: int
    config: NSAConfig
    warmup: tuple[tuple[int, int], ...]
    later: tuple[tuple[int, int], ...]
    rounds: int


FULL = Size(
    width=512,
    num_layers=2,
    config=NSAConfig(num_heads=8, num_kv_heads=2),
    warmup=((4, 1024), (3, 1536), (2, 640), (1, 1024), (1, 2048), (1, 768)),
    later=((2, 2048), (1, 1280), (6, 512), (3, 1111), (1, 3072), (8, 300), (5, 896), (2, 64)),
    rounds=8,
)
SMALL = Size(
    width=32,
    num_layers=2,
    config=NSAConfig(
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        value_dim=16,
        compress_block_size=8,
        compress_stride=4,
        block_size=16,
        num_selected_blocks=3,
        num_local_blocks=1,
        window_size=16,
    ),
    warmup=((4, 64), (3, 96), (2, 80), (1, 64), (1, 128), (1, 48)),
    later=((2, 128), (1, 100), (5, 33), (3, 77), (1, 60)),
    rounds=6,
)


class Layer(nn.Module):
    """Norm and attention, norm and MLP, with residuals."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(size.width)
        self.attention = NativeSparseAttention(size.width, size.config)
        self.mlp = nn.Sequential(
            nn.LayerNorm(size.width),
            nn.Linear(size.width, 4 * size.width),
            nn.GELU(),
            nn.Linear(4 * size.width, size.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """``x`` ``[B, T, width]`` to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(x)


class Decoder(nn.Module):
    """A byte-level decoder, each of whose layers keeps its input alone."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.num_layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of ``targets`` ``[B, T]``, the bytes that follow ``tokens`` ``[B, T]``.

        They come apart: over a length of T - 1 with T dynamic, the compiler of torch 2.11 fails in
        a layer norm, whatever the attention.
        """
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Outcome:
    """What was found.

    Attributes:
        steps: optimizer steps of each model.
        graphs: graphs that PyTorch compiled.
        graph_breaks: places where it had to leave a graph.
        compilations_after_warmup: sizes after the warm-up that would have compiled anew.
        eager_error_nats: root mean square distance of the eager model's losses from fp32.
        compiled_error_nats: of the compiled model's.
        loss_first: mean loss of the compiled model in the warm-up, nats.
        loss_last: in the last round.
        faults: what failed.
    """

    steps: int
    graphs: int
    graph_breaks: int
    compilations_after_warmup: int
    eager_error_nats: float
    compiled_error_nats: float
    loss_first: float
    loss_last: float
    faults: list[str]


def measure(size: Size, device: torch.device, backend: str) -> Outcome:
    """Train three times from the same weights on the same batches: fp32, bf16, bf16 compiled.

    Args:
        size: model and batches.
        device: where to train.
        backend: of ``torch.compile``.
    """
    torch.manual_seed(0)
    model = Decoder(size).to(device)
    nn.init.normal_(model.embedding.weight, std=0.02)
    batches = make_batches(size, device)
    exact = train(copy.deepcopy(model), batches, autocast=False)
    eager = train(copy.deepcopy(model), batches, autocast=True)
    torch._dynamo.reset()
    counters.clear()
    refused: list[str] = []
    compiled = train(
        copy.deepcopy(model),
        batches,
        autocast=True,
        wrap=lambda module: torch.compile(module, backend=backend),
        fixed_after=len(size.warmup),
        refused=refused,
    )
    return judge(size, exact, eager, compiled, refused)


def make_batches(size: Size, device: torch.device) -> list[Tensor]:
    """Bytes of the package's plays, int64 ``[B, T + 1]``, each batch from another place."""
    folder = files("nsa.train.data") / "corpus"
    plays = sorted((path for path in folder.iterdir() if path.name.endswith(".txt")), key=str)
    text = torch.frombuffer(bytearray(plays[0].read_bytes()), dtype=torch.uint8).long()
    places = torch.Generator().manual_seed(0)
    batches = []
    for batch, length in (*size.warmup, *size.later * size.rounds):
        begins = torch.randint(len(text) - length - 1, (batch,), generator=places)
        batches.append(torch.stack([text[begin : begin + length + 1] for begin in begins]))
    return [batch.to(device) for batch in batches]


def train(
    model: Decoder,
    batches: Sequence[Tensor],
    *,
    autocast: bool,
    wrap: Callable[[nn.Module], Callable[[Tensor, Tensor], Tensor]] = lambda module: module,
    fixed_after: int | None = None,
    refused: list[str] | None = None,
) -> list[float]:
    """Losses of a training, one a batch.

    Args:
        model: its weights change.
        batches: of :func:`make_batches`.
        autocast: whether matrix products are bf16.
        wrap: applied to the model first.
        fixed_after: batches after which compiling anew is an error.
        refused: gets a line for each batch that would have; it is left out, its loss is NaN.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wrapped = wrap(model)
    losses = []
    for number, tokens in enumerate(batches):
        torch._dynamo.config.error_on_recompile = fixed_after is not None and number >= fixed_after
        try:
            with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
                loss = wrapped(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            loss.backward()
        except RecompileError as error:
            assert refused is not None
            reasons = [line.strip("- ") for line in str(error).splitlines() if "  - " in line]
            refused.append(f"{list(tokens.shape)}: {(reasons or [str(error)])[0]}")
            losses.append(math.nan)
            continue
        finally:
            torch._dynamo.config.error_on_recompile = False
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def judge(
    size: Size,
    exact: Sequence[float],
    eager: Sequence[float],
    compiled: Sequence[float],
    refused: Sequence[str],
) -> Outcome:
    """Compare the losses of the three trainings."""
    errors = [distance(losses, exact) for losses in (eager, compiled)]
    first = statistics.fmean(compiled[: len(size.warmup)])
    last = statistics.fmean(compiled[-len(size.later) :])
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    faults = []
    limit = max(NOISE_FACTOR * errors[0], NOISE_FLOOR_NATS)
    if refused:  # the losses of a training with gaps say nothing
        more = "" if len(refused) == 1 else f", and {len(refused) - 1} more"
        faults.append(f"compiled anew for tokens of {refused[0]}{more}")
    elif not errors[0] <= NOISE_CEILING_NATS:
        faults.append(f"bf16 is {errors[0]:.4f} nats from fp32, at most {NOISE_CEILING_NATS}")
    elif not errors[1] <= limit:
        faults.append(f"compiled, it is {errors[1]:.4f} nats from fp32, at most {limit:.4f}")
    elif not first - last >= LEAST_GAIN_NATS:
        faults.append(f"the loss fell by {first - last:.3f} nats, at least {LEAST_GAIN_NATS}")
    return Outcome(
        steps=len(compiled),
        graphs=graphs,
        graph_breaks=breaks,
        compilations_after_warmup=len(refused),
        eager_error_nats=errors[0],
        compiled_error_nats=errors[1],
        loss_first=first,
        loss_last=last,
        faults=faults,
    )


def distance(losses: Sequence[float], exact: Sequence[float]) -> float:
    """Root mean square difference, nats."""
    return math.sqrt(statistics.fmean((a - b) ** 2 for a, b in zip(losses, exact, strict=True)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what was found as JSON; 1 if something failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--small", action="store_true", help="for a CPU")
    options = parser.parse_args(arguments)
    size = SMALL if options.small else FULL
    found = measure(size, torch.device(options.device), options.backend)
    print(json.dumps(asdict(found)))
    return 1 if found.faults else 0


if __name__ == "__main__":
    sys.exit(main())
