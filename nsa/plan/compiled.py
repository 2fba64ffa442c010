"""Memory of a compiled training step, from the graphs that PyTorch's compiler divides it into.

The step is traced and divided into forward and backward as ``torch.compile`` does it, with the same decompositions and the same
choice of what is saved and what is computed again. Then every tensor lives from the operation that writes it to the last that
reads it. Operations element by element are not written where the compiler can compute them in the kernel that reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from nsa.plan.timeline import GRADIENTS, PASSING, SAVED, SCRATCH, Scratch, rounded

CHOSEN = f"{SAVED}: chosen by the compiler"
# What the compiler leaves to libraries or to kernels that fuse with nothing; operators that are not PyTorch's are among them.
_KERNELS = {"mm", "addmm", "bmm", "baddbmm", "sort", "cumsum", "cat", "searchsorted", "_unsafe_masked_index_put_accumulate"}
_KERNELS |= {"index_put", "embedding_dense_backward", "scatter_add"}
_REDUCTIONS = {"sum", "mean", "amax", "prod", "var_mean", "argmax"}
_VIEWS = {"view", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "alias", "as_strided", "split", "reshape"}


class CompiledStep:
    """A module whose training step is traced and divided, but not compiled; to be used inside ``FakeTensorMode``.

    Args:
        module: gives a scalar loss.
        scratch: what operators need beside their results.
    """

    def __init__(self, module: nn.Module, scratch: Scratch) -> None:
        self._module, self._scratch = module, scratch
        self._graphs: dict[str, fx.Graph] = {}

    def memory(self, *inputs: Any, gradients_before: bool) -> dict[str, int]:
        """Bytes by label when most is held, without parameters and optimizer state.

        Args:
            inputs: of the module.
            gradients_before: whether gradients are there before the step, as from the second micro-batch on.
        """
        backend = aot_autograd(
            fw_compiler=self._record("forward"), bw_compiler=self._record("backward"),
            partition_fn=min_cut_rematerialization_partition, decompositions=select_decomp_table(),
        )  # fmt: skip
        torch.compiler.reset()
        compiled = torch.compile(self._module, backend=backend, fullgraph=True, dynamic=False)
        compiled(*inputs).backward()
        torch.compiler.reset()
        forward = GraphMemory(self._graphs["forward"], self._scratch)
        backward = GraphMemory(self._graphs["backward"], self._scratch, forward.origins())
        moments = [*forward.moments(CHOSEN), *backward.moments(GRADIENTS)]
        most = max(moments, key=_total)
        if gradients_before:
            most[GRADIENTS] = most.get(GRADIENTS, 0) + sum(p.nbytes for p in self._module.parameters() if p.requires_grad)
        return {label: size for label, size in most.items() if size}

    def _record(self, name: str) -> Callable[[fx.GraphModule, Any], Callable[..., Any]]:
        def record(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
            self._graphs[name] = module.graph

            def boxed(arguments: list[Any]) -> Any:
                results = module(*arguments)
                arguments.clear()
                return results

            boxed._boxed_call = True  # type: ignore[attr-defined]
            return boxed

        return record


class GraphMemory:
    """Lifetimes of the tensors of one graph.

    Args:
        graph: forward or backward, with example values.
        scratch: what operators need beside their results.
        origins: of inputs by name, the tensor of another graph that they are or are a view of; inputs of one origin are one.
    """

    def __init__(self, graph: fx.Graph, scratch: Scratch, origins: Mapping[str, str] | None = None) -> None:
        self._nodes, self._scratch = list(graph.nodes), scratch
        first: dict[str, fx.Node] = {}
        inputs = [node for node in self._nodes if node.op == "placeholder"]
        self._same = {node: first.setdefault((origins or {}).get(node.name, node.name), node) for node in inputs}
        self._kernels_before: dict[fx.Node, int] = {}
        kernels = 0
        for node in self._nodes:
            self._kernels_before[node] = kernels
            kernels += _is_kernel(node)
        self._written = {node for node in self._nodes if isinstance(_value(node), Tensor) and self._is_written(node)}

    def _is_written(self, node: fx.Node) -> bool:
        """Whether a tensor of its own has to exist: for a kernel, for the end, or for an operation that runs much later."""
        if _is_view(node):
            return False
        if node.op == "placeholder":
            return self._same[node] is node
        if _is_kernel(node) or _name(node) in _REDUCTIONS or _name(node) == "getitem":
            return True
        readers = list(_readers(node))
        if any(_is_kernel(reader) or reader.op == "output" for reader in readers):
            return True
        later = any(self._kernels_before[reader] > self._kernels_before[node] for reader in readers)
        return later and _name(node) != "convert_element_type"  # a conversion is done where it is read

    def _reads(self, node: fx.Node) -> set[fx.Node]:
        """Tensors that are read where ``node`` is computed."""
        found: set[fx.Node] = set()
        for used in (self._same.get(used, used) for used in node.all_input_nodes):
            found |= {used} if used in self._written else self._reads(used)
        return found

    def origins(self) -> dict[str, str]:
        """Of each node by name, the tensor that it is or is a view of."""
        found: dict[str, str] = {}
        for node in self._nodes:
            found[node.name] = found[node.all_input_nodes[0].name] if _is_view(node) else node.name
        return found

    def moments(self, output_label: str) -> Iterator[dict[str, int]]:
        """Bytes by label after each operation; parameters and the batch are not counted.

        Args:
            output_label: of what the graph returns; what it was given is what was saved.
        """
        outputs = self._reads(self._nodes[-1])
        last_read: dict[fx.Node, int] = {}
        for at, node in enumerate(self._nodes):
            if node in self._written or node.op == "output":
                last_read |= dict.fromkeys(self._reads(node), at)
        ends: dict[int, list[fx.Node]] = {}
        for node, at in last_read.items():
            if node not in outputs:
                ends.setdefault(at, []).append(node)
        held: dict[fx.Node, tuple[str, int]] = {}
        totals: dict[str, int] = {}

        def drop(at: int) -> None:
            for dead in ends.get(at, ()):
                label, size = held.pop(dead, (PASSING, 0))
                totals[label] = totals.get(label, 0) - size

        for at, node in enumerate(self._nodes):
            kernel = _is_kernel(node)
            if not kernel:  # its result may take the place of what it reads last
                drop(at)
            if node in self._written and node in last_read and not node.name.startswith(("primals", "tangents")):
                label = CHOSEN if node.op == "placeholder" else output_label if node in outputs else PASSING
                held[node] = label, rounded(_bytes(node))
                totals[label] = totals.get(label, 0) + held[node][1]
            needed = self._scratch(str(node.target), [_value(argument) for argument in node.args]) if kernel else 0
            yield {**totals, SCRATCH: needed}
            if kernel:
                drop(at)


def _total(held: dict[str, int]) -> int:
    return sum(held.values())


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Operations that read a node, itself or a view of it."""
    for user in node.users:
        if _is_view(user):
            yield from _readers(user)
        else:
            yield user


def _name(node: fx.Node) -> str:
    """``mm`` of ``aten.mm.default``."""
    if node.op != "call_function":
        return node.op
    target = node.target
    return target._schema.name.split("::")[1] if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", "")


def _is_view(node: fx.Node) -> bool:
    return _name(node) in _VIEWS


def _is_kernel(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    return node.target.namespace not in ("aten", "prims") or _name(node) in _KERNELS or "attention" in _name(node)


def _value(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument


def _bytes(node: fx.Node) -> int:
    value = _value(node)
    return int(value.numel()) * int(value.element_size())
