"""``python -m tools.compile_only``: compile every kernel for every architecture."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from nsa.errors import check
from tools.command import run
from tools.compile_only.driver import SHARED_MEMORY_LIMIT
from tools.compile_only.survey import part_of_matrix, whole


def survey(
    *,
    arch: tuple[int, ...] = tuple(SHARED_MEMORY_LIMIT),
    jobs: int = 2,
    all: bool = False,
) -> int:
    """Compile every kernel for GPUs that are not present, and list those that need a look.

    Listed are kernels that need stack, and those whose matrix products the assembler serialized
    (its advisories C7510 to C7515).

    Exit code 1 if a kernel needs too much stack or shared memory.

    Args:
        arch: compute capabilities, two or three digits
        jobs: processes
        all: list all kernels
    """
    known = ", ".join(map(str, SHARED_MEMORY_LIMIT))
    check(SHARED_MEMORY_LIMIT.keys() >= {*arch}, "compile_only", "--arch", f"be of {known}", arch)
    start, count, faults = time.monotonic(), 0, list[str]()
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        numbers = range(len(whole()))
        parts = [pool.submit(part_of_matrix, one, number) for one in arch for number in numbers]
        for number, part in enumerate(as_completed(parts), start=1):
            records = part.result()
            count += len(records)
            faults += [fault for record in records if (fault := record.fault(lenient=True))]
            print(
                *(
                    record
                    for record in records
                    if record.usage.stack or record.usage.advisories or all
                ),
                sep="\n",
            )
            passed = f"{count} kernels, {time.monotonic() - start:.0f} s"
            print(f"{number} of {len(parts)} parts, {passed}", flush=True)
    print(*faults, f"{len(faults)} of {count} kernels need too much", sep="\n")
    return 1 if faults else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    return run("compile_only", survey, arguments)


if __name__ == "__main__":
    sys.exit(main())
