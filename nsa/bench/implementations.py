"""Who computes an operator: the Triton kernels, the reference, dense attention, FlexAttention."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import nsa.ops
from nsa.bench.cases import Call, Case, Problem, Tensors, selected_by
from nsa.bench.points import Point
from nsa.bench.variants import TileOverrides, Variant
from nsa.config import NSAConfig
from nsa.errors import check, fail
from nsa.ops._backend import kernels_run_on_cpu
from nsa.ops._triton.tuning import tiles_chosen_by

# No kernel of this library is called so: matrix products, softmax and attention of other libraries,
# and kernels of the compiler.
_FOREIGN = re.compile(
    r"gemm|gemv|cutlass|cudnn|flash|fmha|sdpa|softmax|nvjet|xmma|triton_(tem|poi|red|per)_",
    re.I,
)


class UnsupportedError(RuntimeError):
    """This implementation cannot compute this case here; the text says why."""


@dataclass(frozen=True)
class Work:
    """One computation, ready to be called again and again.

    Attributes:
        forward: gives the outputs.
        leaves: tensors whose gradients are wanted, by name.
        douts: gradients of the outputs.
        scope: entered around everything.
    """

    forward: Callable[[], tuple[Tensor, ...]]
    leaves: Mapping[str, Tensor]
    douts: tuple[Tensor, ...]
    scope: Callable[[], Any] = nullcontext

    def run(self, mode: str) -> tuple[Tensor, ...]:
        """The outputs, without recording gradients; with ``fwd_bwd`` the outputs and gradients."""
        if mode == "fwd":
            with torch.no_grad():
                return self.forward()
        outputs = self.forward()
        return outputs + torch.autograd.grad(outputs, tuple(self.leaves.values()), self.douts)


@dataclass(frozen=True)
class Implementation:
    """A way to compute cases; in rows its name is the provider.

    Attributes:
        name: as in a row.
        cases: names of the cases that it computes; None means all.
        asked_for: names of those among them that it computes only if it is named.
        dense: names of those that it computes as dense causal attention over q, k_slc and v_slc.
        variant: what differs from the library's own settings, if anything.
    """

    name: str
    cases: tuple[str, ...] | None = None
    asked_for: tuple[str, ...] = ()
    dense: tuple[str, ...] = ()
    variant: Variant | None = None
    backend = "triton"  # of this library's operators, where it calls them

    def config(self, point: Point) -> NSAConfig:
        """The sparse pattern that it runs."""
        return point.shape.config(None if self.variant is None else self.variant.config)

    def takes_part(self, case: Case, named: bool) -> bool:
        """Whether it is measured in a case; ``named`` where the command names implementations."""
        known = self.cases is None or case.name in self.cases
        return known and (named or case.name not in self.asked_for)

    def work(self, problem: Problem) -> Work:
        """What is timed.

        Raises:
            UnsupportedError: it cannot compute this case at this point.
        """
        raise NotImplementedError

    def fault(self, kernels: Sequence[str], case: Case, mode: str) -> str | None:
        """Why the kernels that ran are not those of this implementation; None if they are."""
        raise NotImplementedError


def _work(problem: Problem, call: Call, backend: str, **scope: Any) -> Work:
    """A case as this library computes it; its leaves are the inputs, without a copy."""
    case, tensors = problem.case, problem.tensors
    leaves = _leaves(tensors, case.inputs)
    douts = tuple(tensors[f"d{name}"] for name in case.outputs) if case.inputs else ()
    forward = partial(call, {**tensors, **leaves}, problem.config, backend)
    return Work(forward, leaves, douts, **scope)


def _leaves(tensors: Tensors, names: Iterable[str]) -> Tensors:
    return {name: tensors[name].detach().requires_grad_() for name in names}


@dataclass(frozen=True)
class Kernels(Implementation):
    """The Triton kernels through the public functions.

    Attributes:
        algorithm: of the selected branch, see :func:`nsa.selected_attention`.
    """

    algorithm: str = "auto"

    def work(self, problem: Problem) -> Work:
        """See :class:`Implementation`."""
        if problem.point.device.type != "cuda" and not kernels_run_on_cpu():
            raise UnsupportedError("the Triton kernels need a CUDA GPU")
        call = problem.case.call if self.algorithm == "auto" else selected_by(self.algorithm)
        tiles = {} if self.variant is None else self.variant.tiles
        scope = {"scope": partial(override_tiles, tiles)} if tiles else {}
        return _work(problem, call, self.backend, **scope)

    def fault(self, kernels: Sequence[str], case: Case, mode: str) -> str | None:
        """Every operator's own kernel must have run, and nothing that only a reference starts."""
        fault = missing_kernel(kernels, case, mode)
        if fault is not None:
            return fault
        ours = own(kernels)
        foreign = [name for name in kernels if name not in ours and _FOREIGN.search(name)]
        return f"{foreign[0]} ran, which is not of this library" if foreign else None


