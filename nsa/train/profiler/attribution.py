"""Which stage of the training step an event of a trace belongs to.

Four things tell, the first that does wins:

1. a range that the trainer or the model opened (``nsa.stages``), or a registered operator, around the launch;
2. in the backward pass of eager code, the same of the forward operator that the trace links it to;
3. in compiled code, what was launched: the sizes of a matrix product, or the operators that a fused kernel's name lists;
4. for kernels that were replayed from a CUDA graph, the kernel in the same place of a step that launched them one by one.
"""

from __future__ import annotations

import bisect
import difflib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from nsa import stages
from nsa.lm.model import LanguageModel
from nsa.module import Compression, NativeSparseAttention
from nsa.train.profiler.trace import DEVICE, Event, Thread, Trace

PREFIX = "stage: "  # of the ranges that mark stages
STEP = re.compile(r"ProfilerStep#(\d+)")

# Registered operators and library calls by the beginnings of their names.
_OPERATORS = (
    ("nsa::embed", stages.REST),
    ("nsa::project", stages.PROJECTION),
    ("nsa::compressed_attention", stages.COMPRESSED),
    ("nsa::compress", stages.COMPRESSION),
    ("nsa::select_blocks", stages.CHOICE),
    ("nsa::selected_attention", stages.SELECTED),
    ("nsa::window_attention", stages.WINDOW),
    ("nsa::combine", stages.GATES),
    ("nsa::attention", stages.GATES),  # what is left of the whole: room for the gates' gradients
    ("nsa::add_statistics", stages.TELEMETRY),
    ("aten::scaled_dot_product_", stages.DENSE),
    ("aten::_scaled_dot_product_", stages.DENSE),
    ("torch_attn::_varlen_attn", stages.DENSE),
    ("c10d::", stages.COMMUNICATION),
    ("FSDP::", stages.COMMUNICATION),
    ("nccl:", stages.COMMUNICATION),
    ("gloo:", stages.COMMUNICATION),
    ("torch::autograd::AccumulateGrad", stages.GRADIENTS),
    ("Optimizer.", stages.OPTIMIZER),
)
# Kernels and copies whose names say it.
_DEVICE_NAMES = (
    (re.compile(r"nccl", re.IGNORECASE), stages.COMMUNICATION),
    (re.compile(r"Memcpy HtoD"), stages.DATA),
    (re.compile(r"Memcpy DtoH"), stages.TELEMETRY),
)
# Around what compiled code runs.
_COMPILED = re.compile(r"## Call CompiledFxGraph|Torch-Compiled Region|CompiledFunction")
_FUSED = re.compile(r"(?:triton_(?:poi|red|per|tem|for|mix)|cpp)_fused_(\w+?)_?\d*$")
# What one of the operators fused into a kernel says about it; the first that occurs wins.
_FUSED_STAGES = (
    ("log_softmax|nll_loss|logsumexp", stages.LOSS),
    ("silu", stages.MLP),
    ("cos|sin|cat", stages.PROJECTION),
    ("sigmoid|softmax", stages.GATES),
    ("rms_norm|rsqrt|pow|embedding|native_layer_norm", stages.REST),
    ("add", stages.REST),
    ("searchsorted|cumsum|arange", stages.PROJECTION),
    ("_to_copy|copy|t|transpose|clone|zeros", stages.CASTS),
)
_MATRIX_PRODUCTS = re.compile(r"aten::_?(scaled_)?(mm|addmm|bmm|baddbmm)$|triton_tem_fused_.*mm")


@dataclass(frozen=True)
class Place:
    """Where an event belongs.

    Attributes:
        stage: its stage; None where nothing tells.
        backward: whether it was launched by the backward pass.
    """

    stage: str | None
    backward: bool = False


@dataclass(frozen=True)
class Label:
    """A kernel of a step that launched its kernels one by one: what replayed kernels are compared with."""

    name: str
    place: Place


