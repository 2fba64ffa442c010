"""``python -m tools.compile_only``: compile every kernel for every architecture, and list what needs too much."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from tools.compile_only.driver import SHARED_MEMORY_LIMIT
from tools.compile_only.survey import part_of_matrix, whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, list kernels with stack and those that need too much; 1 if there are any of the latter."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--arch",
        type=int,
        nargs="+",
        choices=[*SHARED_MEMORY_LIMIT],
        default=[*SHARED_MEMORY_LIMIT],
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--all", action="store_true", help="list kernels that need no stack too")
    options = parser.parse_args(arguments)
    start, count, faults = time.monotonic(), 0, []
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        parts = [
            pool.submit(part_of_matrix, arch, number)
            for arch in options.arch
            for number in range(len(whole()))
        ]
        for number, part in enumerate(as_completed(parts), start=1):
            records = part.result()
            count += len(records)
            faults += [fault for record in records if (fault := record.fault(lenient=True))]
            for record in records:
                if record.usage.stack or options.all:
                    print(record)
            print(
                f"{number} of {len(parts)} parts, {count} kernels, {time.monotonic() - start:.0f} s",
                flush=True,
            )
    print(*faults, f"{len(faults)} of {count} kernels need too much", sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
