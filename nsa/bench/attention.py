"""``nsa bench attention``: a row for each implementation, case and mode.

The result is checked first; then kernels, peak memory and time of the same call are measured.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import nsa.ops
from nsa.bench.cases import (
    BRANCHES,
    CASES,
    Case,
    Point,
    Problem,
    Tensors,
    make_tensors,
    prepare,
    shares_keys,
    useful_work,
)
from nsa.bench.clock import Fields, Subject, UnsupportedError, measure, time_call
from nsa.bench.gate import Gate, approximates
from nsa.bench.report import Results
from nsa.config import NSAConfig
from nsa.errors import check, nearest, nearest_hint
from nsa.ops._backend import kernels_run_on_cpu

MIN_LENGTH = 128
# Kernels of other libraries and of the compiler: matrix products, softmax and attention.
_FOREIGN = re.compile(
    r"gemm|gemv|cutlass|cudnn|flash|fmha|sdpa|softmax|nvjet|xmma|triton_(tem|poi|red|per)_",
    re.I,
)

# Branches of which one is on if kernels with this beginning of their names run.
_NEEDED_BY = {
    "compress": {"cmp"},
    "range": {"cmp", "win"},
    "select": {"slc"},
    "selected": {"slc"},
}


@dataclass(frozen=True)
class Work:
    """One computation, prepared for repeated calls.

    Attributes:
        forward: computes the output, or a tuple of outputs.
        leaves: tensors whose gradients are computed, by name; empty without a backward pass.
        douts: gradients of the outputs, by name of the output.
        make: the part of the forward pass that prepares a selection, if it is separate.
        attend: the rest of the forward pass.
    """

    forward: Callable[[], Any]
    leaves: Tensors
    douts: Tensors
    make: Callable[[], Any] | None = None
    attend: Callable[[Any], Tensor] | None = None

    def run(self) -> Tensors:
        """Compute the outputs, and the gradients by ``d`` and the name of the leaf."""
        with torch.set_grad_enabled(bool(self.leaves)):
            out = self.forward()
        outs = out if isinstance(out, tuple) else (out,)
        found = dict(zip(self.douts, outs, strict=True))
        if self.leaves:
            given = tuple(self.leaves.values()), tuple(self.douts.values())
            gradients = torch.autograd.grad(outs, *given)
            found |= zip((f"d{name}" for name in self.leaves), gradients, strict=True)
        return found


@dataclass(frozen=True)
class Provider:
    """An implementation that is measured.

    Attributes:
        name: name in rows.
        cases: names of the cases that it computes.
        backend: backend of this library's operators.
        variant: changed fields of the pattern.
        attend: factory of a PyTorch attention over ``[B, H, S, D]``; whole attention is then dense
            over q, k_slc, v_slc. None means this library.
        consume: preparation from block indices, and attention over ``[B, S, H, D]`` with its
            result, see :mod:`nsa.bench.consumers`.
        kernels: parts of the names of PyTorch's kernels, forward and backward, one kernel for each
            part; None means the kernels of this library.
    """

    name: str
    cases: Sequence[str] = tuple(CASES)
    backend: str = "triton"
    variant: Mapping[str, Any] = field(default_factory=dict)
    attend: Callable[[Problem], Callable[..., Tensor]] | None = None
    consume: tuple[Callable[..., Any], Callable[..., Tensor]] | None = None
    kernels: tuple[tuple[str, ...], tuple[str, ...]] | None = None

    def work(self, problem: Problem, mode: str) -> Work:
        """Prepare a problem; the leaves are its inputs, without a copy.

        Raises:
            UnsupportedError: the provider needs a GPU.
        """
        case, tensors, config = problem.case, problem.tensors, problem.point.config
        names = case.inputs
        if self.attend is not None:
            branch = "win" if case.name == "attention.window" else "slc"
            names = ("q", f"k_{branch}", f"v_{branch}")
        elif case.is_whole:  # without those of branches that are off
            own = {*config.branches, "idx"} - {"win" if shares_keys(config) else ""}
            names = tuple(x for x in names if {*x.split("_")[1:2]} <= own)
        # FlexAttention on a CPU refuses inputs with gradients.
        needs_grad = mode == "fwd_bwd"
        inputs = {name: tensors[name].detach().requires_grad_(needs_grad) for name in names}
        leaves = inputs if needs_grad else {}
        douts = {name: tensors[f"d{name}"] for name in case.outputs}
        if self.consume is not None:
            torch.compiler.reset()  # compile each point separately, with static shapes
            make = partial(self.consume[0], tensors["block_indices"], config)
            attend = partial(self.consume[1], *inputs.values(), config)
            return Work(lambda: attend(make()), leaves, douts, make, attend)
        compiles = self.attend is None and kernels_run_on_cpu()
        on_gpu = problem.point.device.type == "cuda"
        if not (on_gpu or compiles or self.backend == "reference"):
            raise UnsupportedError("it needs a CUDA GPU")
        if self.attend is not None:
            q, k, v = (x.transpose(1, 2) for x in inputs.values())
            dense = self.attend(problem)
            return Work(lambda: dense(q, k, v).transpose(1, 2), leaves, douts)
        call = partial(case.call, {**tensors, **inputs}, config, self.backend)
        return Work(call, leaves, douts)

    def fault(self, kernels: Sequence[str], case: Case, mode: str) -> str | None:
        """Reason why the profiled kernels are not the provider's, or None."""
        if self.kernels is not None:
            return missing_kernel(kernels, self.kernels, mode)
        ours = own(kernels)
        if self.backend == "reference":
            return f"{ours[0]} of this library ran in the reference" if ours else None
        foreign = [name for name in kernels if name not in ours and _FOREIGN.search(name)]
        said = f"{foreign[0]} ran, which is not of this library" if foreign else None
        first, second = case.kernels
        if case.is_whole:  # without those of branches that are off
            branches = {*self.variant.get("branches", BRANCHES.values())}
            off = {name for name, needed in _NEEDED_BY.items() if not needed & branches}
            first = tuple(x for x in first if x.partition("_")[0] not in off)
            second = tuple(x for x in second if x.partition("_")[0] not in off)
        return missing_kernel(ours, (first, second), mode) or said


