"""Linear layers of a decode step, fused with RMSNorm before and SiLU and residual after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nsa.errors import check
from nsa.ops._backend import choose_backend
from nsa.ops._plan import once, planned
from nsa.ops._register import guarded

if TYPE_CHECKING:
    from nsa.ops._triton.kernel import Launch

# Row-by-row kernel: maximum number of rows here; weights (``MOST_HELD``) and columns (``COLUMNS``)
# per program below.
FEW_ROWS = 4
# Maximum number of rows for the kernels, which read the weights once per 64 rows.
MOST_ROWS = 256
MOST_HELD = 16_384
COLUMNS = 4


@dataclass(frozen=True)
class Linear:
    """Linear layer without bias, fused with the operations around it in a decoder.

    Attributes:
        weight: ``[N, K]``, contiguous; x is multiplied in its dtype. A kernel for few rows may read
            it, and ``gate``, before the previous kernel has ended, which must not write them.
        gate: a second weight ``[N, K]``: the result is ``silu(x gate) * (x weight)``.
        eps: epsilon of an RMSNorm of x, whose weight is folded into ``weight`` and ``gate``. None
            disables the norm.
        silu: whether SiLU is applied to the product.
    """

    weight: Tensor
    gate: Tensor | None = None
    eps: float | None = None
    silu: bool = False

    @classmethod
    def behind(
        cls,
        norm: nn.RMSNorm,
        weight: Tensor,
        gate: Tensor | None = None,
        *,
        dtype: torch.dtype,
        silu: bool = False,
    ) -> Linear:
        """The layer after a norm, as copies of its weights in a dtype with the norm folded in."""
        factor = norm.weight.detach()
        both = [x if x is None else (x.detach() * factor).to(dtype) for x in (weight, gate)]
        assert both[0] is not None
        return cls(both[0], both[1], norm.eps or 0.0, silu)

    @torch.no_grad()
    def __call__(
        self, x: Tensor, residual: Tensor | None = None, *, backend: str = "auto"
    ) -> Tensor:
        """Apply the layer.

        Args:
            x: ``[M, K]``.
            residual: ``[M, N]``, added at the end; the result may overwrite its memory.
            backend: ``auto``, ``reference`` or ``triton``; PyTorch runs more than 256 rows.

        Returns:
            ``[M, N]`` in the dtype of ``residual``, or of ``weight`` without it. Accumulation is in
            fp32, fp64 for fp64 weights.

        Raises:
            ValueError: x does not match the weight.
        """
        width = self.weight.shape[1]
        fits = x.ndim == 2 and x.shape[1] == width
        check(fits, "x", f"have shape [M, {width}]", tuple(x.shape))
        backend = choose_backend(backend, self.weight, "weight")
        if backend == "triton" and x.shape[0] <= MOST_ROWS:
            weights = (self.weight, self.gate)
            y: Tensor = _launch(x.contiguous(), *weights, residual, self.eps, self.silu)
            return y
        return self._multiply(x, residual)

    def _multiply(self, x: Tensor, residual: Tensor | None) -> Tensor:
        functional, dtype = torch.nn.functional, self.weight.dtype
        if self.eps is not None:
            wide = x.to(torch.promote_types(x.dtype, dtype))
            x = functional.rms_norm(wide, wide.shape[-1:], eps=self.eps)
        x = x.to(dtype)
        is_plain = self.gate is None and not self.silu
        if residual is not None and residual.dtype == dtype and is_plain:
            return residual.addmm_(x, self.weight.t())
        y = functional.linear(x, self.weight)
        if self.gate is not None:
            y = functional.silu(functional.linear(x, self.gate)) * y
        elif self.silu:
            y = functional.silu(y)
        return y if residual is None else residual + y.to(residual.dtype)


@guarded
@planned
def _launch(
    x: Tensor,
    weight: Tensor,
    gate: Tensor | None,
    residual: Tensor | None,
    eps: float | None,
    silu: bool,
) -> Tensor:
    (rows, _), columns = x.shape, weight.shape[0]
    dtype = weight.dtype if residual is None else residual.dtype
    out = torch.empty(rows, columns, dtype=dtype, device=x.device)
    if rows:
        is_few, launch = once(lambda: _plan(x, weight, gate, eps, silu))
        launch(x, weight, gate, residual, out, *(() if is_few else (rows,)), eps or 0.0)
    return out


def _plan(
    x: Tensor, weight: Tensor, gate: Tensor | None, eps: float | None, silu: bool
) -> tuple[bool, Launch]:
    """Whether the kernel for few rows runs, and the launch of the chosen kernel."""
    from nsa.ops._layout import cdiv, next_power_of_2
    from nsa.ops._triton.kernel import Launch, starts_early
    from nsa.ops.linear.kernels import linear_kernel, linear_rows_kernel

    (rows, width), columns = x.shape, weight.shape[0]
    constants = {"N": columns, "K": width, "NORMALISE": eps is not None, "SILU": silu}
    constants["launch_pdl"] = starts_early(x)
    block_k = max(next_power_of_2(width), 16)
    if rows <= FEW_ROWS and block_k <= MOST_HELD:
        block_n = max(min(COLUMNS, MOST_HELD // block_k) // (1 if gate is None else 2), 1)
        return True, Launch(
            linear_rows_kernel,
            (cdiv(columns, block_n),),
            ROWS=rows,
            **constants,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            num_warps=8 if block_n * block_k > MOST_HELD // 2 else 4,
        )
    is_small, is_gated = weight.element_size() == 2, gate is not None
    block_m = min(max(16, next_power_of_2(rows)), 64 if is_small else 16)
    block_n = 16  # many small programs rather than a split over K
    return False, Launch(
        linear_kernel,
        (cdiv(columns, block_n), cdiv(rows, block_m)),
        **constants,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=min(block_k, 128 if is_small and not is_gated else 64),
        num_warps=4,
        num_stages=(6 if is_gated else 4) if is_small else 3,
    )
