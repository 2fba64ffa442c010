"""``python -m tools.compile_only``: compile every kernel for every architecture."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from tools.compile_only.driver import SHARED_MEMORY_LIMIT
from tools.compile_only.survey import part_of_matrix, whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile every kernel for GPUs that are not present, and list those that need stack.

    1 if one needs too much.
    """
    parser = argparse.ArgumentParser(prog="python -m tools.compile_only", description=main.__doc__)
    known = [*SHARED_MEMORY_LIMIT]
    parser.add_argument("--arch", nargs="+", type=int, choices=known, default=known)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args(arguments)
    count, faults, parts = 0, list[str](), range(len(whole()))
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(part_of_matrix, x, part) for x in options.arch for part in parts]
        for number, future in enumerate(as_completed(futures), start=1):
            for record in future.result():
                count += 1
                faults += filter(None, [record.fault(lenient=True)])
                if record.usage.stack:
                    print(record)
            print(f"{number} of {len(futures)} parts, {count} kernels", flush=True)
    print(*faults, f"{len(faults)} of {count} kernels need too much", sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