def missing_kernel(
    kernels: Sequence[str], parts: tuple[tuple[str, ...], tuple[str, ...]], mode: str
) -> str | None:
    """Return a name part, forward or backward, that too few kernels contain, or None."""
    wanted = parts[0] + (parts[1] if mode == "fwd_bwd" else ())
    for part in wanted:
        if sum(part in name.lower() for name in kernels) < wanted.count(part):
            return f"no kernel with {part} in its name ran, or too few"
    return None


@cache
def own_kernels() -> Mapping[str, Any]:
    """All Triton kernels of this library by name."""
    from triton.runtime.jit import KernelInterface

    names = (module.name for module in pkgutil.walk_packages(nsa.ops.__path__, "nsa.ops."))
    found = (value for name in names for value in vars(importlib.import_module(name)).values())
    kernels = {each.__name__: each for each in found if isinstance(each, KernelInterface)}
    return {name: each for name, each in kernels.items() if name.endswith("_kernel")}


def own(kernels: Iterable[str]) -> list[str]:
    """Filter the kernels of this library; a branch may follow ``_kernel`` in their names."""
    return [name for name in kernels if "".join(name.partition("_kernel")[:2]) in own_kernels()]


def dense_attention(backend: SDPBackend) -> Callable[[Problem], Callable[..., Tensor]]:
    """Causal grouped-query ``scaled_dot_product_attention`` with one backend."""
    attend: Callable[..., Tensor] = sdpa_kernel(backend)(scaled_dot_product_attention)
    return lambda problem: partial(attend, is_causal=True, enable_gqa=True)


