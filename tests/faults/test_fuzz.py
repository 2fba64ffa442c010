"""Fuzzing of function, module and cache: a result equal to the oracle's, or an error that says what
is wrong; nothing else.

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
from tests.ops.cases import Batch, array, make_batch, near, offsets
from tests.ops.test_bad_input import BAD_OFFSETS, BAD_VALUES, LENGTH

WIDTH = 24
MESSAGE = re.compile(r"\w.* must .+, got .+", re.DOTALL)
PATTERNS = [(8, 4, 16), (4, 4, 16), (16, 4, 16), (8, 8, 16), (16, 8, 32), (32, 16, 32), (12, 4, 16)]
SUBSETS = [("cmp", "slc"), ("slc", "win"), ("cmp", "win"), *((branch,) for branch in BRANCHES)]
SCALINGS = [RopeScaling("linear", 2.5), RopeScaling("yarn", 4.0, 64)]
# Values of fields, by their type; some of them fit.
ODD: dict[type, list[Any]] = {
    int: [0, -1, 1, 3, 5, 24, 99, 300],
    float: [0.0, -1.0, 1.0, math.inf, math.nan],
    str: ["", "other"],
}
TENSOR_MISTAKES: dict[str, Callable[[Tensor], Any]] = {
    "a token less": lambda x: x[:-1],
    "a token more": lambda x: torch.cat([x, x[:1]]),
    "another dtype": lambda x: x.float() if x.dtype != torch.float32 else x.double(),
    "integers": lambda x: x.long(),
    "one dimension less": lambda x: x[..., 0],
    "two dimensions more": lambda x: x[None, None],
    "last dimension shorter": lambda x: x[..., :-1],
    "middle dimension longer": lambda x: torch.cat([x, x], 1),
}


@dataclasses.dataclass
class Case:
    """One call. ``run`` takes the arguments, ``expected`` gives what the oracle says.

    Of the arguments ``expected`` reads ``x`` alone, which may be replaced by another valid one.
    """

    arguments: dict[str, Any]
    run: Callable[[dict[str, Any]], Tensor]
    expected: Callable[[dict[str, Any]], np.ndarray]


@st.composite
def fields(draw: st.DrawFn) -> dict[str, Any]:
    length, stride, block_size = draw(st.sampled_from(PATTERNS))
    init, local, kv_heads = (draw(st.integers(*bounds)) for bounds in ((0, 1), (1, 2), (1, 2)))
    more = draw(st.integers(0, 1))
    table = ((-1, 25, init + local), (-1, 40, init + local + more))
    return {
        "num_heads": kv_heads * draw(st.integers(1, 3)),
        "num_kv_heads": kv_heads,
        "head_dim": draw(st.sampled_from([16, 16, 32])),
        "value_dim": draw(st.sampled_from([16, 16, 48])),
        "compress_block_size": length,
        "compress_stride": stride,
        "block_size": block_size,
        "num_selected_blocks": init + local + more,
        "num_selected_blocks_table": draw(st.sampled_from([(), (), (), table])),
        "num_init_blocks": init,
        "num_local_blocks": local,
        "window_size": draw(st.sampled_from([1, 5, 16, 40])),
        "branches": draw(st.sampled_from([BRANCHES, BRANCHES, BRANCHES, *SUBSETS])),
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
    """Mostly one sequence longer than the selected blocks, among up to two others."""
    covered = config.num_selected_blocks * config.block_size
    long, short = st.integers(covered + 1, covered + 24), st.integers(1, min(covered, 200))
    lengths_k = draw(st.lists(st.integers(0, 20), max_size=2))
    longest = draw(st.one_of(long, long, long, long, short))
    lengths_k.insert(draw(st.integers(0, len(lengths_k))), longest)
    lengths_q = [draw(st.one_of(st.just(n), st.just(n), st.integers(0, n))) for n in lengths_k]
    return make_batch(config, lengths_k, lengths_q, seed=draw(st.integers(0, 2**31)))


def function_case(batch: Batch) -> Case:
    config, inputs = batch.config, whole.make(batch)
    phi = [nsa.PhiWeights(**weights) for weights in (inputs.phi_k, inputs.phi_v)]
    arguments = {
        **inputs.tensors,
        "phi": tuple(phi) if inputs.phi_k else None,
        "config": config,
        "q_cmp": inputs.q_cmp,
        "rope": Rope.from_config(config),
        **batch.kwargs,
    }
    return Case(
        arguments,
        lambda changed: nsa.native_sparse_attention(**changed),
        lambda _: whole.run_oracle(batch, inputs)[0],
    )


def layer_case(batch: Batch, *, cached: bool) -> Case:
    """The module over packed sequences, or one sequence in chunks and steps through the cache."""
    config, generator = batch.config, torch.Generator().manual_seed(int(batch.rng.integers(2**31)))
    module = nsa.NativeSparseAttention(WIDTH, config).double().requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(std=parameter[0].numel() ** -0.5, generator=generator)
    lengths = (max(batch.lengths_k),) if cached else batch.lengths_k
    x, cu = batch.normal(sum(lengths), WIDTH), offsets(lengths)

    def run(changed: dict[str, Any]) -> Tensor:
        if not cached:
            return module(changed["x"], cu_seqlens=changed["cu_seqlens"])
        cache = NSACache(config, 1, max_tokens=max(len(changed["x"]), 1)).layers[0]
        tokens = changed["x"]
        half, steps = len(tokens) // 2, min(2, len(tokens) // 2)
        parts = tokens.split([half, len(tokens) - half - steps, *[1] * steps])
        return torch.cat([module(part, cache=cache) for part in parts])

    def expected(changed: dict[str, Any]) -> np.ndarray:
        weights = {name: array(value) for name, value in module.state_dict().items()}
        tokens = array(changed["x"])
        bounds = [0, len(tokens)] if cached else cu.tolist()
        parts = [
            oracle.layer(weights, tokens[a:b], config)
            for a, b in itertools.pairwise(bounds)
            if b > a
        ]
        return np.concatenate([np.empty((0, WIDTH)), *parts])

    return Case({"x": x} if cached else {"x": x, "cu_seqlens": cu}, run, expected)


MAKERS: dict[str, Callable[[Batch], Case]] = {
    "function": function_case,
    "module": lambda batch: layer_case(batch, cached=False),
    "cache": lambda batch: layer_case(batch, cached=True),
}


def make_mistake(draw: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Change one argument of the call."""
    names = [name for name, value in arguments.items() if isinstance(value, Tensor)]
    name = draw(st.sampled_from(names + list(BAD_VALUES) * ("q" in arguments)))
    if name in BAD_VALUES:
        values = [x for x in BAD_VALUES[name] if x != LENGTH - 1]
        arguments[name] = draw(st.sampled_from(values))
        return
    known = BAD_OFFSETS if name.startswith("cu_seqlens") else TENSOR_MISTAKES
    arguments[name] = known[draw(st.sampled_from(sorted(known)))](arguments[name])


