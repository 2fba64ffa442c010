"""``nsa configs`` and ``nsa doctor``: what the package brings, what is installed."""

from __future__ import annotations

from typing import Literal

from nsa import configs as shipped
from nsa.errors import check


def configs(*, folder: bool = False) -> int:
    """List the configurations that come with the package.

    Commands take them by name, and the YAML files that they are as a start for others.

    Args:
        folder: print the folder of their files alone
    """
    if folder:
        print(shipped.FOLDER)
        return 0
    width = max(map(len, shipped.names()))
    for name in shipped.names():
        print(f"{name:{width}}  {shipped.summary(name)}")
    return 0


def doctor(
    *,
    shape: str | None = None,
    seq: int | None = None,
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16",
) -> int:
    """Check this machine and installation.

    Versions, GPUs and how they are connected, memory, free disk, which implementation of the
    attention operators runs on which device and why, and whether the configurations load. Exit code
    1 if something will not work. For one shape: which kernels run, with which tiles, and why:
      nsa doctor --shape seed --seq 65536

    Args:
        shape: seed, wide, paper or HqxHkvxDxDv: say what runs for it; with --seq
        seq: tokens of the longest sequence, with --shape
        dtype: with --shape
    """
    from nsa.cli.doctor import diagnose

    together = (shape is None) == (seq is None)
    check(together, "nsa doctor", "--shape and --seq", "be given together", (shape, seq))
    return 1 if diagnose(shape, seq or 0, dtype) else 0