def missing_kernel(kernels: Iterable[str], case: Case, mode: str) -> str | None:
    """Which kernel of this library a case should have run and did not; None if all ran."""
    forward, backward = case.kernels
    ours = own(kernels)
    for prefix in forward + (backward if mode == "fwd_bwd" else ()):
        if not any(name.startswith(prefix) for name in ours):
            return f"no kernel {prefix}* of this library ran"
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
    """Those of this library; behind ``_kernel`` a name says for which branch it was compiled."""
    return [name for name in kernels if "".join(name.partition("_kernel")[:2]) in own_kernels()]


@contextmanager
def override_tiles(overrides: TileOverrides) -> Iterator[set[str]]:
    """Within, fields of tiles are replaced; gives the patterns that no look-up has met yet."""
    unused = set(overrides)

    def choose(key: Any, tile: Any) -> Any:
        for pattern, changes in overrides.items():
            if re.fullmatch(pattern.replace("*", ".*"), key.kernel):
                unused.discard(pattern)
                tile = tile._replace(**changes)
        return tile

    with tiles_chosen_by(choose):
        yield unused


@dataclass(frozen=True)
class Reference(Implementation):
    """Eager PyTorch, the specification."""

    backend = "reference"

    def work(self, problem: Problem) -> Work:
        """See :class:`Implementation`; refused where its scores of all pairs would not fit."""
        point, config = problem.point, problem.config
        # Rough upper bound: fp32 tensors over all pairs, a few for each branch.
        branches = {"attention": 3, "attention.compress": 0, "attention.combine": 0}
        pairs = point.batch * config.num_heads * point.seq_len**2
        needed = branches.get(problem.case.name, 1) * 5 * 4 * pairs / 2**30
        free = free_gib(point.device)
        if needed > 0.8 * free:
            why = f"the reference would need about {needed:.0f} GiB, {free:.0f} are free"
            raise UnsupportedError(why)
        return _work(problem, problem.case.call, self.backend)

    def fault(self, kernels: Sequence[str], case: Case, mode: str) -> str | None:
        """No kernel of this library may have run."""
        found = own(kernels)
        return f"{found[0]} of this library ran in the reference" if found else None


def free_gib(device: torch.device) -> float:
    """Free memory of the device; on the CPU half of the machine's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / 2**30
    from nsa.train.environment import cpu

    return float(cpu()["memory_gib"] or 4.0) / 2


def _dense_attention(backend: SDPBackend, problem: Problem) -> Callable[..., Tensor]:
    """Causal ``scaled_dot_product_attention`` by one backend; groups of heads share keys."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return attend


