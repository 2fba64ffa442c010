"""``nsa bench attention``: a row for each implementation, case and mode.

The result is checked first; then kernels, peak memory and time of the same call are measured.
"""

from __future__ import annotations

import importlib
import itertools
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import nsa.ops
from nsa.bench.cases import (
    CASES,
    RECORDED,
    Case,
    Point,
    Problem,
    Shape,
    Tensors,
    batch_of,
    make_tensors,
    prepare,
    selected_by,
    useful_work,
)
from nsa.bench.clock import Subject, UnsupportedError, Verdict, measure
from nsa.bench.gate import Gate, approximates
from nsa.bench.table import Results
from nsa.config import NSAConfig
from nsa.errors import check, nearest, nearest_hint
from nsa.ops._backend import kernels_run_on_cpu

WHERE = "nsa bench attention"
MIN_LENGTH = 128
# Kernels of other libraries and of the compiler: matrix products, softmax and attention.
_FOREIGN = re.compile(
    r"gemm|gemv|cutlass|cudnn|flash|fmha|sdpa|softmax|nvjet|xmma|triton_(tem|poi|red|per)_",
    re.I,
)


@dataclass(frozen=True)
class Work:
    """One computation, prepared for repeated calls.

    Attributes:
        forward: computes the outputs.
        leaves: tensors whose gradients are computed, by name.
        douts: gradients of the outputs.
    """

    forward: Callable[[], tuple[Tensor, ...]]
    leaves: Mapping[str, Tensor]
    douts: tuple[Tensor, ...]

    def run(self, mode: str) -> tuple[Tensor, ...]:
        """Compute the outputs, and the gradients in mode ``fwd_bwd``."""
        if mode == "fwd":
            with torch.no_grad():
                return self.forward()
        outputs = self.forward()
        return outputs + torch.autograd.grad(outputs, tuple(self.leaves.values()), self.douts)


@dataclass(frozen=True)
class Provider:
    """An implementation that is measured.

    Attributes:
        name: name in rows.
        cases: names of the cases that it computes; None means all.
        if_named: cases that it computes only if the command line names the provider.
        backend: backend of this library's operators.
        algorithm: algorithm of the selected branch, see :func:`nsa.selected_attention`.
        variant: changed fields of the pattern.
        attend: factory of a PyTorch attention over ``[B, H, S, D]``; whole attention is then dense
            over q, k_slc, v_slc. None means this library.
        kernels: parts of the names of its kernels, forward and backward, one kernel for each part;
            None means the kernels of the case.
    """

    name: str
    cases: tuple[str, ...] | None = None
    if_named: tuple[str, ...] = ()
    backend: str = "triton"
    algorithm: str = "auto"
    variant: Mapping[str, Any] = field(default_factory=dict)
    attend: Callable[[Problem], Callable[..., Tensor]] | None = None
    kernels: tuple[tuple[str, ...], tuple[str, ...]] | None = None

    def computes(self, case: Case, named: bool) -> bool:
        """Whether a case is measured; ``named`` if the command line names providers."""
        known = self.cases is None or case.name in self.cases
        return known and (named or case.name not in self.if_named)

    def work(self, problem: Problem) -> Work:
        """Prepare a problem; the leaves are its inputs, without a copy.

        Raises:
            UnsupportedError: the provider needs a GPU.
        """
        case, tensors = problem.case, problem.tensors
        on_gpu = problem.point.device.type == "cuda"
        if self.attend is not None:
            if not on_gpu:
                raise UnsupportedError("it needs a CUDA GPU")
            branch = "win" if case.name == "attention.window" else "slc"
            leaves = _leaves(tensors, ("q", f"k_{branch}", f"v_{branch}"))
            q, k, v = (x.transpose(1, 2) for x in leaves.values())
            attend = self.attend(problem)
            forward = lambda: (attend(q, k, v).transpose(1, 2),)  # noqa: E731
            return Work(forward, leaves, (tensors["dout"],))
        if self.backend == "triton" and not on_gpu and not kernels_run_on_cpu():
            raise UnsupportedError("the Triton kernels need a CUDA GPU")
        call = case.call if self.algorithm == "auto" else selected_by(self.algorithm)
        leaves = _leaves(tensors, case.inputs)
        douts = tuple(tensors[f"d{name}"] for name in case.outputs) if case.inputs else ()
        given = ({**tensors, **leaves}, problem.config, self.backend)
        return Work(partial(call, *given), leaves, douts)

    def fault(self, kernels: Sequence[str], case: Case, mode: str) -> str | None:
        """Reason why the profiled kernels are not the provider's, or None."""
        ours = own(kernels)
        if self.attend is not None:
            return missing_kernel(kernels, self.kernels or ((), ()), mode)
        if self.backend == "reference":
            return f"{ours[0]} of this library ran in the reference" if ours else None
        foreign = [name for name in kernels if name not in ours and _FOREIGN.search(name)]
        said = f"{foreign[0]} ran, which is not of this library" if foreign else None
        return missing_kernel(ours, case.kernels, mode) or said


