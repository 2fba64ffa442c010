"""Programs that share work, of which the last to arrive finishes it."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def is_last(counter_ptr, programs):
    """Whether this program is the last of ``programs`` to arrive; the counter is 0 again then.

    What the others have written before is visible to the last.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.store(counter_ptr, 0)
    tl.debug_barrier()
    return last
