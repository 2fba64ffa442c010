"""Sampled values are rows of the reference, and the gate made of them fails for planted errors."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import (
    NSAConfig,
    PhiWeights,
    Rope,
    apply_rope,
    compress,
    compressed_attention,
    compressed_positions,
    native_sparse_attention,
    select_blocks,
    selected_attention,
    window_attention,
)
from nsa.testing import PackedInputs, make_inputs, packed_offsets
from nsa.testing.sampled import (
    SampledAttention,
    SampledCompression,
    SampledWhole,
    attention,
    check_sampled,
    compression,
    sample_rows,
    sampled_compressed,
    sampled_selected,
    sampled_selection,
    sampled_window,
    selection,
)
from tests.ops.cases import make_batch, near, small
from tests.ops.whole import phi_parameters

CONFIG = small(num_heads=6)
BATCHES = {
    "packed": ((130, 0, 1, 200, 7), None),
    "fewer queries": ((257, 160, 7, 64), (9, 130, 7, 0)),
}
BRANCHES = ("cmp", "slc", "win")
ROPE = Rope.from_config(CONFIG)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Parts of a few rows, so that tests cross their edges."""
    monkeypatch.setattr(attention, "PART_ELEMENTS", 2**15)
    monkeypatch.setattr(selection, "PART_ELEMENTS", 2**15)
    monkeypatch.setattr(attention, "SEARCH_ROWS", 50)
    monkeypatch.setattr(compression, "PART_BLOCKS", 5)


class Case:
    """One branch: the reference's results and gradients, and the sampled branch."""

    def __init__(self, branch: str, batch: str, dtype: torch.dtype = torch.float64) -> None:
        config, self.dtype = CONFIG, dtype
        x = make_inputs(config, *BATCHES[batch], dtype=dtype)
        self.cu_seqlens_q = x.cu_seqlens_q
        offsets = {"cu_seqlens_q": x.cu_seqlens_q, "cu_seqlens_k": x.cu_seqlens_k}
        ids = make_batch(config, *BATCHES[batch]).block_indices()
        keys = {"slc": (x.k_slc, x.v_slc), "win": (x.k_win, x.v_win)}
        if branch == "cmp":
            raw = (x.k_cmp_raw, x.v_cmp_raw)
            k, v = (compress(y, None, config, x.cu_seqlens_k)[0] for y in raw)
            keys["cmp"] = (k, v)
        leaves = [y.detach().requires_grad_() for y in (x.q, *keys[branch])]
        calls: dict[str, tuple[Any, Any]] = {
            "cmp": (compressed_attention, sampled_compressed),
            "slc": (selected_attention, sampled_selected),
            "win": (window_attention, sampled_window),
        }
        operator, sampled = calls[branch]
        args = [*leaves, *[ids] * (branch == "slc"), config]
        out, self.lse = operator(*args, **offsets)
        self.sampled: SampledAttention = sampled(*args, **offsets)
        generator = torch.Generator().manual_seed(1)
        self.dout = torch.randn(out.shape, generator=generator).to(dtype)
        self.out = out.detach()
        self.dq, self.dk, self.dv = torch.autograd.grad(out, leaves, self.dout)
        self.num_keys = self.sampled.cu_key[-1]

    def check(self, rows: Tensor, keys: Tensor, **planted: Tensor) -> None:
        """The gate over this case, with some results replaced."""
        # In fp32 nothing is rounded but sums, and the reference adds in another order.
        factor = 4.0 if self.dtype == torch.float32 else 2.0
        queries, keys_of = self.sampled.at_queries, self.sampled.at_keys
        for at, index, names in (
            (queries, rows, ("out", "lse", "dq")),
            (keys_of, keys, ("dk", "dv")),
        ):
            found = {name: planted.get(name, getattr(self, name)) for name in names}

            def values(
                dtype: torch.dtype, at: Any = at, index: Tensor = index
            ) -> dict[str, Tensor]:
                values: dict[str, Tensor] = at(index, dtype, self.dout)
                return values

            check_sampled(values, found, index, self.dtype, "case", factor)


