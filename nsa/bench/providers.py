"""Who computes an operator: ours, variants of ours, the reference, dense attention and FlexAttention of PyTorch."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import nsa.ops
from nsa.bench import consumers
from nsa.bench.cases import Case, Tensors, selected_by
from nsa.bench.points import Point
from nsa.bench.variants import TileOverrides, Variant
from nsa.config import NSAConfig
from nsa.errors import fail
from nsa.ops._backend import kernels_run_on_cpu
from nsa.ops._triton.tuning import tiles_chosen_by

# What no kernel of ours is called: matrix products, softmax and attention of libraries, and kernels of the compiler.
_FOREIGN = re.compile(r"gemm|gemv|cutlass|cudnn|flash|fmha|sdpa|softmax|nvjet|xmma|triton_(tem|poi|red|per)_", re.IGNORECASE)


class UnsupportedError(Exception):
    """This provider cannot compute this case here; the text says why."""


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
        """The outputs, without recording gradients; or, with ``fwd_bwd``, the outputs and then the gradients of the leaves."""
        if mode == "fwd":
            with torch.no_grad():
                return self.forward()
        outputs = self.forward()
        return outputs + torch.autograd.grad(outputs, tuple(self.leaves.values()), self.douts)


@dataclass(frozen=True)
class Provider:
    """A way to compute cases.

    Attributes:
        name: as in a row.
        dense: whether it computes dense causal attention over q, k_slc and v_slc in place of the whole.
        variant: of ours; None for all others.
        backend: of this library's operators, where it calls them.
    """

    name: str
    dense: bool = False
    variant: Variant | None = None
    backend = "triton"

    def config(self, point: Point) -> NSAConfig:
        """The sparse pattern that it runs."""
        return point.shape.config(None if self.variant is None else self.variant.config)

    def work(self, case: Case, tensors: Tensors, point: Point, config: NSAConfig) -> Work:
        """What is timed.

        Raises:
            UnsupportedError: it cannot compute this case at this point.
        """
        raise NotImplementedError

    def fault(self, kernels: Sequence[str], case: Case, mode: str) -> str | None:
        """Why the kernels that ran are not those of this provider; None if they are."""
        raise NotImplementedError


def leaves_of(tensors: Tensors, names: tuple[str, ...]) -> Tensors:
    """The tensors as leaves that take gradients, without a copy."""
    return {name: tensors[name].detach().requires_grad_() for name in names}


def _douts(case: Case, tensors: Tensors) -> tuple[Tensor, ...]:
    return tuple(tensors[f"d{name}"] for name in case.outputs) if case.inputs else ()


@dataclass(frozen=True)
class Ours(Provider):
    """The Triton kernels through the public functions."""

    def work(self, case: Case, tensors: Tensors, point: Point, config: NSAConfig) -> Work:
        """See :class:`Provider`."""
        if point.device.type != "cuda" and not kernels_run_on_cpu():
            raise UnsupportedError("the Triton kernels need a CUDA GPU")
        leaves = leaves_of(tensors, case.inputs)
        given = {**tensors, **leaves}
        overrides = self.variant.tiles if self.variant is not None else {}
        scope = (lambda: override_tiles(overrides)) if overrides else nullcontext
        return Work(lambda: case.call(given, config, self.backend), leaves, _douts(case, tensors), scope)

    def fault(self, kernels: Sequence[str], case: Case, mode: str) -> str | None:
        """Every operator's own kernel must have run, and nothing that only a reference path starts."""
        ours = own(kernels)
        for prefix in case.kernels[0] + (case.kernels[1] if mode == "fwd_bwd" else ()):
            if not any(name.startswith(prefix) for name in ours):
                return f"no kernel {prefix}* of this library ran"
        foreign = [name for name in kernels if name not in ours and _FOREIGN.search(name)]
        return f"{foreign[0]} ran, which is not of this library" if foreign else None


@dataclass(frozen=True)
class Algorithm(Ours):
    """The selected branch alone, by one of its algorithms whatever the choice is.

    Attributes:
        algorithm: see :func:`nsa.selected_attention`.
    """

    algorithm: str = "tiled"

    def work(self, case: Case, tensors: Tensors, point: Point, config: NSAConfig) -> Work:
        """See :class:`Provider`."""
        return super().work(replace(case, call=selected_by(self.algorithm)), tensors, point, config)


