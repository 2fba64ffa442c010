"""Fuzzing of the public functions: a result equal to the oracle's, or an error that says what is wrong; nothing else.

A case is drawn without a mistake, and must then be accepted and right, or with one (a field of the
configuration, an argument of the call), and must then be refused in the form of every error
message, unless the mistake changes nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

import nsa
from nsa import NSACache, NSAConfig, Rope
from nsa.config import BRANCHES, RopeScaling
from nsa.errors import UserError
from tests import oracle
from tests.ops import whole
from tests.ops.cases import Batch, array, make_batch, near, offsets, stack

WIDTH = 24
MESSAGE = re.compile(r"[\w.]+: .+ must .+, got .+", re.DOTALL)
PATTERNS = [
    (8, 4, 16),
    (4, 4, 16),
    (16, 4, 16),
    (8, 8, 16),
    (16, 16, 16),
    (16, 8, 32),
    (32, 16, 32),
    (12, 4, 16),
]
SUBSETS = [
    BRANCHES,
    BRANCHES,
    BRANCHES,
    ("cmp", "slc"),
    ("slc", "win"),
    ("cmp", "win"),
    ("cmp",),
    ("slc",),
    ("win",),
]
SCALINGS = [
    RopeScaling("linear", 2.5),
    RopeScaling("yarn", 4.0, 64),
    RopeScaling("yarn", 2.0, 300, 8.0, 0.5),
]
WRONG_FIELDS: dict[str, list[Any]] = {
    "num_heads": [0, -2, 5, 130],
    "num_kv_heads": [0, -1, 3],
    "head_dim": [0, -16, 8, 24, 272],
    "value_dim": [0, 20, 512],
    "compress_block_size": [0, -8, 7, 256],
    "compress_stride": [0, -4, 1, 3, 6],
    "block_size": [0, 8, 24, 48, 256],
    "num_selected_blocks": [0, -1, 1],
    "num_init_blocks": [-1, 99],
    "num_local_blocks": [0, -1, 99],
    "window_size": [0, -5],
    "branches": [(), ("win", "win"), ("dense",)],
    "phi": ["max", ""],
    "compress_hidden_size": [0, -3],
    "compress_rope": ["end"],
    "gate": ["relu"],
    "gate_hidden_size": [-1],
    "gate_temperature": [0.0, -1.0, math.inf, math.nan],
    "num_selected_blocks_table": [
        ((0, 1),),
        ((-2, 5, 2),),
        ((-1, 0, 2),),
        ((-1, 9, 99),),
        ((-1, 9, 0),),
    ],
    "coarse_block_size": [0, -64, 8, 16, 48, 96],
    "num_coarse_blocks": [-1, 3],
    "score_precision": ["fp4", ""],
    "rope_theta": [0.0, -1.0, 1.0, math.inf, math.nan],
    "rotary_dim": [0, 3, -2, 512],
}


@dataclasses.dataclass
class Case:
    """One call. ``run`` takes the arguments, ``expected`` gives what the oracle says.

    Of the arguments ``expected`` looks at ``x`` alone, which may be changed into another one that
    is as good.
    """

    function: str
    batch: Batch
    arguments: dict[str, Any]
    run: Callable[[dict[str, Any]], Tensor]
    expected: Callable[[dict[str, Any]], np.ndarray]

    @property
    def is_sparse(self) -> bool:
        """Whether a sequence is longer than what the chosen blocks cover."""
        config = self.batch.config
        return max(self.batch.lengths_k) > config.num_selected_blocks * config.block_size


# ------------------------------------------------------------------------------------------------------------
# drawing


@st.composite
def fields(draw: st.DrawFn) -> dict[str, Any]:
    l, d, l_sel = draw(st.sampled_from(PATTERNS))
    init, local, kv_heads = (
        draw(st.integers(0, 1)),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 2)),
    )
    return {
        "num_heads": kv_heads * draw(st.integers(1, 3)),
        "num_kv_heads": kv_heads,
        "head_dim": draw(st.sampled_from([16, 16, 32])),
        "value_dim": draw(st.sampled_from([16, 16, 48])),
        "compress_block_size": l,
        "compress_stride": d,
        "block_size": l_sel,
        "num_selected_blocks": init + local + (more := draw(st.integers(0, 1))),
        "num_selected_blocks_table": draw(
            st.sampled_from([(), (), (), ((-1, 25, init + local), (-1, 40, init + local + more))])
        ),
        "num_init_blocks": init,
        "num_local_blocks": local,
        "window_size": draw(st.sampled_from([1, 5, 16, 40])),
        "branches": draw(st.sampled_from(SUBSETS)),
        "share_kv": draw(st.booleans()),
        "phi": draw(st.sampled_from(["mean", "linear", "mlp"])),
        "compress_hidden_size": draw(st.sampled_from([None, 3])),
        "compress_rope": draw(st.sampled_from(["middle", "start", "none"])),
        "gate": draw(st.sampled_from(["sigmoid", "softmax", "fixed"])),
        "gate_hidden_size": draw(st.sampled_from([0, 5])),
        "rope_theta": 256.0,
        "rotary_dim": draw(st.sampled_from([None, 8])),
        "rope_scaling": draw(st.sampled_from([None, None, *SCALINGS])),
    }


@st.composite
def batches(draw: st.DrawFn, config: NSAConfig) -> Batch:
    """Mostly one sequence longer than the chosen blocks, among up to two others."""
    covered = config.num_selected_blocks * config.block_size
    lengths_k = draw(st.lists(st.integers(0, 20), max_size=2))
    longest = draw(
        st.one_of(*[st.integers(covered + 1, covered + 24)] * 4, st.integers(1, covered))
    )
    lengths_k.insert(draw(st.integers(0, len(lengths_k))), longest)
    lengths_q = [draw(st.one_of(st.just(n), st.just(n), st.integers(0, n))) for n in lengths_k]
    return make_batch(config, lengths_k, lengths_q, seed=draw(st.integers(0, 2**31)))


def call(function: str) -> Callable[[dict[str, Any]], Tensor]:
    def run(arguments: dict[str, Any]) -> Tensor:
        result = getattr(nsa, function)(**arguments)
        return result[0] if isinstance(result, tuple) else result

    return run


def whole_case(batch: Batch) -> Case:
    config, inputs = batch.config, whole.make(batch)
    arguments = {
        **inputs.tensors,
        "phi": (nsa.PhiWeights(**inputs.phi_k), nsa.PhiWeights(**inputs.phi_v))
        if inputs.phi_k
        else None,
        "config": config,
        "q_cmp": inputs.q_cmp,
        "rope": Rope.from_config(config),
        **batch.kwargs,
    }
    return Case("native_sparse_attention", batch, arguments, call("native_sparse_attention"),
                lambda _: whole.run_oracle(batch, inputs)[0])  # fmt: skip


def branch_case(batch: Batch, function: str) -> Case:
    config = batch.config
    l, d, l_sel, w = (
        config.compress_block_size,
        config.compress_stride,
        config.block_size,
        config.window_size,
    )
    q, k, v, ids = batch.q(), batch.k(), batch.v(), batch.block_indices()
    if function == "compressed_attention":
        keys, values = batch.compressed(config.head_dim), batch.compressed(config.value_dim)
        names = {"k_cmp": keys, "v_cmp": values}
    else:
        keys, values, names = k, v, {"k": k, "v": v}
    arguments = {"q": q, **names, "config": config, **batch.kwargs}
    if function == "selected_attention":
        arguments["block_indices"] = ids

    def expected(_: dict[str, Any]) -> np.ndarray:
        def one(rows: slice, tokens: slice, compressed: slice) -> tuple[np.ndarray]:
            num_q, num_k = rows.stop - rows.start, tokens.stop - tokens.start
            visible = {
                "window_attention": oracle.visible_win(num_q, num_k, w),
                "compressed_attention": oracle.visible_cmp(num_q, num_k, l, d),
                "selected_attention": oracle.visible_slc(num_q, num_k, array(ids)[rows], l_sel),
            }[function]
            part = compressed if function == "compressed_attention" else tokens
            return (
                oracle.attention(array(q)[rows], array(keys)[part], array(values)[part], visible)[
                    0
                ],
            )

        return stack(batch, one)[0]

    return Case(function, batch, arguments, call(function), expected)


def choice_case(batch: Batch) -> Case:
    config, q, k_cmp = batch.config, batch.q(), batch.compressed(batch.config.head_dim)
    sizes = (config.compress_block_size, config.compress_stride, config.block_size)
    _, lse = nsa.compressed_attention(q, k_cmp, None, config, **batch.kwargs)
    arguments = {"q": q, "k_cmp": k_cmp, "lse": lse, "config": config, **batch.kwargs}
    table = [(length, n) for _, length, n in config.num_selected_blocks_table]
    chosen = (
        config.num_selected_blocks,
        config.num_init_blocks,
        config.num_local_blocks,
        config.block_size,
        table,
    )

    def one(rows: slice, tokens: slice, compressed: slice) -> tuple[np.ndarray]:
        num_k = tokens.stop - tokens.start
        scores = oracle.block_scores(array(q)[rows], array(k_cmp)[compressed], num_k, *sizes)
        return (oracle.choose(scores, num_k, *chosen),)

    return Case(
        "select_blocks", batch, arguments, call("select_blocks"), lambda _: stack(batch, one)[0]
    )


def compress_case(batch: Batch) -> Case:
    config, x = batch.config, batch.k()
    phi = whole.phi_parameters(batch, config.head_dim)
    weights = {name: array(value) for name, value in phi.items()}
    arguments = {"x": x, "weights": nsa.PhiWeights(**phi) if phi else None, "config": config,
                 "cu_seqlens": batch.kwargs["cu_seqlens_k"]}  # fmt: skip

    def run(changed: dict[str, Any]) -> Tensor:
        y, cu = nsa.compress(**changed)
        return y[: int(cu[-1])]

    def expected(changed: dict[str, Any]) -> np.ndarray:
        def one(rows: slice, tokens: slice, compressed: slice) -> tuple[np.ndarray]:
            part = array(changed["x"].double())[tokens]
            return (
                oracle.compress(
                    part, config.compress_block_size, config.compress_stride, config.phi, weights
                ),
            )

        return stack(batch, one)[0]

    return Case("compress", batch, arguments, run, expected)


def layer_case(batch: Batch, *, cached: bool) -> Case:
    """The module over packed sequences, or one sequence in two chunks and steps through the decode cache."""
    config, generator = batch.config, torch.Generator().manual_seed(int(batch.rng.integers(2**31)))
    module = nsa.NativeSparseAttention(WIDTH, config).double().requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(std=parameter[0].numel() ** -0.5, generator=generator)
    lengths = (max(batch.lengths_k),) if cached else batch.lengths_k
    x, cu = batch.normal(sum(lengths), WIDTH), offsets(lengths)

    def run(changed: dict[str, Any]) -> Tensor:
        if not cached:
            return module(changed["x"], cu_seqlens=changed["cu_seqlens"])
        cache = NSACache(config, num_layers=1, batch_size=1).layers[0]
        tokens = changed["x"]
        first, second = (
            tokens.shape[0] // 2,
            tokens.shape[0] - tokens.shape[0] // 2 - min(2, tokens.shape[0] // 2),
        )
        parts = tokens.split([first, second, *[1] * (tokens.shape[0] - first - second)])
        return torch.cat([module(part, cache=cache) for part in parts])

    def expected(changed: dict[str, Any]) -> np.ndarray:
        weights, tokens = (
            {name: array(value) for name, value in module.state_dict().items()},
            array(changed["x"]),
        )
        bounds = [0, len(tokens)] if cached else cu.tolist()
        parts = [
            oracle.layer(weights, tokens[a:b], config)
            for a, b in itertools.pairwise(bounds)
            if b > a
        ]
        return np.concatenate([np.empty((0, WIDTH)), *parts])

    arguments = {"x": x} if cached else {"x": x, "cu_seqlens": cu}
    return Case("NSACache" if cached else "NativeSparseAttention", batch, arguments, run, expected)


MAKERS: dict[str, Callable[[Batch], Case]] = {
    "native_sparse_attention": whole_case,
    "window_attention": lambda batch: branch_case(batch, "window_attention"),
    "compressed_attention": lambda batch: branch_case(batch, "compressed_attention"),
    "selected_attention": lambda batch: branch_case(batch, "selected_attention"),
    "select_blocks": choice_case,
    "compress": compress_case,
    "NativeSparseAttention": lambda batch: layer_case(batch, cached=False),
    "NSACache": lambda batch: layer_case(batch, cached=True),
}

# -----------------------------------------------------------------------------------------------------------
# mistakes

TENSOR_MISTAKES: dict[str, Callable[[Tensor], Any]] = {
    "a token less": lambda x: x[:-1],
    "a token more": lambda x: torch.cat([x, x[:1]]),
    "another dtype": lambda x: x.float() if x.dtype != torch.float32 else x.double(),
    "integers": lambda x: x.long() if x.is_floating_point() else x.double(),
    "one dimension less": lambda x: x[..., 0],
    "two dimensions more": lambda x: x[None, None],
    "last dimension shorter": lambda x: x[..., :-1],
    "middle dimension longer": lambda x: torch.cat([x, x], 1) if x.ndim > 1 else torch.cat([x, x]),
}
OFFSET_MISTAKES: dict[str, Callable[[Tensor], Any]] = {
    "int64": lambda cu: cu.long(),
    "starts at 1": lambda cu: cu + 1,
    "ends one later": lambda cu: torch.cat([cu[:-1], cu[-1:] + 1]),
    "falls": lambda cu: torch.cat([cu, cu[-1:] - 1, cu[-1:]]),
    "one entry": lambda cu: cu[:1],
    "two dimensions": lambda cu: cu[None],
    "float": lambda cu: cu.float(),
}
OTHER_MISTAKES: dict[str, Any] = {
    "softmax_scale": [0.0, -1.0, math.nan, math.inf],
    "max_seqlen_q": [-1, 0],
    "max_seqlen_k": [-1, 0],
    "backend": ["cuda", ""],
}


def make_mistake(draw: Callable[..., Any], case: Case) -> None:
    """Change one argument of the call."""
    options = [name for name, value in case.arguments.items() if isinstance(value, Tensor)]
    if "q" in case.arguments:
        options += list(OTHER_MISTAKES)
    name = draw(st.sampled_from(options))
    if name in OTHER_MISTAKES:
        case.arguments[name] = draw(st.sampled_from(OTHER_MISTAKES[name]))
        return
    known = OFFSET_MISTAKES if name.startswith("cu_seqlens") else TENSOR_MISTAKES
    # Compressed keys do not tell how many tokens they stand for: one more is another call, and as
    # good.
    undetectable = (
        {"ends one later"} if name == "cu_seqlens_k" and "k_cmp" in case.arguments else set()
    )
    what = draw(st.sampled_from(sorted(known.keys() - undetectable)))
    case.arguments[name] = known[what](case.arguments[name])


# -----------------------------------------------------------------------------------------------------------
# checking


def refuses(action: Callable[[], Any]) -> bool:
    """Whether the action ends in an error of the right form; any other error comes through."""
    try:
        action()
    except UserError as error:
        message = str(error)
    else:
        return False
    assert MESSAGE.fullmatch(message), message
    return True


def check_case(data: st.DataObject, counts: Counter[str]) -> None:
    """Draw a case, run it, judge it, count it."""
    values = data.draw(fields())
    where = data.draw(st.sampled_from(["nothing"] * 6 + ["config", "call"]), label="mistake in")
    if where == "config":
        name = data.draw(st.sampled_from(sorted(WRONG_FIELDS)))
        values[name] = data.draw(st.sampled_from(WRONG_FIELDS[name]))
        if refuses(lambda: NSAConfig(**values)):
            counts["refused"] += 1
            return
    config = NSAConfig(**values)
    batch = data.draw(batches(config))
    case = MAKERS[
        data.draw(st.sampled_from(["native_sparse_attention", *MAKERS]), label="function")
    ](batch)
    if where == "call":
        make_mistake(data.draw, case)
        result: list[Tensor] = []
        if refuses(lambda: result.append(case.run(case.arguments))):
            counts["refused"] += 1
            return
        # The changed argument is one that this call does not read, or as good as the one before,
        # maybe rounded.
        rounded = any(
            isinstance(value, Tensor) and value.dtype == torch.float32
            for value in case.arguments.values()
        )
        near(result[0], case.expected(case.arguments), 1e-5 if rounded else 2e-11)
        counts["unread"] += 1
        return
    near(case.run(case.arguments), case.expected(case.arguments), 2e-11)
    counts["valid"] += 1
    counts["sparse" if case.is_sparse else "covered"] += 1


def fuzz(number: int, part: int) -> Counter[str]:
    """So many cases, others for each part."""
    counts: Counter[str] = Counter()

    @seed(part)
    @settings(
        max_examples=number, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        check_case(data, counts)

    run()
    return counts


def test_fuzz(count) -> None:
    counts = fuzz(60, part=0)
    number = counts["valid"] + counts["refused"] + counts["unread"]
    count(
        "fuzzing",
        number,
        number,
        valid=counts["valid"],
        longer_than_the_chosen_blocks=counts["sparse"],
    )
    assert counts["valid"] >= 30
    assert counts["sparse"] >= 20
    assert counts["refused"] >= 5


PARTS, CASES = 8, 320


@pytest.mark.faults
@pytest.mark.parametrize("part", range(1, PARTS + 1))
def test_fuzz_2000_cases(count, part: int) -> None:
    """At least 2,000 in all, 1,200 of them valid, 800 of these longer than the chosen blocks: a share of each here."""
    counts = fuzz(CASES, part)
    number = counts["valid"] + counts["refused"] + counts["unread"]
    count(
        "fuzzing",
        number,
        number,
        valid=counts["valid"],
        longer_than_the_chosen_blocks=counts["sparse"],
    )
    assert number >= 2000 / PARTS
    assert counts["valid"] >= 1200 / PARTS
    assert counts["sparse"] >= 800 / PARTS
