"""A mistake of the caller is a ValueError that names function, argument, rule and value."""

from __future__ import annotations

import math
from collections.abc import Callable
from inspect import isfunction
from typing import Any

import pytest
import torch
from torch import Tensor

import nsa
from nsa import PhiWeights
from nsa.ops.embedding import embed
from nsa.ops.selection.launch import check_fp8
from tests.ops.cases import make_batch, offsets, small

CONFIG = small()
LENGTH = 20
LONG = torch.zeros(3, dtype=torch.int64)


def good(function: str) -> dict[str, Any]:
    """Arguments that the function accepts, by name."""
    batch = make_batch(CONFIG, (LENGTH,))
    q, k, v = batch.q(), batch.k(), batch.v()
    cmp = {"k_cmp": batch.normal(5, 2, 16), "config": CONFIG, "cu_seqlens_q": offsets([LENGTH])}
    common = {"config": CONFIG, "cu_seqlens_q": offsets([LENGTH])}
    ids = batch.block_indices()
    raw = {f"{name}_{branch}": x for branch in ("slc", "win") for name, x in (("k", k), ("v", v))}
    arguments: dict[str, dict[str, Any]] = {
        "compress": {"x": k, "weights": None, "config": CONFIG, "cu_seqlens": offsets([LENGTH])},
        "compressed_attention": {"q": q, **cmp, "v_cmp": batch.normal(5, 2, 32)},
        "select_blocks": {"q": q, **cmp, "lse": batch.normal(LENGTH, 4)},
        "selected_attention": {"q": q, "k": k, "v": v, "block_indices": ids, **common},
        "window_attention": {"q": q, "k": k, "v": v, **common},
        "combine": {"out_cmp": q, "out_slc": q, "out_win": q, "gates": batch.gates()},
        "native_sparse_attention": {
            **{"q": q, "k_cmp_raw": k, "v_cmp_raw": v, "gates": batch.gates(), "phi": None},
            **raw,
            **common,
        },
        "blocks_to_ranges": {"block_indices": ids, **common},
        "apply_rope": {"x": q, "positions": torch.arange(LENGTH), "rope": nsa.Rope(16)},
    }
    return arguments[function]


TENSORS = {
    "compressed_attention": ("q", "k_cmp", "v_cmp"),
    "select_blocks": ("q", "k_cmp"),
    "selected_attention": ("q", "k", "v"),
    "window_attention": ("q", "k", "v"),
    "native_sparse_attention": ("q", "k_cmp_raw", "v_cmp_raw", "k_slc", "v_slc", "k_win", "v_win"),
}
WHOLE = "native_sparse_attention"


def refused(function: str, changes: dict[str, Any], argument: str) -> None:
    """Changed arguments are refused by name; functions are applied to the good value."""
    given = good(function)
    for name, change in changes.items():
        value = given.get(name, offsets([LENGTH]))
        given[name] = change(value) if isfunction(change) else change
    with pytest.raises(ValueError, match=rf"^.*(?:{argument}).* must .*, got .*\.$"):
        getattr(nsa, function)(**given)


@pytest.mark.parametrize(
    "function", ["compress", *TENSORS, "combine", "blocks_to_ranges", "apply_rope"]
)
def test_good_arguments_are_accepted(function):
    """Otherwise the tests below would prove nothing."""
    getattr(nsa, function)(**good(function))