def product_stages(model: LanguageModel) -> dict[tuple[int, int], str]:
    """Stage of a matrix product by the two sizes of its matrix of weights, the smaller one first.

    Sizes that two stages share are left out: nothing is guessed.
    """
    found: dict[tuple[int, int], set[str]] = {}

    def add(rows: int, columns: int, stage: str) -> None:
        found.setdefault((min(rows, columns), max(rows, columns)), set()).add(stage)

    config = model.config
    add(config.width, config.vocab_size, stages.LOSS)
    for layer in model.decoder_layers():
        attention = layer.attention
        linears = {
            name: part
            for name, part in attention.named_children()
            if isinstance(part, nn.Linear) and name != "gate"
        }
        add(linears["o_proj"].in_features, config.width, stages.PROJECTION)
        add(
            config.width,
            sum(part.out_features for name, part in linears.items() if name != "o_proj"),
            stages.PROJECTION,
        )
        add(config.width, config.mlp_hidden_size, stages.MLP)
        if not isinstance(attention, NativeSparseAttention):
            continue
        for module in attention.modules():
            if isinstance(module, Compression) and module.phi == "mlp":
                for matrix in (module.w1, module.w2):
                    add(matrix.shape[1], matrix.shape[2], stages.COMPRESSION)
        for parameter in attention.gate.parameters():
            if parameter.ndim == 2:
                add(parameter.shape[0], parameter.shape[1], stages.GATES)
    return {sizes: next(iter(names)) for sizes, names in found.items() if len(names) == 1}


class Attribution:
    """Finds the place of every event of a trace.

    Args:
        trace: the trace.
        products: of :func:`product_stages`.
        reference: kernels of a micro-batch in the order in which they ran, of a step that launched
            them one by one; for those that this trace's steps replay from CUDA graphs.
    """

    def __init__(
        self, trace: Trace, products: Mapping[tuple[int, int], str], reference: Sequence[Label] = ()
    ) -> None:
        self._products = products
        self.thread, self.steps = _steps(trace)
        self._phases = sorted(
            (event.begin, event.end, event.name.removeprefix(PREFIX))
            for event in trace.host.get(self.thread, [])
            if event.name in (PREFIX + stages.FORWARD, PREFIX + stages.BACKWARD)
        )
        self._of_host: dict[int, str | None] = {}
        self._places: dict[int, Place] = {}
        replayed: dict[int, list[Event]] = {}
        for event in trace.device:
            if event.launch is not None and "GraphLaunch" in event.launch.name:
                replayed.setdefault(id(event.launch), []).append(event)
        aligned: dict[tuple[str, ...], list[Place]] = {}
        for events in replayed.values():
            names = tuple(event.name for event in events)
            if names not in aligned:
                aligned[names] = align(names, reference)
            self._places |= {
                id(event): place for event, place in zip(events, aligned[names], strict=True)
            }

    def place(self, event: Event) -> Place:
        """Where an event of the host or of the device belongs."""
        if id(event) not in self._places:
            self._places[id(event)] = self._find_place(event)
        return self._places[id(event)]

    def _find_place(self, event: Event) -> Place:
        host: Event | None = event
        if event.category in DEVICE:
            host = event.launch
            for pattern, named in _DEVICE_NAMES:
                if pattern.search(event.name):
                    return Place(named)
        if host is None:
            return Place(None)
        phase = self._phase(host.begin)
        stage = self._of_range(host) or self._of_compiled(event, host)
        if (
            stage is None
            and phase is not None
            and not _is_compiled(host)
            and (phase == stages.FORWARD or _linked(host))
        ):
            stage = stages.REST  # of the model's eager code, what no range of it names
        return Place(stage, phase == stages.BACKWARD and stage in stages.MODEL_STAGES)

    def micro_batch(self, trace: Trace) -> list[Label]:
        """Kernels of the first micro-batch of the last step, in the order in which they ran: a reference for others."""
        begin, end = self.steps[-1]
        phases = [(first, last) for first, last, _ in self._phases if begin <= first < end][:2]
        assert len(phases) == 2, "no forward and backward in the step"
        return [
            Label(event.name, self.place(event))
            for event in trace.device
            if event.launch is not None and phases[0][0] <= event.launch.begin < phases[1][1]
        ]

    def _phase(self, time: float) -> str | None:
        """Forward or backward, by the ranges of the main thread: autograd launches from another one."""
        index = bisect.bisect_right(self._phases, time, key=lambda phase: phase[0]) - 1
        return self._phases[index][2] if index >= 0 and time < self._phases[index][1] else None

    def _of_range(self, host: Event) -> str | None:
        if id(host) not in self._of_host:
            self._of_host[id(host)] = self._find_range(host)
        return self._of_host[id(host)]

    def _find_range(self, host: Event) -> str | None:
        name = host.name
        if name.startswith(PREFIX):
            stage = name.removeprefix(PREFIX)
            return None if stage in (stages.FORWARD, stages.BACKWARD) else stage
        for start, stage in _OPERATORS:
            if name.startswith(start):
                return stage
        if (
            host.forward is not None
            and (stage_of_forward := self._of_range(host.forward)) is not None
        ):
            return stage_of_forward
        return None if host.parent is None else self._of_range(host.parent)

    def _of_compiled(self, event: Event, host: Event) -> str | None:
        if not _is_compiled(host):
            return None
        fused = _FUSED.match(event.name)
        if fused is not None and "_tem_" not in event.name:
            words = set(re.findall(r"[a-z0-9]+", fused[1]))
            for pattern, stage in _FUSED_STAGES:
                if any(
                    part in fused[1] if len(part) > 3 else part in words
                    for part in pattern.split("|")
                ):
                    return stage
        for around in host.around():
            if _MATRIX_PRODUCTS.match(around.name):
                return self._of_product(around.args.get("Input Dims", []))
            if around.name.startswith("aten::embedding"):
                return stages.REST
            if around.name in ("aten::searchsorted", "aten::cumsum"):
                return stages.PROJECTION
        return None

    def _of_product(self, dims: Iterable[Sequence[int]]) -> str | None:
        """Stage of a product of matrices of these sizes: two of its three sizes are those of the weights."""
        matrices = [list(sizes)[-2:] for sizes in dims if len(sizes) >= 2][:2]
        if len(matrices) < 2:
            return None
        sizes = Counter([*matrices[0], matrices[1][1]])
        found = {stage for pair, stage in self._products.items() if not Counter(pair) - sizes}
        return next(iter(found)) if len(found) == 1 else None


