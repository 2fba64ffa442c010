"""Linear layers of a decode step: normalisation before, SiLU and residual behind, in one launch."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nsa.errors import check
from nsa.ops._backend import choose_backend
from nsa.ops._register import guarded

# Rows up to which a program multiplies the weights that it holds row by row; how many of these it
# holds, and of how many columns.
FEW_ROWS = 8
MOST_HELD = 16_384
COLUMNS = 4
# Programs that a GPU runs at once, near enough.
PROGRAMS = 2 * 132


@dataclass(frozen=True)
class Linear:
    """A linear layer without bias, and what a decoder does before and behind it.

    Attributes:
        weight: ``[N, K]``, contiguous; in its dtype x is multiplied.
        gate: a second weight ``[N, K]``: the result is ``silu(x gate) * (x weight)``.
        norm: weight ``[K]`` of an RMSNorm of x; None: x is taken as it is.
        eps: constant inside the RMSNorm.
        silu: whether SiLU is applied to the product.
        counters: int32 zeros of kernels whose programs share K.
    """

    weight: Tensor
    gate: Tensor | None = None
    norm: Tensor | None = None
    eps: float = 0.0
    silu: bool = False
    counters: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        zeros = torch.zeros(PROGRAMS, dtype=torch.int32, device=self.weight.device)
        object.__setattr__(self, "counters", zeros)

    @torch.no_grad()
    def __call__(
        self, x: Tensor, residual: Tensor | None = None, *, backend: str = "auto"
    ) -> Tensor:
        """Apply it.

        Args:
            x: ``[M, K]``.
            residual: ``[M, N]``, added at the end.
            backend: ``auto``, ``reference`` or ``triton``. The kernels are for few rows: the
                weights are read once for 64 of them.

        Returns:
            ``[M, N]`` in the dtype of ``residual``, without it in that of ``weight``. Sums are
            fp32, fp64 for fp64 weights.

        Raises:
            ValueError: x does not fit the weight.
        """
        width = self.weight.shape[1]
        fits = x.ndim == 2 and x.shape[1] == width
        check(fits, "Linear", "x", f"have shape [M, {width}]", tuple(x.shape))
        if choose_backend("Linear", backend, self.weight, "weight") == "triton":
            out: Tensor = _launch(x.contiguous(), self, residual)
            return out
        return self._reference(x, residual)

    def _reference(self, x: Tensor, residual: Tensor | None) -> Tensor:
        functional = torch.nn.functional
        if self.norm is not None:
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            x = functional.rms_norm(wide, wide.shape[-1:], self.norm.to(wide.dtype), self.eps)
        x = x.to(self.weight.dtype)
        y = functional.linear(x, self.weight)
        if self.gate is not None:
            y = functional.silu(functional.linear(x, self.gate)) * y
        elif self.silu:
            y = functional.silu(y)
        return y if residual is None else residual + y.to(residual.dtype)


@guarded
def _launch(x: Tensor, layer: Linear, residual: Tensor | None) -> Tensor:
    from nsa.ops._triton.sizes import cdiv, next_power_of_2
    from nsa.ops.linear.kernels import linear_kernel, linear_rows_kernel

    weight, (rows, width) = layer.weight, x.shape
    columns = weight.shape[0]
    dtype = weight.dtype if residual is None else residual.dtype
    out = torch.empty(rows, columns, dtype=dtype, device=x.device)
    if not rows:
        return out
    sizes = {"N": columns, "K": width, "SILU": layer.silu}
    block_k = max(next_power_of_2(width), 16)
    if rows <= FEW_ROWS and block_k <= MOST_HELD:
        block_n = max(min(COLUMNS, MOST_HELD // block_k) // (1 if layer.gate is None else 2), 1)
        linear_rows_kernel[(cdiv(columns, block_n),)](
            x,
            weight,
            layer.gate,
            layer.norm,
            residual,
            out,
            layer.eps,
            ROWS=rows,
            **sizes,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            num_warps=8 if block_n * block_k > MOST_HELD // 2 else 4,
        )
        return out
    is_small = weight.element_size() == 2
    block_m = min(max(16, next_power_of_2(rows)), 64 if is_small else 16)
    block_n, block_k = 16, min(block_k, (256 if block_m == 16 else 128) if is_small else 64)
    grid = cdiv(columns, block_n), cdiv(rows, block_m)
    splits = 1
    if layer.norm is None and layer.gate is None:
        # A program for each multiprocessor, twice, but each with work for some steps.
        splits = max(min(layer.counters.numel() // (grid[0] * grid[1]), cdiv(width, 512)), 1)
    partial = torch.empty(
        (splits, rows, columns) if splits > 1 else 0, dtype=torch.float32, device=x.device
    )
    linear_kernel[(*grid, splits)](
        x,
        weight,
        layer.gate,
        layer.norm,
        residual,
        partial,
        layer.counters,
        out,
        rows,
        layer.eps,
        **sizes,
        SPLITS=splits,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=4,
        num_stages=4 if is_small else 3,
    )
    return out
