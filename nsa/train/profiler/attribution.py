"""Which stage of the training step an event of a trace belongs to.

Four things tell, the first that does wins:

1. the innermost range around the launch: a stage of the trainer or the model (``nsa.stages``), or
   a registered operator;
2. in the backward pass of eager code, the range of the forward operator;
3. in compiled code, what was launched: the sizes of a matrix product, or the operators that a fused
   kernel's name lists;
4. for kernels replayed from a CUDA graph, the kernel in the same place of a step that launched them
   one by one.
"""

from __future__ import annotations

import bisect
import difflib
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from nsa import stages
from nsa.lm.model import LanguageModel
from nsa.train.profiler.trace import DEVICE, Event, Thread, Trace

PREFIX = "stage: "  # of the ranges that mark stages
STEP = re.compile(r"ProfilerStep#(\d+)")

# Registered operators and library calls, by how their names begin.
_OPERATORS = (
    ("nsa::embed", stages.REST),
    ("nsa::project", stages.PROJECTION),
    ("nsa::compressed_attention", stages.COMPRESSED),
    ("nsa::compress", stages.COMPRESSION),
    ("nsa::select_blocks", stages.SELECTION),
    ("nsa::selected_attention", stages.SELECTED),
    ("nsa::window_attention", stages.WINDOW),
    # nsa::attention: what the others leave, memory for the gates' gradients
    ("nsa::combine|nsa::attention", stages.GATES),
    ("nsa::add_statistics", stages.TELEMETRY),
    ("aten::_?scaled_dot_product_|torch_attn::_varlen_attn", stages.DENSE),
    ("c10d::|FSDP::|nccl:|gloo:", stages.COMMUNICATION),
    ("torch::autograd::AccumulateGrad", stages.GRADIENTS),
    ("Optimizer[.]", stages.OPTIMIZER),
)
# Kernels and copies whose names say it.
_DEVICE_NAMES = (
    ("(?i:.*nccl)", stages.COMMUNICATION),
    ("Memcpy HtoD", stages.DATA),
    ("Memcpy DtoH", stages.TELEMETRY),
)
# Names of what contains the calls of compiled code.
_COMPILED = re.compile(r"## Call CompiledFxGraph|Torch-Compiled Region|CompiledFunction")
_FUSED = re.compile(r"(?:triton_(?:poi|red|per|tem|for|mix)|cpp)_fused_(\w+?)_?\d*$")
# Stage of a fused kernel by the operators in its name; the first that occurs wins.
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
# Calls of single operators in it.
_IN_COMPILED_CODE = (
    ("aten::embedding", stages.REST),
    ("aten::(searchsorted|cumsum)$", stages.PROJECTION),
)
_MATRIX_PRODUCTS = re.compile(r"aten::_?(scaled_)?(mm|addmm|bmm|baddbmm)$|triton_tem_fused_.*mm")


@dataclass(frozen=True)
class Place:
    """Where an event belongs.

    Attributes:
        stage: its stage; None where nothing tells.
        backward: whether the backward pass launched it.
    """

    stage: str | None
    backward: bool = False


Labels = Sequence[tuple[str, Place]]  # names of kernels, in the order in which they ran


def product_stages(model: LanguageModel) -> dict[tuple[int, int], str]:
    """Stage of a matrix product by the two sizes of its matrix of weights, the smaller one first.

    Sizes that two stages share are left out: nothing is guessed.
    """
    found: dict[tuple[int, int], set[str]] = defaultdict(set)

    def add(stage: str, rows: int, columns: int) -> None:
        found[min(rows, columns), max(rows, columns)].add(stage)

    config = model.config
    add(stages.LOSS, config.width, config.vocab_size)
    for layer in model.decoder_layers():
        add(stages.MLP, config.width, config.mlp_hidden_size)
        columns = 0  # of the input projections, which are computed together
        for name, weight in layer.attention.named_parameters():
            owner, _, last = name.rpartition(".")
            if owner.startswith("gate") and weight.ndim == 2:
                add(stages.GATES, *weight.shape)
            elif last in ("w1", "w2"):  # of phi
                add(stages.COMPRESSION, *weight.shape[1:])
            elif owner == "o_proj":
                add(stages.PROJECTION, *weight.shape)
            elif owner.endswith("_proj"):
                columns += weight.shape[0]
        add(stages.PROJECTION, config.width, columns)
    return {sizes: next(iter(names)) for sizes, names in found.items() if len(names) == 1}