def _leaves(tensors: Tensors, names: Iterable[str]) -> Tensors:
    return {name: tensors[name].detach().requires_grad_() for name in names}


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
    modules = map(importlib.import_module, names)
    found = [value for module in modules for value in vars(module).values()]
    kernels = {each.__name__: each for each in found if isinstance(each, KernelInterface)}
    return {name: each for name, each in kernels.items() if name.endswith("_kernel")}


def own(kernels: Iterable[str]) -> list[str]:
    """Filter the kernels of this library; a branch may follow ``_kernel`` in their names."""
    return [name for name in kernels if "".join(name.partition("_kernel")[:2]) in own_kernels()]


def dense_attention(backend: SDPBackend) -> Callable[..., Tensor]:
    """Causal grouped-query ``scaled_dot_product_attention`` with one backend."""
    attend: Callable[..., Tensor] = sdpa_kernel(backend)(scaled_dot_product_attention)
    return partial(attend, is_causal=True, enable_gqa=True)


def flex_attention(problem: Problem) -> Callable[..., Tensor]:
    """Compiled FlexAttention: the window, or dense causal attention for whole attention."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    windowed, size = problem.case.name == "attention.window", problem.config.window_size

    def visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        causal = key <= row
        return causal & (row - key < size) if windowed else causal

    torch.compiler.reset()  # compile each point separately, with static shapes
    length, device = problem.point.seq_len, problem.point.device
    mask = create_block_mask(visible, None, None, length, length, device=device)
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return partial(compiled, block_mask=mask, enable_gqa=True)


_CUDNN = dense_attention(SDPBackend.CUDNN_ATTENTION)
_FA2 = dense_attention(SDPBackend.FLASH_ATTENTION)
_WHOLE, _SELECTED, _TEMPLATE = ("attention",), ("attention.selected",), ("triton_tem",)
_FLEX: dict[str, Any] = {"attend": flex_attention, "kernels": (_TEMPLATE, _TEMPLATE)}
_PROVIDERS = (
    Provider("nsa"),
    Provider("dense-cudnn", _WHOLE, attend=lambda _: _CUDNN, kernels=(("cudnn",), ())),
    Provider("dense-fa2", _WHOLE, attend=lambda _: _FA2, kernels=(("flash_fwd",), ("flash_bwd",))),
    Provider("flex", (*_WHOLE, "attention.window"), _WHOLE, **_FLEX),
    Provider("tiled", _SELECTED, _SELECTED, algorithm="tiled"),
    Provider("gathered", _SELECTED, _SELECTED, algorithm="gathered"),
    Provider("reference", backend="reference"),
)
PROVIDERS = {each.name: each for each in _PROVIDERS}


# --- Variants
def split_variant(where: str, text: str) -> tuple[str, dict[str, str]]:
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
    check(bool(fits), where, "--variant", rule, repr(text), hint)
    return name, found


def parse_variant(text: str) -> Provider:
    """Parse ``NAME:KEY=VALUE,...``: this library with other fields of ``NSAConfig``.

    Raises:
        ValueError: the text is malformed, a field is unknown, or the name is already used.
    """
    name, settings = split_variant(WHERE, text)
    rule = f"have another name than {', '.join(PROVIDERS)}"
    check(name not in PROVIDERS, WHERE, "--variant", rule, name)
    known = [entry.name for entry in fields(NSAConfig)]
    for key in settings:
        hint = nearest_hint(nearest(key, known))
        check(key in known, WHERE, "--variant", "set a field of the pattern", repr(key), hint)
    changes = {key: yaml.safe_load(value) for key, value in settings.items()}
    return Provider(name, variant=changes)


# --- The benchmark
def bench_attention(
    shape: Shape,
    seqs: Sequence[int],
    device: torch.device,
    *,
    tokens: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    choices: Sequence[str] = ("random",),
    recorded: Path | None = None,
    cases: Sequence[str] = tuple(CASES),
    providers: Sequence[str] | None = None,
    variants: Sequence[str] = (),
    recall: bool = False,
    out: Path | None = None,
    commit: str | None = None,
) -> bool:
    """Measure, print and write rows.

    Args:
        shape: heads and their sizes.
        seqs: lengths S.
        device: the measured device.
        tokens: total tokens of all sequences; None means the shape's.
        dtype: dtype of the inputs.
        choices: keys of ``CHOICES``, or ``RECORDED``.
        recorded: file from ``nsa inspect --record``, for choice ``RECORDED``.
        cases: names of cases.
        providers: names of providers; None means the default ones.
        variants: ``NAME:KEY=VALUE,...``, measured in addition.
        recall: measure the recall of the exact selection; always measured if the selection is
            approximate.
        out: JSONL file to append to; None prints the rows only.
        commit: recorded if the checkout has no git.

    Returns:
        Whether every measured row is correct.

    Raises:
        ValueError: an argument is not valid, or this machine has no GPU.
    """
    # With fewer keys most gradients cancel, and the budget has no meaningful baseline.
    rule = f"be at least {MIN_LENGTH}"
    check(min(seqs) >= MIN_LENGTH, WHERE, "--seqs", rule, min(seqs))
    if RECORDED in choices:
        selected = _SELECTED[0]
        check(recorded is not None, WHERE, "--recorded", "be given for that choice", None)
        rule = f"be {selected} for recorded selections, which scores do not give"
        check([*cases] == [selected], WHERE, "--case", rule, [*cases])
    chosen, results = _chosen(providers, variants, device), Results(out, device, commit)
    for choice, seq_len in itertools.product(choices, seqs):
        point = Point(
            shape, seq_len, batch_of(shape, seq_len, tokens), choice, dtype, device, recorded
        )
        base = make_tensors(point, shape.config())
        for case in (CASES[name] for name in cases):
            gate: Gate | None = None
            for provider in chosen:
                if not provider.computes(case, providers is not None):
                    continue
                config = shape.config(dict(provider.variant))
                if gate is None or gate.problem.config != config:
                    gate = None  # frees memory before the next pattern
                    backend = "triton" if device.type == "cuda" else "reference"
                    gate = Gate(prepare(case, base, point, config, backend))
                named = {"case": case.name, "provider": provider.name, **point.fields()}
                for mode in case.modes:
                    make = partial(_subject, provider, gate, mode, recall)
                    found = measure(make, device, is_ours=provider.attend is None)
                    changes = dict(provider.variant) or None
                    results.add(**named, mode=mode, variant=changes, **found)
    return results.finish()


def _chosen(
    names: Sequence[str] | None, variants: Sequence[str], device: torch.device
) -> list[Provider]:
    """Named or default providers, and variants."""
    found = [parse_variant(text) for text in variants]
    if names is None:
        names = [name for name, each in PROVIDERS.items() if each.cases != each.if_named]
    chosen = [*(PROVIDERS[name] for name in names), *found]
    only_reference = all(each.backend == "reference" for each in chosen)
    hint = "Without one: nsa bench attention --provider reference --seqs 512 --tokens 512"
    rule = f"have a CUDA GPU for {', '.join(each.name for each in chosen)}"
    fits = device.type == "cuda" or only_reference or kernels_run_on_cpu()
    check(fits, WHERE, "this machine", rule, "none", hint)
    return chosen


def _subject(provider: Provider, gate: Gate, mode: str, recall: bool) -> Subject:
    """Prepare the call of a provider and its checks."""
    problem = gate.problem
    work, case = provider.work(problem), problem.case
    dense = case.name == "attention" and provider.attend is not None
    call = partial(work.run, mode)

    def check() -> Verdict:
        named = problem.named(call(), work.leaves)
        return gate.check(named, dense=dense, backend=provider.backend)

    def extra() -> dict[str, Any]:
        approximate = recall or approximates(problem.config)
        is_selection = case.name == "attention.choice" and approximate
        return {"recall": gate.recall(call()[0])} if is_selection else {}

    return Subject(
        call,
        check,
        partial(provider.fault, case=case, mode=mode),
        partial(useful_work, problem, backward=mode == "fwd_bwd", dense=dense),
        capture=provider.backend != "reference",
        extra=extra,
    )
