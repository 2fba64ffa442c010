"""Configuration of the decoder language model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from nsa.config import NSAConfig
from nsa.errors import check_at_most, check_positive
from nsa.fields import settle


@dataclass(frozen=True)
class LMConfig:
    """A decoder language model: RMSNorm, rotary positions, NSA or dense attention, an MLP.

    Attributes:
        vocab_size: tokens in the vocabulary.
        width: size of the residual stream.
        num_layers: decoder layers.
        attention: ``nsa``, or ``dense`` for causal softmax attention through PyTorch's SDPA.
        nsa: the sparse pattern; ``dense`` uses its heads, head sizes and rotary settings.
        mlp: ``silu`` (two matrices) or ``swiglu`` (three; Shazeer, arXiv:2002.05202).
        mlp_hidden_size: hidden size of the MLP.
        tie_head: whether the output head is the embedding matrix.
        norm_eps: constant inside RMSNorm.
        init_std: standard deviation of the initial weights; divided by sqrt(2 * num_layers) for
            output projections, and smaller for the head of a wide model, so that the first loss is
            near ln(vocab_size).
    """

    vocab_size: int = 256
    width: int = 768
    num_layers: int = 12
    attention: Literal["nsa", "dense"] = "nsa"
    nsa: NSAConfig = field(default_factory=NSAConfig)
    mlp: Literal["silu", "swiglu"] = "silu"
    mlp_hidden_size: int = 3072
    tie_head: bool = False
    norm_eps: float = 1e-6
    init_std: float = 0.02

    def __post_init__(self) -> None:
        settle(self)
        # Larger sizes are mistakes, and their products would overflow 64 bits.
        check_at_most(self, 2**24, "vocab_size", "width", "mlp_hidden_size")
        check_at_most(self, 1000, "num_layers")
        check_positive(self, "vocab_size", "width", "num_layers", "mlp_hidden_size")
        check_positive(self, "norm_eps", "init_std")
