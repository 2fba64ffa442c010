"""Memory: nothing is read before it is written, and how much is taken."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.gpu.matrix import MATRIX, seed_case
from tests.ops.poison import poisoned_memory
from tests.ops.public import CHECKS, RUNS, Case
from tests.ops.registration import tensors_of, whole_of

LIMIT_KIB = 12.0  # a token, beyond inputs, outputs, gradients and what is saved for backward
LIMIT_RATIO = 8.4  # of the peak at 1,048,576 tokens to that at 131,072


@pytest.mark.parametrize(
    "name", ["bf16 G6 D64", "bf16 G6 D64 dense", "bf16 G6 D64 fewer queries", "fp32 G6 D64"]
)
@pytest.mark.parametrize("operator", CHECKS)
def test_nothing_is_read_before_it_is_written(operator, name):
    """Buffers start as NaN, integers as nonsense: results are right nevertheless."""
    with poisoned_memory() as count:
        CHECKS[operator](MATRIX[name])
    assert count() > 0 or operator == "statistics"  # which allocates nothing


def storage(x: Tensor) -> tuple[int, int]:
    return x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()


def peak_of(case: Case) -> int:
    """Peak of a step of the whole, whose two directions keep to the limit beyond what stays.

    The forward is measured beyond inputs, output and saved tensors; the backward also beyond the
    gradients.
    """
    torch.cuda.empty_cache()
    function = whole_of(case.config, case.backend)
    tensors, cu_seqlens = tensors_of(case)
    leaves = list(tensors.values())
    dout = case.normal(*tensors["q"].shape)
    known = {storage(y)[0] for y in (*leaves, dout, cu_seqlens)}
    saved: dict[int, int] = {}

    def pack(y: Tensor) -> Tensor:
        where, size = storage(y)
        if where not in known:
            saved[where] = size
        return y

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
        out = function(tensors, cu_seqlens)
    saved.pop(storage(out)[0], None)
    kept = before + storage(out)[1] + sum(saved.values())
    forward = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    grads = torch.autograd.grad(out, leaves, dout)
    backward = torch.cuda.max_memory_allocated()
    assert all(bool(grad.isfinite().all()) for grad in (out, *grads))
    beyond = forward - kept, backward - kept - sum(storage(grad)[1] for grad in grads)
    num_tokens = sum(case.lengths_k)
    kib = [size / num_tokens / 1024 for size in beyond]
    print(
        f"\n{num_tokens:>9,} tokens: forward {kib[0]:6.2f}, backward {kib[1]:6.2f} KiB a token; "
        f"peak {max(forward, backward) / 2**30:7.2f} GiB"
    )
    assert max(kib) <= LIMIT_KIB
    return max(forward, backward)


@pytest.mark.parametrize("tokens", [8192, 32768, 131072])
def test_memory_grows_with_the_tokens(tokens, capsys):
    RUNS["whole"](seed_case(1024))  # workspaces that libraries keep
    with capsys.disabled():
        peak_of(seed_case(tokens))


@pytest.mark.slow
def test_memory_of_a_million_tokens(capsys):
    with capsys.disabled():
        short, long = (peak_of(seed_case(tokens)) for tokens in (131072, 1048576))
        ratio = long / short
        print(f"peak at 1,048,576 over peak at 131,072 tokens: {ratio:.2f}")
    assert ratio <= LIMIT_RATIO
