"""Rotary position embedding (Su et al., arXiv:2104.09864), half-split layout, angles in fp32."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.config import NSAConfig, RopeScaling
from nsa.errors import check, fail
from nsa.fields import AsText


@dataclass(frozen=True)
class Rope(AsText):
    """Rotation of queries and keys.

    Attributes:
        dim: leading part of a head that is rotated, even.
        theta: base of the frequencies.
        scaling: stretching for long sequences, or None.
        position_offset: added to every position; by the shift invariance of rotary attention it
            changes no output.
    """

    dim: int
    theta: float = 10_000.0
    scaling: RopeScaling | None = None
    position_offset: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.theta > 1, "theta", "be above 1", self.theta)

    @classmethod
    def from_config(cls, config: NSAConfig) -> Rope:
        """Rotation of a layer with this config."""
        return cls(
            config.head_dim if config.rotary_dim is None else config.rotary_dim,
            config.rope_theta,
            config.rope_scaling,
        )

    def inverse_frequencies(self, device: torch.device, dim: int | None = None) -> Tensor:
        """Radians per position, fp32 ``[dim / 2]``, scaling included; ``dim`` replaces its own."""
        dim = self.dim if dim is None else dim
        index = torch.arange(dim // 2, dtype=torch.float64, device=device)
        frequency = self.theta ** (-2.0 * index / dim)
        scaling = self.scaling
        if scaling is not None and scaling.kind == "linear":
            frequency = frequency / scaling.factor
        elif scaling is not None and scaling.kind == "llama3":
            rotations = scaling.original_max_position * frequency / (2 * math.pi)
            kept = (rotations - scaling.beta_slow) / (scaling.beta_fast - scaling.beta_slow)
            kept = kept.clamp(0, 1)
            frequency = frequency * kept + frequency / scaling.factor * (1 - kept)
        elif scaling is not None:
            low = math.floor(self._yarn_index(scaling.beta_fast, scaling, dim))
            high = math.ceil(self._yarn_index(scaling.beta_slow, scaling, dim))
            ramp = ((index - max(low, 0)) / max(high - max(low, 0), 1)).clamp(0, 1)
            frequency = frequency * (1 - ramp) + frequency / scaling.factor * ramp
        return frequency.float()

    @property
    def magnitude(self) -> float:
        """Factor on cosine and sine: YaRN's attention temperature, otherwise 1."""
        if self.scaling is None or self.scaling.kind != "yarn":
            return 1.0
        return 0.1 * math.log(self.scaling.factor) + 1.0

    def _yarn_index(self, rotations: float, scaling: RopeScaling, dim: int) -> float:
        """Frequency index with ``rotations`` rotations within the original length.

        arXiv:2309.00071, section 3.2.
        """
        ratio = scaling.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(self.theta))


_TABLES: dict[tuple[str, torch.device, int], Tensor] = {}


def frequency_table(rope: Rope, device: torch.device, dim: int | None = None) -> Tensor:
    """``rope.inverse_frequencies`` for kernels, made once per device.

    The first call waits for the copy; after that all streams may read the table. During the capture
    of a CUDA graph, which cannot wait, each call makes its own table. A separate thread makes it:
    ``torch.compile`` would overwrite memory that the calling thread allocates before a capture.
    """
    dim = rope.dim if dim is None else dim
    table = _TABLES.get((rope.text, device, dim))
    if table is not None:
        return table
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return rope.inverse_frequencies(device, dim)
    with ThreadPoolExecutor(1) as other:
        table = other.submit(_make_table, rope, device, dim).result()
    _TABLES[rope.text, device, dim] = table
    return table


def _make_table(rope: Rope, device: torch.device, dim: int) -> Tensor:
    return rope.inverse_frequencies(torch.device("cpu"), dim).to(device)


def apply_rope(x: Tensor, positions: Tensor, rope: Rope, dim: int | None = None) -> Tensor:
    """Rotate every head of ``x`` by its token's position.

    Args:
        x: queries or keys ``[..., H, D]``, any float dtype.
        positions: integer position of each token, shape ``[...]`` of ``x`` without its last two
            dimensions.
        rope: the rotation.
        dim: rotated leading part of a head, at most D; None means ``rope.dim``.

    Returns:
        ``x`` rotated, same shape and dtype. Angles are fp32, the rotation itself is fp32 (fp64 for
        fp64 ``x``).

    Raises:
        ValueError: the shapes do not match.
    """
    if positions.shape != x.shape[:-2]:
        fail("positions", f"have shape {tuple(x.shape[:-2])}", tuple(positions.shape))
    dim = rope.dim if dim is None else dim
    rule = f"have an even dim of at most the head size ({x.shape[-1]})"
    check(dim <= x.shape[-1] and dim % 2 == 0, "rope", rule, dim)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    position = (positions + rope.position_offset).float()
    angle = position[..., None] * rope.inverse_frequencies(x.device, dim)
    cos = (angle.to(dtype).cos() * rope.magnitude)[..., None, :]  # [..., 1, dim / 2]
    sin = (angle.to(dtype).sin() * rope.magnitude)[..., None, :]
    first, second = x[..., :dim].to(dtype).chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(
        x.dtype
    )
    return torch.cat((rotated, x[..., dim:]), dim=-1)
