"""Every mistake at the public boundary is a ValueError that names function, argument, rule and value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import nsa
from nsa import NSAConfig, PhiWeights
from nsa.ops.embedding import embed
from nsa.ops.selection.ops import check_fp8
from tests.ops.cases import make_batch, offsets, small

CONFIG = small()
LENGTH = 20

Change = Callable[[Any], Any]


def good(function: str, config: NSAConfig = CONFIG) -> dict[str, Any]:
    """Arguments that the function accepts, by name."""
    batch = make_batch(config, (LENGTH,))
    q, k, v = batch.q(), batch.k(), batch.v()
    k_cmp, v_cmp = batch.normal(5, 2, 16), batch.normal(5, 2, 32)
    cu = offsets([LENGTH])
    arguments: dict[str, dict[str, Any]] = {
        "compress": {"x": k, "weights": None, "config": config, "cu_seqlens": cu},
        "compressed_attention": {
            "q": q,
            "k_cmp": k_cmp,
            "v_cmp": v_cmp,
            "config": config,
            "cu_seqlens_q": cu,
        },
        "select_blocks": {
            "q": q,
            "k_cmp": k_cmp,
            "lse": batch.normal(LENGTH, 4),
            "config": config,
            "cu_seqlens_q": cu,
        },
        "selected_attention": {
            "q": q,
            "k": k,
            "v": v,
            "block_indices": batch.block_indices(),
            "config": config,
            "cu_seqlens_q": cu,
        },
        "window_attention": {"q": q, "k": k, "v": v, "config": config, "cu_seqlens_q": cu},
        "combine": {"out_cmp": q, "out_slc": q, "out_win": q, "gates": batch.gates()},
        "native_sparse_attention": {
            "q": q,
            "k_cmp_raw": k,
            "v_cmp_raw": v,
            "k_slc": k,
            "v_slc": v,
            "k_win": k,
            "v_win": v,
            "gates": batch.gates(),
            "phi": None,
            "config": config,
            "cu_seqlens_q": cu,
        },
        "blocks_to_ranges": {
            "block_indices": batch.block_indices(),
            "config": config,
            "cu_seqlens_q": cu,
        },
        "apply_rope": {"x": q, "positions": torch.arange(LENGTH), "rope": nsa.Rope(16)},
    }
    return arguments[function]


OPERATORS = (
    "compressed_attention",
    "select_blocks",
    "selected_attention",
    "window_attention",
    "native_sparse_attention",
)
ALL = ("compress", *OPERATORS, "combine", "blocks_to_ranges", "apply_rope")


def refused(function: str, arguments: dict[str, Any], argument: str) -> None:
    with pytest.raises(ValueError, match=rf"^{function}: .*(?:{argument}).* must .*, got .*\.$"):
        getattr(nsa, function)(**arguments)


@pytest.mark.parametrize("function", ALL)
def test_good_arguments_are_accepted(function):
    """Otherwise the tests below would prove nothing."""
    getattr(nsa, function)(**good(function))


BAD_OFFSETS: dict[str, Any] = {
    "int64": offsets([LENGTH]).long(),
    "float": offsets([LENGTH]).float(),
    "two dimensions": offsets([LENGTH])[None],
    "no sequence": offsets([]),
    "starts at 1": torch.tensor([1, LENGTH], dtype=torch.int32),
    "ends early": torch.tensor([0, LENGTH - 1], dtype=torch.int32),
    "ends late": torch.tensor([0, LENGTH + 1], dtype=torch.int32),
    "falls": torch.tensor([0, 12, 8, LENGTH], dtype=torch.int32),
}


@pytest.mark.parametrize("bad", BAD_OFFSETS)
@pytest.mark.parametrize("function", OPERATORS)
def test_offsets_of_queries(function, bad):
    refused(function, {**good(function), "cu_seqlens_q": BAD_OFFSETS[bad]}, "cu_seqlens_q|k_cmp")


# Without the key tokens themselves one token more cannot be noticed: 21 tokens have as many
# compressed keys as 20.
UNNOTICED = {("compressed_attention", "ends late"), ("select_blocks", "ends late")}


@pytest.mark.parametrize(
    ("function", "bad"),
    [(f, bad) for f in OPERATORS for bad in BAD_OFFSETS if (f, bad) not in UNNOTICED],
)
def test_offsets_of_keys(function, bad):
    refused(function, {**good(function), "cu_seqlens_k": BAD_OFFSETS[bad]}, "cu_seqlens_k|k_cmp")


@pytest.mark.parametrize("bad", BAD_OFFSETS)
def test_offsets_of_compress(bad):
    refused("compress", {**good("compress"), "cu_seqlens": BAD_OFFSETS[bad]}, "cu_seqlens")


@pytest.mark.parametrize("function", OPERATORS)
def test_another_number_of_sequences_for_keys(function):
    refused(function, {**good(function), "cu_seqlens_k": offsets([12, 8])}, "cu_seqlens_k|k_cmp")


@pytest.mark.parametrize("function", OPERATORS)
def test_fewer_keys_than_queries_in_one_sequence(function):
    given = {**good(function), "cu_seqlens_q": offsets([10, 10]), "cu_seqlens_k": offsets([11, 9])}
    refused(function, given, "cu_seqlens_k|k_cmp")


@pytest.mark.parametrize("function", OPERATORS)
def test_offsets_of_keys_alone(function):
    given = {**good(function), "cu_seqlens_q": None, "cu_seqlens_k": offsets([LENGTH])}
    refused(function, given, "cu_seqlens_q")


@pytest.mark.parametrize("function", OPERATORS)
@pytest.mark.parametrize("hint", [LENGTH - 1, -1])
@pytest.mark.parametrize("argument", ["max_seqlen_q", "max_seqlen_k"])
def test_length_hint_below_the_longest_sequence(function, hint, argument):
    refused(function, {**good(function), argument: hint}, argument)


@pytest.mark.parametrize("function", OPERATORS)
@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_softmax_scale_that_is_none(function, scale):
    refused(function, {**good(function), "softmax_scale": scale}, "softmax_scale")


@pytest.mark.parametrize("function", ["compress", *OPERATORS])
@pytest.mark.parametrize("backend", ["cuda", "AUTO", ""])
def test_unknown_backend(function, backend):
    refused(function, {**good(function), "backend": backend}, "backend")


@pytest.mark.parametrize("function", ["compress", *OPERATORS, "combine"])
def test_kernels_for_what_they_cannot_take(function):
    """They are refused by the name that the caller knows: fp64, and what lies on the CPU."""
    argument = {"compress": "x", "combine": "out_cmp"}.get(function, "q")
    refused(function, {**good(function), "backend": "triton"}, argument)


@pytest.mark.parametrize(
    ("tokens", "weight", "backend", "message"),
    [
        (
            torch.zeros(3),
            torch.zeros(4, 2),
            "auto",
            "embed: tokens must be int64 or int32, got torch.float32",
        ),
        (
            torch.zeros(3).long(),
            torch.zeros(4),
            "auto",
            r"embed: weight must have shape \[V, width\], got \(4,\)",
        ),
        (
            torch.zeros(3).long(),
            torch.zeros(4, 2),
            "triton",
            "embed: weight must lie on a CUDA GPU",
        ),
        (
            torch.zeros(3).long(),
            torch.zeros(4, 2).double(),
            "triton",
            "embed: weight must be bfloat16, float16 or float32",
        ),
    ],
    ids=["tokens", "shape", "device", "dtype"],
)
def test_embedding(tokens, weight, backend, message):
    with pytest.raises(ValueError, match=message):
        embed(tokens, weight, backend=backend)


@pytest.mark.parametrize("function", OPERATORS)
@pytest.mark.parametrize("argument", ["cu_seqlens_q", "cu_seqlens_k"])
def test_dense_batch_with_offsets(function, argument):
    given = good(function)
    for name, x in given.items():
        if isinstance(x, torch.Tensor) and name not in ("k_cmp", "v_cmp", "cu_seqlens_q"):
            given[name] = x.unflatten(0, (2, LENGTH // 2))
    given["cu_seqlens_q"] = None
    if function in ("compressed_attention", "select_blocks"):
        given.update({name: given[name][:2] for name in ("k_cmp", "v_cmp") if name in given})
    getattr(nsa, function)(**given)
    given[argument] = offsets([LENGTH // 2, LENGTH // 2])
    refused(function, given, argument)


WRONG: dict[str, Change] = {
    "one head more": lambda x: torch.cat((x, x[..., :1, :]), dim=-2),
    "no head dimension": lambda x: x.flatten(-2),
    "larger head": lambda x: torch.cat((x, x), dim=-1),
    "integers": lambda x: x.long(),
    "five dimensions": lambda x: x[None, None],
}
TENSORS = {
    "compressed_attention": ("q", "k_cmp", "v_cmp"),
    "select_blocks": ("q", "k_cmp"),
    "selected_attention": ("q", "k", "v"),
    "window_attention": ("q", "k", "v"),
    "native_sparse_attention": ("q", "k_cmp_raw", "v_cmp_raw", "k_slc", "v_slc", "k_win", "v_win"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(
    ("function", "argument"), [(f, a) for f, names in TENSORS.items() for a in names]
)
def test_wrong_tensor(function, argument, wrong):
    given = good(function)
    given[argument] = WRONG[wrong](given[argument])
    refused(function, given, argument)


@pytest.mark.parametrize(
    ("function", "argument"), [(f, a) for f, names in TENSORS.items() for a in names if a != "q"]
)
def test_another_dtype_than_q(function, argument):
    given = good(function)
    given[argument] = given[argument].float()
    refused(function, given, argument)


@pytest.mark.parametrize(
    ("function", "argument"),
    [
        ("selected_attention", "v"),
        ("window_attention", "v"),
        ("native_sparse_attention", "v_cmp_raw"),
        ("native_sparse_attention", "k_slc"),
        ("native_sparse_attention", "v_win"),
        ("compressed_attention", "v_cmp"),
    ],
)
def test_another_number_of_tokens_than_the_keys(function, argument):
    given = good(function)
    given[argument] = given[argument][:-1]
    refused(function, given, argument)


@pytest.mark.parametrize(
    "function", ["selected_attention", "window_attention", "native_sparse_attention"]
)
def test_fewer_keys_than_queries(function):
    given = {**good(function), "cu_seqlens_q": None}
    for name in TENSORS[function][1:]:
        given[name] = given[name][:-1]
    refused(function, given, "k")


@pytest.mark.parametrize("function", ["compressed_attention", "select_blocks"])
@pytest.mark.parametrize("num_rows", [3, 6, 20])
def test_wrong_number_of_compressed_keys(function, num_rows):
    given = good(function)
    for name in ("k_cmp", "v_cmp"):
        if name in given:
            given[name] = torch.zeros(num_rows, *given[name].shape[1:]).double()
    refused(function, given, "k_cmp")


BAD_INDICES: dict[str, Change] = {
    "float": lambda x: x.double(),
    "bool": lambda x: x > 0,
    "another number of heads": lambda x: x[:, :1],
    "another number of queries": lambda x: x[:-1],
    "two dimensions": lambda x: x[:, 0],
}


@pytest.mark.parametrize("bad", BAD_INDICES)
@pytest.mark.parametrize("function", ["selected_attention", "blocks_to_ranges"])
def test_block_indices(function, bad):
    given = good(function)
    given["block_indices"] = BAD_INDICES[bad](given["block_indices"])
    argument = (
        "block_indices|cu_seqlens_q" if bad == "another number of queries" else "block_indices"
    )
    refused(function, given, argument)


def test_lse_of_another_shape():
    given = good("select_blocks")
    refused("select_blocks", {**given, "lse": given["lse"][:, :2]}, "lse")
    refused("select_blocks", {**given, "lse": given["lse"][:-1]}, "lse")


@pytest.mark.parametrize("shape", [(LENGTH, 4), (LENGTH, 4, 2), (LENGTH, 2, 3), (LENGTH - 1, 4, 3)])
@pytest.mark.parametrize("function", ["combine", "native_sparse_attention"])
def test_gates_of_another_shape(function, shape):
    refused(function, {**good(function), "gates": torch.ones(shape).double()}, "gates")


def test_combine_without_a_branch_or_with_unequal_ones():
    given = good("combine")
    refused("combine", {**given, "out_cmp": None, "out_slc": None, "out_win": None}, "out_cmp")
    refused("combine", {**given, "out_win": given["out_win"][:, :2]}, "out_win")


@pytest.mark.parametrize("argument", TENSORS["native_sparse_attention"][1:])
def test_missing_input_of_a_branch_that_is_on(argument):
    refused(
        "native_sparse_attention", {**good("native_sparse_attention"), argument: None}, argument
    )


def test_queries_of_the_compressed_branch():
    given = good("native_sparse_attention")
    refused("native_sparse_attention", {**given, "q_cmp": given["q"][:-1]}, "q_cmp")
    refused("native_sparse_attention", {**given, "q_cmp": given["q"].float()}, "q_cmp")
    config = small(compress_rope="none")
    refused("native_sparse_attention", {**given, "config": config, "rope": nsa.Rope(16)}, "q_cmp")


@pytest.mark.parametrize(
    ("phi", "weights", "argument"),
    [
        ("mean", PhiWeights(weight=torch.ones(2, 8, 16)), "weights.weight"),
        ("linear", None, "weights.weight"),
        ("linear", PhiWeights(weight=torch.ones(2, 8, 32)), "weights.weight"),
        ("linear", PhiWeights(weight=torch.ones(1, 8, 16)), "weights.weight"),
        ("linear", PhiWeights(weight=torch.ones(2, 4, 16)), "weights.weight"),
        ("mlp", PhiWeights(), "weights.position"),
        ("mlp", PhiWeights(torch.ones(2, 8, 16)), "weights.weight"),
        (
            "mlp",
            PhiWeights(None, torch.ones(2, 8, 16), torch.ones(2, 128, 31), torch.ones(2, 31, 16)),
            "weights.w1",
        ),
        ("mlp", PhiWeights(None, torch.ones(2, 8, 16), torch.ones(2, 128, 32), None), "weights.w2"),
        (
            "mlp",
            PhiWeights(None, torch.ones(2, 4, 16), torch.ones(2, 128, 32), torch.ones(2, 32, 16)),
            "weights.position",
        ),
    ],
)
def test_parameters_of_phi(phi, weights, argument):
    refused("compress", {**good("compress", small(phi=phi)), "weights": weights}, argument)


def test_phi_is_missing():
    refused(
        "native_sparse_attention",
        {**good("native_sparse_attention"), "config": small(phi="linear")},
        "phi|weights",
    )


@pytest.mark.parametrize(
    "bad", ["one head more", "no head dimension", "integers", "five dimensions"]
)
def test_tokens_of_compress(bad):
    given = good("compress")
    refused("compress", {**given, "x": WRONG[bad](given["x"])}, "x")


def test_rotation():
    given = good("apply_rope")
    refused("apply_rope", {**given, "positions": torch.arange(LENGTH - 1)}, "positions")
    refused("apply_rope", {**given, "rope": nsa.Rope(32)}, "rope")
    refused("apply_rope", {**given, "rope": nsa.Rope(7)}, "rope")


def test_the_message_says_what_was_given():
    with pytest.raises(ValueError, match=r"got \(20, 4, 32\)"):
        nsa.window_attention(**{**good("window_attention"), "q": torch.zeros(20, 4, 32)})
    with pytest.raises(ValueError, match=r"end at the number of tokens \(20\), got 19\."):
        nsa.window_attention(
            **{**good("window_attention"), "cu_seqlens_q": torch.tensor([0, 19], dtype=torch.int32)}
        )


def test_a_gate_below_0():
    inputs = good("native_sparse_attention")
    inputs["gates"] = inputs["gates"].clone()
    inputs["gates"][3, 1, 2] = -0.25
    refused("native_sparse_attention", inputs, "gates")


def test_fp8_scores_need_a_gpu_that_has_them():
    check_fp8((8, 9))
    check_fp8((9, 0))
    with pytest.raises(
        ValueError,
        match=r"select_blocks: config.score_precision must be exact on .* got fp8 on 8.6",
    ):
        check_fp8((8, 6))
