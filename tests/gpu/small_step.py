"""Every kernel, forward and backward, on small batches: the program for compute-sanitizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from triton import JITFunction

from nsa.ops._plan import PLANS
from nsa.ops._triton.kernel import Kernel
from nsa.ops.linear import Linear
from tests.gpu.matrix import MATRIX
from tests.ops.decoding import Decoded
from tests.ops.public import CHECKS, RUNS, Case, check_compress, check_selection
from tools.compile_only.launches import jitted_functions, reached_from


@contextmanager
def noted_launches() -> Iterator[set[JITFunction[Any]]]:
    """The kernels that are launched within the block; plans made before are forgotten."""
    for plans in PLANS:
        plans.clear()
    launched: set[JITFunction[Any]] = set()
    real = Kernel.run

    def note(kernel: JITFunction[Any], *arguments: Any, **options: Any) -> Any:
        launched.add(kernel)
        return real(kernel, *arguments, **options)

    with mock.patch.object(Kernel, "run", note):
        yield launched


def main() -> None:
    """Run the seed shape, a case in fp32 whose heads fill no tile, and all other kernels once.

    Raises:
        AssertionError: a kernel was left out.
    """
    short = (130, 1, 0, 77)
    seed = dataclasses.replace(MATRIX["bf16 G6 D64"], lengths_k=short)
    with noted_launches() as launched:
        for case in (seed, dataclasses.replace(MATRIX["fp32 G3 D16 l'=32"], lengths_k=short)):
            for name, check in CHECKS.items():
                RUNS[name](case) if name in RUNS else check(case)
        for phi in ("linear", "mlp"):
            check_compress(
                dataclasses.replace(seed, config=dataclasses.replace(seed.config, phi=phi))
            )
        # More than 512 queries see a compressed key: sums of chunks.
        longer = dataclasses.replace(seed, lengths_k=(1100,))
        RUNS["compressed"](longer)
        two_stages = {"coarse_block_size": 256, "num_coarse_blocks": 3, "num_local_blocks": 1}
        for changes in (two_stages, {"score_precision": "fp8"}):
            check_selection(
                dataclasses.replace(longer, config=dataclasses.replace(seed.config, **changes))
            )
        for phi in ("linear", "mlp"):
            changed: Any = {"phi": phi}
            config = dataclasses.replace(seed.config, **changed)
            Decoded.of(Case(config, (3, 300), (2, 2), dtype=seed.dtype, device=seed.device)).check()
        layer = Linear(torch.ones(50, 100, device=seed.device))
        for rows in (3, 20):
            layer(torch.ones(rows, 100, device=seed.device))
        torch.cuda.synchronize()
    left_out = {function.__name__ for function in jitted_functions() - reached_from(launched)}
    assert not left_out, left_out
    print("all ran")


if __name__ == "__main__":
    main()