@cache
def own_kernels() -> Mapping[str, Any]:
    """All Triton kernels of this library by name."""
    from triton.runtime.jit import KernelInterface

    kernels = {}
    for module in pkgutil.walk_packages(nsa.ops.__path__, "nsa.ops."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, KernelInterface) and value.__name__.endswith("_kernel"):
                kernels[value.__name__] = value
    return kernels


def own(kernels: Iterable[str]) -> list[str]:
    """Those of this library; what follows ``_kernel`` in a name says for which branch it was compiled."""
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
class Reference(Provider):
    """Eager PyTorch, the specification."""

    backend = "reference"

    def work(self, case: Case, tensors: Tensors, point: Point, config: NSAConfig) -> Work:
        """See :class:`Provider`; refused where its scores of all pairs would not fit into memory."""
        needed, free = reference_gib(case, point, config), free_gib(point.device)
        if needed > 0.8 * free:
            raise UnsupportedError(f"the reference would need about {needed:.0f} GiB, {free:.0f} are free")
        leaves = leaves_of(tensors, case.inputs)
        given = {**tensors, **leaves}
        return Work(lambda: case.call(given, config, self.backend), leaves, _douts(case, tensors))

    def fault(self, kernels: Sequence[str], case: Case, mode: str) -> str | None:
        """No kernel of ours may have run."""
        ours = own(kernels)
        return f"{ours[0]} of this library ran in the reference" if ours else None


def reference_gib(case: Case, point: Point, config: NSAConfig) -> float:
    """Rough upper bound of what the reference needs: fp32 tensors over all pairs, a few for each branch."""
    if case.name in ("attention.compress", "attention.combine"):
        return 0.0
    branches = 3 if case.name == "attention" else 1
    pairs = point.batch * config.num_heads * point.seq_len**2
    return branches * 5 * 4 * pairs / 2**30


def free_gib(device: torch.device) -> float:
    """Free memory of the device; on the CPU that of the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / 2**30
    from nsa.train.environment import cpu

    return float(cpu()["memory_gib"] or 4.0) / 2


@dataclass(frozen=True)
class Dense(Provider):
    """Dense causal attention by one backend of ``scaled_dot_product_attention``, groups of heads sharing keys."""

    sdpa: SDPBackend = SDPBackend.CUDNN_ATTENTION

    def work(self, case: Case, tensors: Tensors, point: Point, config: NSAConfig) -> Work:
        """See :class:`Provider`."""
        if point.device.type != "cuda":
            raise UnsupportedError("it needs a CUDA GPU")
        leaves = leaves_of(tensors, ("q", "k_slc", "v_slc"))
        q, k, v = (x.transpose(1, 2) for x in leaves.values())

        def forward() -> tuple[Tensor, ...]:
            with sdpa_kernel(self.sdpa):
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return (out.transpose(1, 2),)

        return Work(forward, leaves, (tensors["dout"],))

    def fault(self, kernels: Sequence[str], case: Case, mode: str) -> str | None:
        """The backend's kernel must have run."""
        cudnn = self.sdpa == SDPBackend.CUDNN_ATTENTION
        wanted = ["cudnn"] if cudnn else ["flash_fwd"] + ["flash_bwd"] * (mode == "fwd_bwd")
        return _missing(kernels, wanted)


def _missing(kernels: Sequence[str], wanted: list[str]) -> str | None:
    seen = [name.lower() for name in kernels]
    missing = [part for part in wanted if not any(part in name for name in seen)]
    return f"no kernel with {missing[0]} in its name ran" if missing else None