def _flex_attention(problem: Problem) -> Callable[..., Tensor]:
    """Compiled FlexAttention: the window, or dense causal attention in place of the whole."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    windowed, size = problem.case.name == "attention.window", problem.config.window_size

    def visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        causal = key <= row
        return causal & (row - key < size) if windowed else causal

    torch.compiler.reset()  # each point is compiled for itself, as is best for it
    length, device = problem.point.seq_len, problem.point.device
    mask = create_block_mask(visible, None, None, length, length, device=device)
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return partial(compiled, block_mask=mask, enable_gqa=True)


@dataclass(frozen=True)
class PyTorch(Implementation):
    """An attention of PyTorch on a GPU.

    Attributes:
        make: gives attention over ``[B, H, S, D]`` for a problem.
        kernels: parts of the names of its kernels, forward and backward: one kernel for each.
    """

    make: Callable[[Problem], Callable[..., Tensor]] = _flex_attention
    kernels: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    def work(self, problem: Problem) -> Work:
        """See :class:`Implementation`."""
        if problem.point.device.type != "cuda":
            raise UnsupportedError("it needs a CUDA GPU")
        branch = "win" if problem.case.name == "attention.window" else "slc"
        leaves = _leaves(problem.tensors, ("q", f"k_{branch}", f"v_{branch}"))
        q, k, v = (x.transpose(1, 2) for x in leaves.values())
        attend, douts = self.make(problem), (problem.tensors["dout"],)
        return Work(lambda: (attend(q, k, v).transpose(1, 2),), leaves, douts)

    def fault(self, kernels: Sequence[str], case: Case, mode: str) -> str | None:
        """Its own kernels must have run."""
        forward, backward = self.kernels
        parts = forward + (backward if mode == "fwd_bwd" else ())
        for part in parts:
            if sum(part in name.lower() for name in kernels) < parts.count(part):
                return f"no kernel with {part} in its name ran, or too few"
        return None


def refusals() -> tuple[type[Exception], ...]:
    """What is raised by a computation that cannot run here, also by Triton's compiler."""
    from triton.errors import TritonError

    return RuntimeError, TritonError


def does_not_fit(error: Exception) -> bool:
    """Whether a kernel could not be compiled or launched with its tile."""
    return not isinstance(error, RuntimeError) or "PassManager" in str(error)


_CUDNN = partial(_dense_attention, SDPBackend.CUDNN_ATTENTION)
_FA2 = partial(_dense_attention, SDPBackend.FLASH_ATTENTION)
_WHOLE, _SELECTED, _TEMPLATE = ("attention",), ("attention.selected",), ("triton_tem",)
_IMPLEMENTATIONS: tuple[Implementation, ...] = (
    Kernels("nsa"),
    PyTorch("dense-cudnn", _WHOLE, dense=_WHOLE, make=_CUDNN, kernels=(("cudnn",), ())),
    PyTorch("dense-fa2", _WHOLE, dense=_WHOLE, make=_FA2, kernels=(("flash_fwd",), ("flash_bwd",))),
    PyTorch(
        "flex",
        (*_WHOLE, "attention.window"),
        asked_for=_WHOLE,
        dense=_WHOLE,
        kernels=(_TEMPLATE, _TEMPLATE),
    ),
    Kernels("tiled", _SELECTED, asked_for=_SELECTED, algorithm="tiled"),
    Kernels("gathered", _SELECTED, asked_for=_SELECTED, algorithm="gathered"),
    Reference("reference"),
)
IMPLEMENTATIONS = {each.name: each for each in _IMPLEMENTATIONS}


def choose_implementations(
    names: Sequence[str] | None, variants: Sequence[Variant], device: torch.device
) -> list[Implementation]:
    """Those named and all variants; by default all that are measured without being named.

    Raises:
        ValueError: a name is unknown, or the machine has no GPU for it.
    """
    made = {variant.name: Kernels(variant.name, variant=variant) for variant in variants}
    known = {**IMPLEMENTATIONS, **made}
    if names is None:
        names = [name for name, each in known.items() if each.cases != each.asked_for]
    for name in names:
        check(name in known, "nsa bench", "--provider", f"be among {', '.join(known)}", name)
    chosen = list(dict.fromkeys([*names, *made]))
    if device.type != "cuda" and chosen != ["reference"] and not kernels_run_on_cpu():
        hint = "Without one: nsa bench attention --provider reference --seqs 512 --tokens 512"
        rule = f"have a CUDA GPU for {', '.join(chosen)}"
        fail("nsa bench attention", "this machine", rule, "none", hint)
    return [known[name] for name in chosen]