# Wrong offsets and tensors, by what is wrong with them; the fuzzer draws from these, too.
BAD_OFFSETS: dict[str, Callable[[Tensor], Any]] = {
    "int64": lambda cu: cu.long(),
    "float": lambda cu: cu.float(),
    "two dimensions": lambda cu: cu[None],
    "no sequence": lambda cu: cu[:1],
    "starts at 1": lambda cu: torch.cat([cu[:1] + 1, cu[1:]]),
    "ends early": lambda cu: torch.cat([cu[:-1], cu[-1:] - 1]),
    "ends late": lambda cu: torch.cat([cu[:-1], cu[-1:] + 1]),
    "falls": lambda cu: torch.cat([cu, cu[-1:] - 1, cu[-1:]]),
}
BAD_VALUES: dict[str, tuple[Any, ...]] = {
    "max_seqlen_q": (LENGTH - 1, -1),
    "max_seqlen_k": (LENGTH - 1, -1),
    "softmax_scale": (0.0, -1.0, math.inf, math.nan),
    "backend": ("cuda", "AUTO", ""),
}
# Arguments that all operators have.
COMMON: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"{name} {bad}": ({name: value}, f"{name}|k_cmp")
        for name in ("cu_seqlens_q", "cu_seqlens_k")
        for bad, value in BAD_OFFSETS.items()
    },
    "other sequences of keys": ({"cu_seqlens_k": offsets([12, 8])}, "cu_seqlens_k|k_cmp"),
    "fewer keys than queries": (
        {"cu_seqlens_q": offsets([10, 10]), "cu_seqlens_k": offsets([11, 9])},
        "cu_seqlens_k|k_cmp",
    ),
    "offsets of keys alone": (
        {"cu_seqlens_q": None, "cu_seqlens_k": offsets([LENGTH])},
        "cu_seqlens_q",
    ),
    **{
        f"{name} {value}": ({name: value}, name)
        for name, values in BAD_VALUES.items()
        for value in values
    },
    # Kernels take neither fp64 nor tensors on the CPU.
    "kernels": ({"backend": "triton"}, "q"),
}
# Without the key tokens themselves one token more cannot be noticed: 21 tokens have as many
# compressed keys as 20.
UNNOTICED = [(f, "cu_seqlens_k ends late") for f in ("compressed_attention", "select_blocks")]


@pytest.mark.parametrize("bad", COMMON)
def test_what_all_operators_have(bad):
    for function in TENSORS:
        if (function, bad) not in UNNOTICED:
            refused(function, *COMMON[bad])


@pytest.mark.parametrize("bad", BAD_OFFSETS)
def test_offsets_of_compress(bad):
    refused("compress", {"cu_seqlens": BAD_OFFSETS[bad]}, "cu_seqlens")