def shuffled(count: int, part: int = 1) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(2))[: -(-count // part)]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("branch", BRANCHES)
def test_branch_equals_the_reference(branch, batch):
    case = Case(branch, batch)
    rows, keys = shuffled(case.out.shape[0]), shuffled(case.num_keys, 3)
    found = case.sampled.at_queries(rows, torch.float64, case.dout)
    assert torch.equal(found["lse"].isinf(), case.lse[rows].isinf())
    seen = ~found["lse"].isinf()
    near(found["lse"][seen], case.lse[rows][seen].numpy())
    near(found["out"], case.out[rows].numpy())
    near(found["dq"], case.dq[rows].numpy())
    found = case.sampled.at_keys(keys, torch.float64, case.dout)
    near(found["dk"], case.dk[keys].numpy())
    near(found["dv"], case.dv[keys].numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("branch", BRANCHES)
def test_gate_lets_rounding_pass(branch, dtype):
    case = Case(branch, "packed", dtype)
    case.check(sample_rows(case.cu_seqlens_q, 60), shuffled(case.num_keys, 4))


def planted(case: Case) -> dict[str, Tensor]:
    """One error each: neighbours' rows, lse of a masked row, a sign, queries left out."""
    changed = {name: getattr(case, name).clone() for name in ("out", "dk", "lse", "dq")}
    changed["out"] = changed["out"].roll(1, 0)
    changed["lse"][5] = -torch.inf if changed["lse"][5].isfinite().all() else -1e30
    changed["dq"][100] *= -1
    lost = case.dout * (torch.arange(338) < 300)[:, None, None]
    every = torch.arange(case.num_keys)
    found = case.sampled.at_keys(every, torch.float64, lost)["dk"]
    changed["dk"][: case.num_keys] = found.to(case.dtype)
    return changed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("branch", BRANCHES)
def test_gate_fails_for_planted_errors(branch, dtype):
    case = Case(branch, "packed", dtype)
    rows, keys = torch.tensor([5, 100, 250]), torch.arange(0, case.num_keys, 7)
    case.check(rows, keys)
    for name, wrong in planted(case).items():
        with pytest.raises(AssertionError, match=f"case {name}"):
            case.check(rows, keys, **{name: wrong})
    case.sampled = dataclasses.replace(case.sampled, scale=case.sampled.scale * 1.05)
    with pytest.raises(AssertionError, match="case"):
        case.check(rows, keys)


@pytest.mark.parametrize("phi", ["mean", "linear", "mlp"])
@pytest.mark.parametrize("rotated", [True, False])
def test_compression_equals_the_reference(phi, rotated):
    config = small(phi=phi)
    batch = make_batch(config, (70, 0, 9, 8, 133, 1))
    x, cu = batch.k(), batch.kwargs["cu_seqlens_k"]
    names = phi_parameters(batch, config.head_dim)
    leaves = [x.clone().requires_grad_(), *(w.clone().requires_grad_() for w in names.values())]
    weights = PhiWeights(**dict(zip(names, leaves[1:], strict=True))) if names else None
    y, cu_cmp = compress(leaves[0], weights, config, cu)
    rope = ROPE if rotated else None
    if rope is not None:
        y = apply_rope(y, compressed_positions(config, cu, y.shape[0]), rope)
    dy = batch.normal(*y.shape)
    y = y[: int(cu_cmp[-1])]
    dx, *dw = torch.autograd.grad(y, leaves, dy[: y.shape[0]])
    sampled = SampledCompression(x, weights, config, cu, rope)
    rows, tokens = shuffled(y.shape[0], 2), shuffled(x.shape[0], 2)
    near(sampled.at_blocks(rows, torch.float64)["y"], y.detach()[rows].numpy())
    near(sampled.at_tokens(tokens, torch.float64, dy)["dx"], dx[tokens].numpy())
    found = sampled.weight_gradients(torch.float64, dy)
    assert found.keys() == names.keys()
    for actual, wanted in zip(found.values(), dw, strict=True):
        near(actual, wanted.numpy())


def choice_case(**changes: Any) -> tuple[NSAConfig, Tensor, Tensor, Tensor, dict[str, Any]]:
    config = small(num_heads=6, **changes)
    x = make_inputs(config, *BATCHES["fewer queries"])
    offsets: dict[str, Any] = {"cu_seqlens_q": x.cu_seqlens_q, "cu_seqlens_k": x.cu_seqlens_k}
    k_cmp, _ = compress(x.k_cmp_raw, None, config, x.cu_seqlens_k)
    _, lse = compressed_attention(x.q, k_cmp, None, config, **offsets)
    return config, x.q, k_cmp, select_blocks(x.q, k_cmp, lse, config, **offsets), offsets


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_init_blocks": 0, "num_local_blocks": 1},
        {"num_selected_blocks_table": ((-1, 100, 3),)},
        {"coarse_block_size": 32, "num_coarse_blocks": 5},
        {"score_precision": "fp8"},
    ],
)
def test_choice_equals_the_reference(changes):
    config, q, k_cmp, chosen, offsets = choice_case(**changes)
    sampled = sampled_selection(q, k_cmp, config, **offsets)
    rows = shuffled(q.shape[0])
    found, clear = sampled.at_queries(rows)
    assert float(clear.double().mean()) > 0.9
    assert torch.equal(found[clear], chosen[rows][clear])
    agreement = sampled.agreement(rows, chosen)
    assert (agreement.rows, agreement.against) == (2 * q.shape[0], 0)
    assert agreement.near <= int((~clear).sum())


def test_choice_with_q_zero_is_nowhere_clear_and_near_where_it_differs():
    config, q, k_cmp, chosen, offsets = choice_case()
    sampled = sampled_selection(torch.zeros_like(q), k_cmp, config, **offsets)
    rows = torch.arange(9)  # the last queries of 257 tokens: inner blocks tie exactly
    found, clear = sampled.at_queries(rows)
    assert not bool(clear.any())
    assert found[0, 0].tolist() == [0, 1, 14, 15]
    agreement = sampled.agreement(rows, chosen)
    assert agreement.against == 0
    assert agreement.near > 0


def free_block(ids: list[int]) -> int:
    """A block that is neither selected nor forced, of a query in the tenth block."""
    return next(block for block in range(1, 8) if block not in ids)


# Wrong selections of the query at position 159 of the second sequence: blocks 0 to 9.
WRONG = {
    "forced block": lambda ids: sorted([*ids[1:], free_block(ids)]),
    "lower block": lambda ids: sorted([ids[0], free_block(ids), *ids[2:]]),
    "future": lambda ids: [*ids[:-1], 10],
    "repeated": lambda ids: [ids[0], ids[0], *ids[2:]],
    "descending": lambda ids: ids[::-1],
}


@pytest.mark.parametrize("error", WRONG)
def test_wrong_selections_are_seen(error):
    config, q, k_cmp, chosen, offsets = choice_case()
    sampled = sampled_selection(q, k_cmp, config, **offsets)
    rows, wrong = torch.arange(q.shape[0]), chosen.clone()
    assert sampled.agreement(rows, chosen).against == 0
    assert sampled.agreement(rows, chosen.flip(1)).against > 0  # of the other KV head
    wrong[138, 0] = torch.tensor(WRONG[error](chosen[138, 0].tolist()))
    if error in ("future", "repeated", "descending"):
        with pytest.raises(AssertionError, match="block_indices"):
            sampled.agreement(rows, wrong)
    else:
        assert sampled.agreement(rows, wrong).against > 0


def whole_case(
    branches: tuple[str, ...] = BRANCHES, dtype: torch.dtype = torch.float64, **changes: Any
) -> tuple[SampledWhole, dict[str, Tensor], Tensor]:
    """The sampled whole, the reference's out and gradients by name, and dout."""
    config = small(num_heads=6, branches=branches, **changes)
    lengths = BATCHES["packed"]
    x = make_inputs(config, *lengths, dtype=dtype, requires_grad=True)
    batch = make_batch(config, *lengths)
    weights = [
        PhiWeights(**{n: w.to(dtype) for n, w in phi_parameters(batch, size).items()})
        for size in (config.head_dim, config.value_dim)
    ]
    phi = (weights[0], weights[1]) if config.phi != "mean" else None
    leaves = {f.name: getattr(x, f.name) for f in dataclasses.fields(x)}
    if config.compress_rope == "none":
        leaves["q_cmp"] = batch.q().to(dtype).requires_grad_()
    out = native_sparse_attention(**leaves, phi=phi, config=config, rope=ROPE)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    out.backward(dout)
    found = {name: y.grad for name, y in leaves.items() if y.grad is not None}
    plain = {name: y.detach() for name, y in leaves.items()}
    q_cmp = plain.pop("q_cmp", None)
    sampled = SampledWhole(PackedInputs(**plain), config, None, phi, q_cmp, ROPE)
    if "slc" in branches:
        tokens = plain["q"].shape[0]
        k_cmp = sampled.compressed("k", dtype)
        missing = tokens // config.compress_stride - k_cmp.shape[0]
        k_cmp = torch.nn.functional.pad(k_cmp, (0, 0, 0, 0, 0, missing))
        queries = plain["q"] if q_cmp is None else q_cmp
        offsets: dict[str, Any] = {"cu_seqlens_q": x.cu_seqlens_q, "cu_seqlens_k": x.cu_seqlens_k}
        _, lse = compressed_attention(queries, k_cmp, None, config, **offsets)
        chosen = select_blocks(queries, k_cmp, lse, config, **offsets)
        sampled = dataclasses.replace(sampled, block_indices=chosen)
    return sampled, {**found, "out": out.detach()}, dout


@pytest.mark.parametrize(
    ("branches", "changes"),
    [
        (BRANCHES, {}),
        (BRANCHES, {"phi": "linear", "compress_rope": "none"}),
        (("cmp", "win"), {"phi": "mlp"}),
        (("slc",), {}),
    ],
)
def test_whole_equals_the_reference(branches, changes):
    sampled, wanted, dout = whole_case(branches, **changes)
    rows, tokens = shuffled(dout.shape[0], 2), shuffled(dout.shape[0], 5)
    for name, actual in sampled.at_queries(rows, torch.float64, dout).items():
        near(actual, wanted[name][rows].numpy())
    found = sampled.at_tokens(tokens, torch.float64, dout)
    for name, actual in found.items():
        near(actual, wanted[name][tokens].numpy())
    assert len(found) == 2 * len(branches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_of_the_whole(dtype):
    sampled, found, dout = whole_case(dtype=dtype, phi="linear")
    rows = sample_rows(sampled.inputs.cu_seqlens_q, 40)

    def check(**planted: Tensor) -> None:
        of_queries = {name: found[name] for name in ("out", "q", "gates")} | planted
        check_sampled(lambda d: sampled.at_queries(rows, d, dout), of_queries, rows, dtype, "whole")

    check()
    of_keys = {name: gradient for name, gradient in found.items() if name[0] in "kv"}
    check_sampled(lambda d: sampled.at_tokens(rows, d, dout), of_keys, rows, dtype, "whole")
    with pytest.raises(AssertionError, match="whole gates"):
        check(gates=found["gates"].flip(-1))


def test_sampled_rows_hold_the_edges():
    cu = packed_offsets([0, 5, 0, 1000, 3])
    rows = sample_rows(cu, 40)
    assert {0, 4, 5, 1004, 1005, 1007} <= set(rows.tolist())
    assert rows.tolist() == sorted(set(rows.tolist()))
    assert 30 < rows.numel() <= 40
    assert sample_rows(packed_offsets([0, 0]), 4).numel() == 0
    assert sample_rows(packed_offsets([1]), 8).tolist() == [0]


def test_sequences_too_short_for_a_block():
    """No compressed row at all: outputs of the branch are 0, gradients too."""
    x = make_inputs(CONFIG, (5, 0, 7))
    sampled = SampledWhole(x, dataclasses.replace(CONFIG, branches=("cmp",)), None)
    rows, dout = torch.arange(12), torch.ones(12, 6, 32, dtype=torch.float64)
    found = {
        **sampled.at_queries(rows, torch.float64, dout),
        **sampled.at_tokens(rows, torch.float64, dout),
    }
    assert set(found) == {"out", "q", "gates", "k_cmp_raw", "v_cmp_raw"}
    assert all(value.shape[0] == 12 and not bool(value.any()) for value in found.values())