def flex_attention(problem: Problem) -> Callable[..., Tensor]:
    """Compiled FlexAttention: the window, or dense causal attention for whole attention."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    windowed, size = "window" in problem.case.name, problem.point.config.window_size

    def visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        causal = key <= row
        return causal & (row - key < size) if windowed else causal

    torch.compiler.reset()  # compile each point separately, with static shapes
    length, device = problem.point.seq_len, problem.point.device
    mask = create_block_mask(visible, None, None, length, length, device=device)
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return partial(compiled, block_mask=mask, enable_gqa=True)


_CUDNN, _FA2 = map(dense_attention, (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION))
_WHOLE, _TEMPLATE = ("attention",), ("triton_tem",)
_FLEX: dict[str, Any] = {"attend": flex_attention, "kernels": (_TEMPLATE, _TEMPLATE)}
_PROVIDERS = (
    Provider("nsa"),
    Provider("dense-cudnn", _WHOLE, attend=_CUDNN, kernels=(("cudnn",), ())),
    Provider("dense-fa2", _WHOLE, attend=_FA2, kernels=(("flash_fwd",), ("flash_bwd",))),
    Provider("flex", (*_WHOLE, "attention.window"), **_FLEX),
    Provider("reference", backend="reference"),
)
PROVIDERS = {each.name: each for each in _PROVIDERS}


# --- Variants
def split_variant(text: str) -> tuple[str, dict[str, str]]:
    """Split ``NAME:KEY=VALUE,...`` into a name and values by key.

    Raises:
        ValueError: the text is malformed, or a key is given twice.
    """
    name, _, settings = text.partition(":")
    # Commas inside brackets are part of a value.
    pairs = [pair.partition("=") for pair in re.split(r",(?![^\[(]*[\])])", settings)]
    found = {key.replace("-", "_"): value for key, equals, value in pairs if key and equals}
    fits = re.fullmatch(r"[\w.-]+", name) and len(found) == len(pairs)
    rule, hint = "be NAME:KEY=VALUE,.. with each key once", "For example: eager:compile=false"
    check(bool(fits), "--variant", rule, repr(text), hint)
    return name, found


def parse_variant(text: str, taken: Collection[str] = PROVIDERS) -> Provider:
    """Parse ``NAME:KEY=VALUE,...``: this library with other fields of ``NSAConfig``.

    Raises:
        ValueError: the text is malformed, a field is unknown, or the name is taken.
    """
    name, settings = split_variant(text)
    rule = f"have another name than {', '.join(taken)}"
    check(name not in taken, "--variant", rule, name)
    known = [entry.name for entry in fields(NSAConfig)]
    for key in settings:
        hint = nearest_hint(nearest(key, known))
        check(key in known, "--variant", "set a field of the pattern", repr(key), hint)
    return Provider(name, variant={key: yaml.safe_load(text) for key, text in settings.items()})


# --- The benchmark
def check_machine(providers: Sequence[Provider], points: Sequence[Point]) -> None:
    """Fail for too short sequences, or providers other than the reference without a GPU."""
    # With fewer keys most gradients cancel, and the budget has no meaningful baseline.
    shortest, rule = min(point.seq_len for point in points), f"be at least {MIN_LENGTH}"
    check(shortest >= MIN_LENGTH, "--seqs", rule, shortest)
    alone = all(each.backend == "reference" for each in providers)
    fits = points[0].device.type == "cuda" or alone or kernels_run_on_cpu()
    hint = "Without one: nsa bench attention --provider reference --seqs 512 --tokens 512"
    rule = f"have a CUDA GPU for {', '.join(each.name for each in providers)}"
    check(fits, "this machine", rule, "none", hint)


def bench_attention(
    results: Results,
    points: Sequence[Point],
    providers: Sequence[Provider],
    cases: Sequence[str] = tuple(CASES),
) -> None:
    """Measure, print and write rows.

    Args:
        results: receives the rows.
        points: measured shapes, lengths and selections.
        providers: measured implementations; those that do not compute a case are left out.
        cases: names of cases.
    """
    for point in points:
        base = make_tensors(point)
        for name in cases:
            _measure(results, CASES[name], point, base, providers)


def _measure(
    results: Results,
    case: Case,
    point: Point,
    base: Tensors,
    providers: Sequence[Provider],
) -> None:
    """Measure the providers that compute a case."""
    gate: Gate | None = None
    for provider in (each for each in providers if case.name in each.cases):
        changed = replace(point, config=replace(point.config, **provider.variant))
        if "index_loss" in case.outputs and not changed.config.has_index:
            continue
        if gate is None or gate.problem.point != changed:
            gate = None  # frees memory before the next pattern
            backend = "triton" if point.device.type == "cuda" else "reference"
            gate = Gate(prepare(case, base, changed, backend))
        row = {"case": case.name, **point.fields(), "provider": provider.name}
        row["variant"] = dict(provider.variant) or None
        for mode in case.modes:
            make = partial(make_subject, provider, gate, mode)
            found = measure(make, point.device, is_ours=provider.kernels is None)
            results.add(**row, mode=mode, **found)


def make_subject(provider: Provider, gate: Gate, mode: str) -> Subject:
    """Prepare the call of a provider and its checks."""
    problem, work = gate.problem, provider.work(gate.problem, mode)
    case, point = problem.case, problem.point
    dense = case.name == "attention" and provider.attend is not None
    tokens = {"tokens": point.tokens} if work.make else {}

    def extra() -> Fields:
        if case.name == "attention.choice" and approximates(point.config):
            return {"recall": gate.recall(work.run()["out"])}
        if work.make is None or work.attend is None:
            return {}
        attend = replace(work, forward=partial(work.attend, work.make()))
        each = {"make": work.make, "attention": attend.run}
        times = {stage: time_call(call, point.device).ms_p50 for stage, call in each.items()}
        return {"stages_ms": {stage: round(ms, 5) for stage, ms in times.items()}}

    return Subject(
        work.run,
        lambda: gate.check(work.run(), dense=dense, backend=provider.backend),
        partial(provider.fault, case=case, mode=mode),
        lambda: useful_work(problem, mode, dense=dense) | tokens,
        capture=provider.backend != "reference",
        extra=extra,
    )