@pytest.mark.parametrize("function", TENSORS)
@pytest.mark.parametrize("argument", ["cu_seqlens_q", "cu_seqlens_k"])
def test_dense_batch_with_offsets(function, argument):
    given = {**good(function), "cu_seqlens_q": None}
    for name, x in given.items():
        if isinstance(x, torch.Tensor):
            given[name] = x[:2] if name in ("k_cmp", "v_cmp") else x.unflatten(0, (2, LENGTH // 2))
    getattr(nsa, function)(**given)
    refused(function, {**given, argument: offsets([LENGTH // 2] * 2)}, argument)


WRONG: dict[str, Callable[[Any], Any]] = {
    "one head more": lambda x: torch.cat((x, x[..., :1, :]), dim=-2),
    "no head dimension": lambda x: x.flatten(-2),
    "larger head": lambda x: torch.cat((x, x), dim=-1),
    "integers": lambda x: x.long(),
    "five dimensions": lambda x: x[None, None],
    "another dtype than q": lambda x: x.float(),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("function", ["compress", *TENSORS])
def test_wrong_tensor(function, wrong):
    for argument in TENSORS.get(function, ("x",)):
        of_any = (wrong == "another dtype than q" and argument in ("q", "x")) or (
            wrong == "larger head" and argument == "x"
        )
        if not of_any:
            refused(function, {argument: WRONG[wrong]}, argument)


def shorter(x: Tensor) -> Tensor:
    return x[:-1]


def narrower(x: Tensor) -> Tensor:
    return x[:, :2]


def rows(number: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.new_zeros(number, *x.shape[1:])


ones = torch.ones
W2 = ones(2, 32, 16)
SINGLE: list[tuple[str, dict[str, Any], str]] = [
    ("compress", {"backend": "triton"}, "x"),
    ("combine", {"backend": "triton"}, "out_cmp"),
    ("compress", {"backend": "cuda"}, "backend"),
    # another number of tokens than the keys
    ("selected_attention", {"v": shorter}, "v"),
    ("window_attention", {"v": shorter}, "v"),
    *((WHOLE, {name: shorter}, name) for name in ("v_cmp_raw", "k_slc", "v_win")),
    ("compressed_attention", {"v_cmp": shorter}, "v_cmp"),
    # fewer keys than queries
    *(
        (f, {"cu_seqlens_q": None, **dict.fromkeys(TENSORS[f][1:], shorter)}, "k")
        for f in ("selected_attention", "window_attention", WHOLE)
    ),
    *(
        (f, dict.fromkeys(TENSORS[f][1:], rows(number)), "k_cmp")
        for f in ("compressed_attention", "select_blocks")
        for number in (3, 6, 20)
    ),
    *(
        (f, {"block_indices": change}, argument)
        for f in ("selected_attention", "blocks_to_ranges")
        for change, argument in (
            (lambda x: x.double(), "block_indices"),
            (lambda x: x > 0, "block_indices"),
            (lambda x: x[:, :1], "block_indices"),
            (lambda x: x[:, 0], "block_indices"),
            (shorter, "block_indices|cu_seqlens_q"),
        )
    ),
    ("select_blocks", {"lse": narrower}, "lse"),
    ("select_blocks", {"lse": shorter}, "lse"),
    *(
        (f, {"gates": ones(shape).double()}, "gates")
        for f in ("combine", WHOLE)
        for shape in ((LENGTH, 4), (LENGTH, 4, 2), (LENGTH, 2, 3), (LENGTH - 1, 4, 3))
    ),
    ("combine", {"out_cmp": None, "out_slc": None, "out_win": None}, "out_cmp"),
    ("combine", {"out_win": narrower}, "out_win"),
    # inputs of a branch that is on
    *((WHOLE, {name: None}, name) for name in TENSORS[WHOLE][1:]),
    (WHOLE, {"gates": lambda x: -x}, "gates"),
    (WHOLE, {"q_cmp": ones(LENGTH - 1, 4, 16).double()}, "q_cmp"),
    (WHOLE, {"q_cmp": ones(LENGTH, 4, 16)}, "q_cmp"),
    (WHOLE, {"config": small(compress_rope="none"), "rope": nsa.Rope(16)}, "q_cmp"),
    (WHOLE, {"config": small(phi="linear")}, "phi|weights"),
    *(
        ("compress", {"config": small(phi=kind), "weights": weights}, f"weights.{argument}")
        for kind, weights, argument in (
            ("mean", PhiWeights(weight=ones(2, 8, 16)), "weight"),
            ("linear", None, "weight"),
            ("linear", PhiWeights(weight=ones(2, 4, 16)), "weight"),
            ("mlp", PhiWeights(), "position"),
            ("mlp", PhiWeights(ones(2, 8, 16)), "weight"),
            ("mlp", PhiWeights(None, ones(2, 8, 16), ones(2, 128, 31), W2), "w1"),
            ("mlp", PhiWeights(None, ones(2, 8, 16), ones(2, 128, 32), None), "w2"),
        )
    ),
    ("apply_rope", {"positions": shorter}, "positions"),
    ("apply_rope", {"rope": nsa.Rope(32)}, "rope"),
    ("apply_rope", {"rope": nsa.Rope(7)}, "rope"),
]


@pytest.mark.parametrize(("function", "changes", "argument"), SINGLE)
def test_single_mistake(function, changes, argument):
    refused(function, changes, argument)


@pytest.mark.parametrize(
    ("tokens", "weight", "backend", "rule"),
    [
        (torch.zeros(3), torch.zeros(4, 2), "auto", "tokens must be int64 or int32, got .*float32"),
        (LONG, torch.zeros(4), "auto", r"weight must have shape \[V, width\], got \(4,\)"),
        (LONG, torch.zeros(4, 2), "triton", "weight must lie on a CUDA GPU"),
        (LONG, torch.zeros(4, 2).double(), "triton", "weight must be bfloat16, float16 or float32"),
    ],
    ids=["tokens", "shape", "device", "dtype"],
)
def test_embedding(tokens, weight, backend, rule):
    with pytest.raises(ValueError, match=rule):
        embed(tokens, weight, backend=backend)


def test_fp8_scores_need_a_gpu_that_has_them():
    check_fp8((8, 9))
    check_fp8((9, 0))
    with pytest.raises(
        ValueError,
        match=r"config.score_precision must be exact on .* got fp8 on 8.6",
    ):
        check_fp8((8, 6))
