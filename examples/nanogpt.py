"""A small GPT with sparse attention, trained on the bytes of Shakespeare's plays.

python -m examples.nanogpt    # about a minute on a CPU; writes nanogpt.pt
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nsa
from nsa import NativeSparseAttention, NSACache, NSAConfig

SEQ_LEN = 256
VOCAB_SIZE = 256  # bytes

# Blocks are small because sequences are. The defaults suit sequences of 8,192 tokens and more.
CONFIG = NSAConfig(
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    value_dim=32,
    compress_block_size=16,
    compress_stride=8,
    block_size=16,
    num_selected_blocks=8,
    window_size=64,
    share_kv=True,
    gate_bias=2.0,
)


class Block(nn.Module):
    """Attention and MLP, each after a norm and added to the residual stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = NativeSparseAttention(width, CONFIG)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, cache: nsa.LayerCache | None = None) -> Tensor:
        """Return the new residual stream, ``[B, T, width]``."""
        x = x + self.attention(self.norm1(x), cache=cache)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Decoder language model. Attention rotates queries and keys, so positions need no embedding.

    Args:
        width: size of the residual stream.
        num_layers: number of blocks.
    """

    def __init__(self, width: int = 128, num_layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCAB_SIZE, bias=False)

    def forward(self, tokens: Tensor, cache: NSACache | None = None) -> Tensor:
        """Return logits ``[B, T, VOCAB_SIZE]``; with a cache, ``tokens`` follow the cached ones."""
        x = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, None if cache is None else cache.layers[i])
        return self.head(self.norm(x))


def read_text() -> Tensor:
    """Bytes of the plays in the package, ``[N]`` int64."""
    files = sorted((Path(nsa.__file__).parent / "train/data/corpus").glob("*.txt"))
    return torch.tensor(list(b"".join(file.read_bytes() for file in files)))


def main(steps: int = 250, batch_size: int = 2, path: str = "nanogpt.pt") -> float:
    """Train, write the weights, and return the last loss in nats a byte."""
    torch.manual_seed(0)
    text, model = read_text(), GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(1, steps + 1):
        starts = torch.randint(len(text) - SEQ_LEN, (batch_size,))
        batch = torch.stack([text[start : start + SEQ_LEN + 1] for start in starts.tolist()])
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == steps:
            print(f"step {step}: loss {loss.item():.3f} nats a byte")
    torch.save(model.state_dict(), path)
    return loss.item()


if __name__ == "__main__":
    main()