def align(names: Sequence[str], reference: Sequence[Label]) -> list[Place]:
    """Places of kernels by name and order, from those of a reference; without a stage where it has no such kernel.

    What runs on two streams has no fixed order between them. So a kernel that ran as often as in
    the reference is that of its name and turn; others are found by what stands around them.

    Args:
        names: of the kernels, in the order in which they ran.
        reference: kernels whose places are known, in theirs.
    """
    places = [Place(None)] * len(names)
    known = [label.name for label in reference]
    for first, second, size in difflib.SequenceMatcher(
        None, names, known, autojunk=False
    ).get_matching_blocks():
        places[first : first + size] = [label.place for label in reference[second : second + size]]
    turns: dict[str, list[Place]] = {}
    for label in reference:
        turns.setdefault(label.name, []).append(label.place)
    often = Counter(names)
    alike = {name: iter(found) for name, found in turns.items() if len(found) == often[name]}
    return [
        next(alike[name]) if name in alike else place
        for name, place in zip(names, places, strict=True)
    ]


def _steps(trace: Trace) -> tuple[Thread, list[tuple[float, float]]]:
    """The thread that trains, and beginning and end of each step on it."""
    for thread, events in trace.host.items():
        found = [(event.begin, event.end) for event in events if STEP.fullmatch(event.name)]
        if found:
            return thread, found
    raise ValueError("trace: the events must hold steps (ProfilerStep#N), got none")


def _is_compiled(host: Event) -> bool:
    return any(_COMPILED.match(around.name) for around in host.around())


def _linked(host: Event) -> bool:
    return any(around.forward is not None for around in host.around())
