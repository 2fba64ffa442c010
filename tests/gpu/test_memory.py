"""Memory: nothing is read before it is written, and how much is taken."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from tests.gpu.matrix import MATRIX, seed_case
from tests.ops.checks import CHECKS
from tests.ops.poison import poisoned_memory
from tests.ops.public import Case
from tests.ops.registration import tensors_of, whole_of

LIMIT_KIB = 12.0  # a token, beyond inputs, outputs, gradients and what is saved for backward
LIMIT_RATIO = 8.4  # of the peak at 1,048,576 tokens to that at 131,072


@pytest.mark.parametrize(
    "name", ["bf16 G6 D64", "bf16 G6 D64 dense", "bf16 G6 D64 fewer queries", "fp32 G6 D64"]
)
@pytest.mark.parametrize("operator", CHECKS)
def test_nothing_is_read_before_it_is_written(operator, name):
    """Buffers start as NaN, integers as nonsense: results are still right, also where nothing needs computing."""
    with poisoned_memory() as count:
        CHECKS[operator](MATRIX[name])
    assert (count() > 0) == (operator != "statistics")  # which has no buffers


@dataclasses.dataclass
class Use:
    """Bytes that one forward and backward took."""

    tokens: int
    forward: int  # beyond inputs, output and saved tensors
    backward: int  # beyond these and the gradients
    peak: int

    @property
    def kib_a_token(self) -> tuple[float, float]:
        return self.forward / self.tokens / 1024, self.backward / self.tokens / 1024


def storage(x: Tensor) -> tuple[int, int]:
    return x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()


def measure_use(case: Case) -> Use:
    """Memory of the whole, forward and backward."""
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
    kept_at_end = kept + sum(storage(grad)[1] for grad in grads)
    return Use(sum(case.lengths_k), forward - kept, backward - kept_at_end, max(forward, backward))


def show(use: Use) -> None:
    forward, backward, peak = *use.kib_a_token, use.peak / 2**30
    print(
        f"\n{use.tokens:>9,} tokens: forward {forward:6.2f}, backward {backward:6.2f} KiB a token; peak {peak:7.2f} GiB"
    )


def check_use(tokens: int) -> Use:
    torch.cuda.empty_cache()
    use = measure_use(seed_case(tokens))
    show(use)
    assert max(use.kib_a_token) <= LIMIT_KIB
    return use


@pytest.mark.parametrize("tokens", [8192, 32768, 131072])
def test_memory_grows_with_the_tokens(tokens, capsys):
    measure_use(seed_case(1024))  # workspaces that libraries keep
    with capsys.disabled():
        check_use(tokens)


@pytest.mark.slow
def test_memory_of_a_million_tokens(capsys):
    with capsys.disabled():
        short, long = check_use(131072), check_use(1048576)
        print(f"peak at 1,048,576 over peak at 131,072 tokens: {long.peak / short.peak:.2f}")
    assert long.peak / short.peak <= LIMIT_RATIO
