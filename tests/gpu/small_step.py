"""Every operator once, forward and backward, on a small batch: what compute-sanitizer watches."""

from __future__ import annotations

import dataclasses

import torch

from tests.gpu.matrix import MATRIX
from tests.ops.public import RUNS, check_choice, check_combine, check_compress, check_split


def main() -> None:
    """Run the case of the seed shape, and one in fp32 whose heads fill no tile."""
    for name in ("bf16 G6 D64", "fp32 G3 D16 l'=32"):
        case = dataclasses.replace(MATRIX[name], lengths_k=(130, 1, 0, 77))
        for run in RUNS.values():
            run(case)
        for check in (check_choice, check_compress, check_combine, check_split):
            check(case)
    torch.cuda.synchronize()
    print("all ran")


if __name__ == "__main__":
    main()
