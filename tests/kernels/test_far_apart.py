"""Tokens and heads more than 2^31 elements apart: address arithmetic in 32 bits would wrap.

The tensors use memory that is reserved and hardly touched. A wrapped address ends the process,
so the operators run in one of their own, which says what it has come to.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OPERATORS = ["window", "compressed", "choice", "selected", "gathered", "compress"]
CASES = [f"tokens {x}" for x in OPERATORS] + [f"heads {x}" for x in OPERATORS[::2]]

PROGRAM = """
import mmap, sys
import torch
from nsa import compress, compressed_attention, select_blocks, selected_attention, window_attention
from tests.kernels import quick_interpreter
from tests.ops.cases import small

quick_interpreter.install()
TOKENS = 12
NORESERVE = 0x4000  # of Linux; Python names it from 3.13 on


def far(x, axis):
    # 2^28 elements from token to token, or 2^30 from head to head.
    step = (2**28, 16, 1) if axis == "tokens" else (16, 2**30, 1)
    size = 4 * sum((n - 1) * s for n, s in zip(x.shape, step)) + 64
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    y = torch.frombuffer(memory, dtype=torch.float32).as_strided(x.shape, step)
    with torch.no_grad():
        y.copy_(x)
    return y.requires_grad_()


def run(operator, q, k, v, dout):
    ids = torch.zeros(TOKENS, k.shape[1], 4, dtype=torch.int32)
    ids[..., 1:] = -1
    if operator == "gathered":
        ids[..., 1] = 1  # two blocks before the last queries' own: no near block of theirs
    if operator == "compress":
        out, _ = compress(k, None, config, backend="triton")
        return [out, *torch.autograd.grad(out, [k], dout[: out.shape[0]])]
    if operator in ("compressed", "choice"):
        out, lse = compressed_attention(q, k, v, config, **offsets)
        if operator == "choice":
            return [select_blocks(q, k, lse, config, **offsets)]
    elif operator == "window":
        out, _ = window_attention(q, k, v, config, backend="triton")
    else:
        more = {"algorithm": "tiled", "backend": "triton"}
        if operator == "gathered":
            more = {"algorithm": "gathered", **offsets}
        out, _ = selected_attention(q, k, v, ids, config, **more)
    return [out, *torch.autograd.grad(out, [q, k, v], dout)]


# The compressed branch sees as many rows of keys as there are blocks: 12 of 52 tokens.
total = torch.tensor([0, 52], dtype=torch.int32)
queries = torch.tensor([0, TOKENS], dtype=torch.int32)
offsets = {"cu_seqlens_q": queries, "cu_seqlens_k": total, "backend": "triton"}
for case in sys.argv[1:]:
    axis, operator = case.split()
    heads = 1 if axis == "tokens" else 3
    config = small(num_heads=heads, num_kv_heads=heads, value_dim=16, num_local_blocks=1)
    torch.manual_seed(0)
    q, dout, *keys = (torch.randn(tokens, heads, 16) for tokens in (TOKENS, TOKENS, 52, 52))
    k, v = keys if operator == "gathered" else (x[:TOKENS] for x in keys)
    near = run(operator, *(x.clone().requires_grad_() for x in (q, k, v)), dout)
    wide = run(operator, *(far(x, axis) for x in (q, k, v)), far(dout, axis).detach())
    assert all(torch.equal(a, b) for a, b in zip(near, wide, strict=True)), case
    print(case, flush=True)
"""


def test_addresses_do_not_wrap():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *CASES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    passed = done.stdout.splitlines()
    assert passed == CASES, f"exit status {done.returncode} after {passed}: {done.stderr[-1500:]}"