@dataclass(frozen=True)
class Flex(Provider):
    """Compiled FlexAttention: the window, or dense causal attention in place of the whole."""

    def work(self, case: Case, tensors: Tensors, point: Point, config: NSAConfig) -> Work:
        """See :class:`Provider`."""
        if point.device.type != "cuda":
            raise UnsupportedError("it needs a CUDA GPU")
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        windowed, size = case.name == "attention.window", config.window_size

        def visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            causal = key <= row
            return causal & (row - key < size) if windowed else causal

        torch.compiler.reset()  # each point is compiled for itself, as is best for it
        mask = create_block_mask(visible, None, None, point.seq_len, point.seq_len, device=point.device)
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        leaves = leaves_of(tensors, ("q", "k_win", "v_win") if windowed else ("q", "k_slc", "v_slc"))
        q, k, v = (x.transpose(1, 2) for x in leaves.values())

        def forward() -> tuple[Tensor, ...]:
            out = compiled(q, k, v, block_mask=mask, enable_gqa=True)
            return (out.transpose(1, 2),)

        return Work(forward, leaves, (tensors["dout"],))

    def fault(self, kernels: Sequence[str], case: Case, mode: str) -> str | None:
        """A kernel from FlexAttention's template must have run, and one more backward."""
        seen = [name for name in kernels if name.startswith("triton_tem")]
        return None if len(seen) >= (2 if mode == "fwd_bwd" else 1) else "no template kernel triton_tem* ran"


@dataclass(frozen=True)
class Consumer(Provider):
    """The selected branch alone, by another way to consume its choice.

    Attributes:
        way: makes what is timed.
        own: what names of its own kernels begin with, forward and backward; empty where they are a library's of any name.
    """

    way: consumers.Consumer = consumers.by_gather
    own: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    def work(self, case: Case, tensors: Tensors, point: Point, config: NSAConfig) -> Work:
        """See :class:`Provider`."""
        leaves = leaves_of(tensors, case.inputs)
        q, k, v = leaves.values()
        run = self.way(q, k, v, tensors["block_indices"], config)
        return Work(lambda: (run(),), leaves, _douts(case, tensors))

    def fault(self, kernels: Sequence[str], case: Case, mode: str) -> str | None:
        """Its own kernels must have run, and none of this library's operators."""
        ours = own(kernels)
        if ours:
            return f"{ours[0]} of this library ran"
        return _missing(kernels, [*self.own[0], *(self.own[1] if mode == "fwd_bwd" else ())])


def refusals() -> tuple[type[Exception], ...]:
    """What is raised by a computation that cannot run here, among it what Triton says of a kernel that it cannot compile."""
    from triton.errors import TritonError

    return RuntimeError, TritonError


def does_not_fit(error: Exception) -> bool:
    """Whether a kernel could not be compiled or launched with its tile; a fault of the device or a bug is something else."""
    return not isinstance(error, RuntimeError) or "PassManager" in str(error)


PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        Ours("nsa"),
        Dense("dense-cudnn", dense=True, sdpa=SDPBackend.CUDNN_ATTENTION),
        Dense("dense-fa2", dense=True, sdpa=SDPBackend.FLASH_ATTENTION),
        Flex("flex"),
        Consumer("mask", way=consumers.by_mask, own=(("triton_tem",), ())),
        Consumer("ranges", way=consumers.by_ranges, own=(("ranges_fwd",), ("ranges_bwd",))),
        Consumer("gather", way=consumers.by_gather),
        Algorithm("tiled", algorithm="tiled"),
        Algorithm("gathered", algorithm="gathered"),
        Reference("reference"),
    )
}


def choose_providers(names: list[str] | None, variants: list[Variant], device: torch.device) -> list[Provider]:
    """The providers to measure: those named and all variants; by default all but ways to consume a choice.

    Raises:
        ValueError: a name is unknown.
    """
    known = {**PROVIDERS, **{variant.name: Ours(variant.name, variant=variant) for variant in variants}}
    names = [name for name in known if not isinstance(known[name], (Consumer, Algorithm))] if names is None else names
    unknown = [name for name in names if name not in known]
    if unknown:
        fail("nsa bench", "--provider", f"be among {', '.join(known)}", unknown[0])
    chosen = list(dict.fromkeys([*names, *(variant.name for variant in variants)]))
    if device.type != "cuda" and chosen != ["reference"] and not kernels_run_on_cpu():
        hint = "Without one: nsa bench attention --provider reference --seqs 512 --tokens 512"
        fail("nsa bench attention", "this machine", f"have a CUDA GPU for {', '.join(chosen)}", "none", hint)
    return [known[name] for name in chosen]


def takes_part(provider: Provider, case: Case, named: bool) -> bool:
    """Whether a provider is measured in a case; FlexAttention as dense attention only where it was named."""
    if isinstance(provider, (Ours, Reference)) and not isinstance(provider, Algorithm):
        return True
    if provider.name == "flex" and case.name == "attention":
        return named
    return provider.name in case.providers