def refuses(action: Callable[[], Any]) -> bool:
    """Whether the action ends in an error of the right form; any other error is raised."""
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
        name = data.draw(st.sampled_from([name for name in values if type(values[name]) in ODD]))
        values[name] = data.draw(st.sampled_from(ODD[type(values[name])]))
        if refuses(lambda: NSAConfig(**values)):
            counts["refused"] += 1
            return
    config = NSAConfig(**values)
    batch = data.draw(batches(config))
    maker = data.draw(st.sampled_from(["function", *MAKERS]), label="called")
    case = MAKERS[maker](batch)
    if where == "call":
        make_mistake(data.draw, case.arguments)
    result: list[Tensor] = []
    if refuses(lambda: result.append(case.run(case.arguments))):
        assert where == "call"
        counts["refused"] += 1
        return
    # An argument that was changed is one that this call does not read, or is valid too, and maybe
    # rounded.
    dtypes = {x.dtype for x in case.arguments.values() if isinstance(x, Tensor)}
    near(result[0], case.expected(case.arguments), 1e-5 if torch.float32 in dtypes else 2e-11)
    is_sparse = max(batch.lengths_k) > config.num_selected_blocks * config.block_size
    counts["valid"] += 1
    counts["sparse"] += is_sparse


def fuzz(count: Any, number: int, part: int) -> Counter[str]:
    """So many cases, others for each part."""
    counts: Counter[str] = Counter()

    @seed(part)
    @settings(max_examples=number, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        check_case(data, counts)

    run()
    total = counts["valid"] + counts["refused"]
    sparse = counts["sparse"]
    count("fuzzing", total, total, valid=counts["valid"], longer_than_the_selected_blocks=sparse)
    return counts


def test_fuzz(count):
    counts = fuzz(count, 60, part=0)
    assert counts["valid"] >= 30
    assert counts["sparse"] >= 20
    assert counts["refused"] >= 5


@pytest.mark.faults
@pytest.mark.parametrize("part", range(1, 9))
def test_fuzz_2000_cases(count, part):
    """At least 1,200 cases are valid, and 800 longer than the selected blocks."""
    counts = fuzz(count, 320, part)
    assert counts["valid"] + counts["refused"] >= 2000 / 8
    assert counts["valid"] >= 1200 / 8
    assert counts["sparse"] >= 800 / 8
