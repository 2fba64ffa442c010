"""Registration with PyTorch: opcheck of each operator, torch.compile of the whole; any device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from nsa import NSAConfig, Rope, native_sparse_attention
from nsa.ops._plan import PLANS
from nsa.testing import measure
from nsa.testing.budget import FLOOR
from tests.ops.index_loss import check_index_loss
from tests.ops.public import (
    RUNS,
    Case,
    check_combine,
    check_compress,
    check_embed,
    check_project,
    check_selection,
    check_statistics,
    leaves_of,
    named_tensors,
    parameters_of,
    phi_of,
)

Call = tuple[tuple[Any, ...], dict[str, Any]]


def operator_names() -> list[str]:
    """Every operator that the library registers; importing it registers all."""
    return sorted(
        name for name in torch._C._dispatch_get_all_op_names() if name.startswith("nsa::")
    )


class Recorder(TorchDispatchMode):
    """Keeps the arguments of the first call of each operator of the library."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, Call] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = func.name()
        if name.startswith("nsa::") and name not in self.calls:
            # A backward operator is called by autograd, where nothing requires a gradient.
            differentiable = "backward" not in name
            self.calls[name] = (
                tuple(_copy(x, differentiable) for x in args),
                {key: _copy(x, differentiable) for key, x in kwargs.items()},
            )
        return func(*args, **kwargs)


def _copy(x: Any, differentiable: bool) -> Any:
    if isinstance(x, list):
        return [_copy(member, differentiable) for member in x]
    if not isinstance(x, Tensor):
        return x
    copy = x.detach().clone()
    return copy.requires_grad_() if differentiable and copy.dtype.is_floating_point else copy


def record_calls(case: Case, more: Sequence[Case] = ()) -> dict[str, Call]:
    """Arguments of every operator, by public functions on ``case``; ``more`` for ``compress``."""
    recorder = Recorder()
    with recorder:
        for name in ("compressed", "selected", "window", "whole"):
            RUNS[name](case)
        check_selection(case)
        check_combine(case)
        check_statistics(case)
        check_project(case)
        check_embed(case)
        for other in (case, *more):
            check_compress(other)
        check_index_loss(dataclasses.replace(case, lengths_k=(70, 3), lengths_q=(6, 3)))
    return recorder.calls


def check_operator(name: str, call: Call) -> None:
    namespace, short = name.split("::")
    args, kwargs = call
    torch.library.opcheck(
        getattr(getattr(torch.ops, namespace), short.split(".")[0]).default, args, kwargs
    )


def check_plan(name: str, call: Call) -> None:
    """Three calls, of which the later ones use the plan of the first, agree."""
    for plans in PLANS:
        plans.clear()
    operator, found = getattr(torch.ops.nsa, name.removeprefix("nsa::")).default, []
    for _ in range(3):
        args, kwargs = (_copy_all(x) for x in call)
        with torch.no_grad():
            results = operator(*args, **kwargs)
        found.append([x for x in tree_leaves((results, args, kwargs)) if isinstance(x, Tensor)])
        assert sum(map(len, PLANS)) == 1
    for others in found[1:]:
        for x, y in zip(found[0], others, strict=True):
            # Rows that no block is made of are not a number, in some arguments.
            assert torch.allclose(x, y, rtol=0, atol=0, equal_nan=True)
            assert x.stride() == y.stride()


def _copy_all(x: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), x)


def whole_of(config: NSAConfig, backend: str) -> Any:
    """The whole with everything but tensors fixed: what a training step compiles."""
    rope = Rope.from_config(config)

    def run(tensors: dict[str, Tensor], cu_seqlens: Tensor) -> Tensor:
        given: Any = {name: x for name, x in tensors.items() if not name.startswith("phi_")}
        if config.share_kv:
            given |= {"k_win": given["k_slc"], "v_win": given["v_slc"]}
        offsets: Any = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        options: Any = {"config": config, "rope": rope, "backend": backend}
        return native_sparse_attention(**given, phi=phi_of(tensors), **options, **offsets)

    return run


def tensors_of(case: Case) -> tuple[dict[str, Tensor], Tensor]:
    """Leaves of the whole by name, parameters of phi included, and cu_seqlens."""
    x = case.inputs()
    named = named_tensors(x) | parameters_of(case)
    if case.config.share_kv:
        del named["k_win"], named["v_win"]
    return dict(zip(named, leaves_of(*named.values()), strict=True)), x.cu_seqlens_q


def run_with_gradients(function: Any, case: Case, mark: bool = False) -> dict[str, Tensor]:
    tensors, cu_seqlens = tensors_of(case)
    if mark:
        for name, leaf in tensors.items():
            if not name.startswith("phi_"):
                torch._dynamo.mark_dynamic(leaf, 0)
    out = function(tensors, cu_seqlens)
    out.backward(case.normal(*out.shape, seed=3))
    grads = {name: leaf.grad for name, leaf in tensors.items() if leaf.grad is not None}
    assert grads.keys() == tensors.keys()
    return {"out": out.detach(), **grads}


def check_compiled(cases: Sequence[Case], compiler: str) -> None:
    """One graph without breaks gives the eager result, forward and backward, for all lengths.

    Cases differ in lengths alone. The number of tokens is marked as varying, so that the first
    graph already serves all.
    """
    torch.compiler.reset()
    eager = whole_of(cases[0].config, cases[0].backend)
    compiled = torch.compile(eager, fullgraph=True, backend=compiler)
    for index, case in enumerate(cases):
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            found = run_with_gradients(compiled, case, mark=True)
        for name, wanted in run_with_gradients(eager, case).items():
            # A compiler may add up the branches' shares of dQ before it rounds; everything else is
            # made by our operators.
            close = name == "q" and measure(found[name], wanted.double()).total <= FLOOR[case.dtype]
            assert close or torch.equal(found[name], wanted), (
                f"compiled: {name} differs at lengths {case.lengths_k}"
            )