class Attribution:
    """Finds the place of every event of a trace.

    Args:
        trace: the trace.
        products: of :func:`product_stages`.
        reference: kernels of a micro-batch of a step that launched them one by one, for those that
            this trace's steps replay from CUDA graphs.

    Attributes:
        thread: the thread that trains.
        steps: begin and end of each step on it.
        place: where an event of the host or the device belongs.
    """

    def __init__(
        self, trace: Trace, products: Mapping[tuple[int, int], str], reference: Labels = ()
    ) -> None:
        self._products = products
        self.thread, self.steps = _steps(trace)
        self._phases = [
            (event.begin, event.end, event.name.removeprefix(PREFIX))
            for event in trace.host[self.thread]
            if event.name in (PREFIX + stages.FORWARD, PREFIX + stages.BACKWARD)
        ]
        self.place = functools.cache(self._find_place)
        self._stage_of_range = functools.cache(self._find_stage_of_range)
        replays: dict[Event, list[Event]] = defaultdict(list)
        for event in trace.device:
            launch = event.launch
            if launch is None or "GraphLaunch" not in launch.name:
                continue
            if self._stage_of_range(launch) is None:
                replays[launch].append(event)
        aligned = functools.cache(lambda names: align(names, reference))
        self._replayed: dict[Event, Place] = {}
        for events in replays.values():
            places = aligned(tuple(event.name for event in events))
            self._replayed.update(zip(events, places, strict=True))

    def micro_batch(self, trace: Trace) -> Labels:
        """Kernels of the first micro-batch of the last step: a reference for replayed ones."""
        (begin, _, _), (_, end, _) = [p for p in self._phases if p[0] >= self.steps[-1][0]][:2]
        return [
            (event.name, self.place(event))
            for event in trace.device
            if event.launch is not None and begin <= event.launch.begin < end
        ]

    def _find_place(self, event: Event) -> Place:
        if event in self._replayed:
            return self._replayed[event]
        host = event.launch if event.category in DEVICE else event
        if event.category in DEVICE and (named := _first_match(_DEVICE_NAMES, event.name)):
            return Place(named)
        if host is None:
            return Place(None)
        phase, compiled = self._phase(host.begin), _is_compiled(host)
        stage = self._stage_of_range(host)
        if stage is None and compiled:
            stage = self._stage_in_compiled_code(event, host)
        elif stage is None and (phase == stages.FORWARD or (phase and _is_linked(host))):
            stage = stages.REST  # of the model's eager code, what no range of it names
        return Place(stage, phase == stages.BACKWARD and stage in stages.MODEL_STAGES)

    def _phase(self, time: float) -> str | None:
        """Forward or backward, by the ranges of the main thread: autograd uses another one."""
        index = bisect.bisect_right(self._phases, time, key=itemgetter(0)) - 1
        return self._phases[index][2] if index >= 0 and time < self._phases[index][1] else None

    def _find_stage_of_range(self, host: Event) -> str | None:
        """What the innermost range says, or that of the forward operator of a backward one."""
        if host.name in (PREFIX + stages.FORWARD, PREFIX + stages.BACKWARD):
            return None
        if host.name.startswith(PREFIX):
            return host.name.removeprefix(PREFIX)
        if (stage := _first_match(_OPERATORS, host.name)) is not None:
            return stage
        outer = (
            self._stage_of_range(one) for one in (host.forward, host.parent) if one is not None
        )
        return next((stage for stage in outer if stage is not None), None)

    def _stage_in_compiled_code(self, event: Event, host: Event) -> str | None:
        fused = _FUSED.match(event.name)
        if fused is not None and "_tem_" not in event.name:
            words = set(re.findall(r"[a-z0-9]+", fused[1]))
            for parts, stage in _FUSED_STAGES:
                # Short names occur inside others: t, cat, cos.
                if any(part in (fused[1] if len(part) > 3 else words) for part in parts.split("|")):
                    return stage
        for outer in host.ancestors():
            if _MATRIX_PRODUCTS.match(outer.name):
                return self._stage_of_product(outer.args.get("Input Dims", []))
            if (called := _first_match(_IN_COMPILED_CODE, outer.name)) is not None:
                return called
        return None

    def _stage_of_product(self, dims: Iterable[Sequence[int]]) -> str | None:
        """Stage of a product: two of its three sizes are those of the weights."""
        matrices = [sizes[-2:] for sizes in dims if len(sizes) >= 2][:2]
        if len(matrices) < 2:
            return None
        sizes = Counter([*matrices[0], matrices[1][1]])
        found = {stage for pair, stage in self._products.items() if Counter(pair) <= sizes}
        return next(iter(found)) if len(found) == 1 else None


def align(names: Sequence[str], reference: Labels) -> list[Place]:
    """Places of kernels by name and order; without a stage where the reference has no such kernel.

    What runs on two streams has no fixed order between them. So a kernel that ran as often as in
    the reference is the one of the same name and turn; others are found by their neighbours.

    Args:
        names: names of the kernels, in the order in which they ran.
        reference: kernels whose places are known.
    """
    places = [Place(None)] * len(names)
    known = [name for name, _ in reference]
    matcher = difflib.SequenceMatcher(None, names, known, autojunk=False)
    for first, second, size in matcher.get_matching_blocks():
        places[first : first + size] = [place for _, place in reference[second : second + size]]
    often = Counter(names)
    for name in (name for name, number in Counter(known).items() if number == often[name]):
        turns = (place for label, place in reference if label == name)
        for index in (index for index, label in enumerate(names) if label == name):
            places[index] = next(turns)
    return places


def _steps(trace: Trace) -> tuple[Thread, list[tuple[float, float]]]:
    for thread, events in trace.host.items():
        found = [(event.begin, event.end) for event in events if STEP.fullmatch(event.name)]
        if found:
            return thread, found
    raise ValueError("the events must hold steps (ProfilerStep#N), got none")


def _first_match(patterns: Iterable[tuple[str, str]], name: str) -> str | None:
    return next((stage for pattern, stage in patterns if re.match(pattern, name)), None)


def _is_compiled(host: Event) -> bool:
    return any(_COMPILED.match(outer.name) for outer in host.ancestors())


def _is_linked(host: Event) -> bool:
    return any(outer.forward is not None for outer in host.ancestors())
