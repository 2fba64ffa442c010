"""Memory of operators on several streams: the rules of nsa/ops/_side_stream.py, without a GPU.

Launchers run as always, on tensors of the CPU, and kernels are left out. A model of streams knows
which stream waits for which. It is told which stream makes, uses and releases each piece of memory,
and finds what another tensor could overwrite, whatever other streams there are.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nsa import NSAConfig
from nsa.config import BRANCHES
from nsa.ops import _plan, _side_stream, selected
from nsa.ops import attention as whole
from nsa.ops._operator import open_flat
from nsa.ops._packed import compressed_cu_seqlens
from nsa.ops._plan import planned
from nsa.ops._triton.kernel import Launch
from nsa.ops.attention import BranchInputs
from nsa.ops.selected import launch as triton_launch
from nsa.ops.selected.types import SelectedInputs, SelectedResults
from nsa.testing import packed_offsets
from tests.ops.cases import SMALL, small

CUDA = torch.device("cuda")


class ModelStream:
    """A stream of the model; its clock says what has happened before whatever it is given next."""

    def __init__(self, number: int) -> None:
        self.number, self.device, self.clock = number, CUDA, {number: 0}

    def tick(self) -> int:
        self.clock[self.number] += 1
        return self.clock[self.number]


class ModelEvent:
    """An event of the model, which may be recorded again and again."""

    def record(self, stream: ModelStream) -> None:
        self.clock = dict(stream.clock)

    def wait(self, stream: ModelStream) -> None:
        for number, time in self.clock.items():
            stream.clock[number] = max(stream.clock.get(number, 0), time)


@dataclasses.dataclass
class Memory:
    """One storage: its stream, when it was made, and when each stream used it last."""

    name: str
    home: ModelStream
    made: int
    used: dict[int, int]

    def pending(self) -> list[int]:
        """Streams whose use the home does not wait for: memory released now is overwritten."""
        known = self.home.clock
        return [number for number, time in self.used.items() if known.get(number, 0) < time]


class StreamModel(TorchDispatchMode):
    """Follows every operation of PyTorch and every launch of a kernel while it is entered.

    Attributes:
        faults: what breaks a rule.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.calling = ModelStream(0)
        self.current, self.made = [self.calling], [self.calling]
        self.memory: dict[int, Memory] = {}
        self.faults: list[str] = []
        self.launches: list[int] = []  # the stream of each kernel and of each operator that writes
        for name, stand_in in (
            ("Stream", self.new_stream),
            ("Event", ModelEvent),
            ("stream", self.on),
            ("current_stream", lambda device: self.current[-1]),
        ):
            monkeypatch.setattr(torch.cuda, name, stand_in)
        _side_stream.streams_of.cache_clear()
        real = _side_stream.fork_join
        for module in (whole, triton_launch):
            monkeypatch.setattr(module, "fork_join", lambda _, enabled=True: real(CUDA, enabled))
        monkeypatch.setattr(Launch, "__call__", lambda launch, *given: self.launch(launch, *given))
        monkeypatch.setattr(_plan, "kernels_run_on_cpu", lambda: True)

    def new_stream(self, device: torch.device, priority: int) -> ModelStream:
        self.made.append(ModelStream(len(self.made)))
        return self.made[-1]

    @contextmanager
    def on(self, stream: ModelStream) -> Iterator[None]:
        self.current.append(stream)
        try:
            yield
        finally:
            self.current.pop()

    def launch(self, launch: Launch, *arguments: Any) -> None:
        self.launches.append(self.current[-1].number)
        self.touch("a kernel", [arguments, launch._constants])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.touch(str(func), [args, kwargs])
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            self.launches.append(self.current[-1].number)
        self.touch(str(func), [result])
        return result

    def touch(self, what: str, arguments: Any) -> None:
        stream = self.current[-1]
        time = stream.tick()
        for x in tree_leaves(arguments):
            if isinstance(x, Tensor):
                memory = self.track(x, f"{tuple(x.shape)} of {what}")
                if stream.clock.get(memory.home.number, 0) < memory.made:
                    where = f"made on {memory.home.number} after the fork of {stream.number}"
                    self.faults.append(f"{memory.name}: {where}")
                memory.used[stream.number] = time

    def track(self, x: Tensor, name: str) -> Memory:
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self.memory:
            home = self.current[-1]
            self.memory[key] = Memory(name, home, home.clock[home.number], {})
            weakref.finalize(storage, self.release, key)
        return self.memory[key]

    def release(self, key: int) -> None:
        memory = self.memory.pop(key)
        if late := memory.pending():
            where = f"released on {memory.home.number} before {late} is done"
            self.faults.append(f"{memory.name}: {where}")

    def check(self, results: Sequence[Tensor]) -> None:
        for x in results:
            memory = self.track(x, "a result")
            if memory.home is not self.calling:
                self.faults.append(f"{memory.name}: a result made on {memory.home.number}")
            if late := memory.pending():
                self.faults.append(f"{memory.name}: a result that {late} may still write")
        assert not self.faults, "\n".join(self.faults)


@pytest.fixture
def model(monkeypatch):
    yield StreamModel(monkeypatch)
    _side_stream.streams_of.cache_clear()


# ------------------------------------------------------------------------------
# the model itself


def a_result_made_on_1(streams: Any) -> Tensor:
    with streams.on_side():
        return torch.zeros(3)


def made_on_0_after_the_fork_of_1(streams: Any) -> Tensor:
    x = torch.zeros(3)
    with streams.on_side():
        x.add_(1)
    return x


def released_on_0_before(streams: Any) -> Tensor:
    x = torch.zeros(3)
    streams.fork()
    with streams.on_side():
        x.add_(1)
    del x
    return torch.zeros(3)


def released_on_1_before(streams: Any) -> Tensor:
    with streams.on_side():
        x = torch.zeros(3)
        wait = streams.record()
    wait()
    y = x + 1
    del x
    return y


BROKEN = [a_result_made_on_1, made_on_0_after_the_fork_of_1]
BROKEN += [released_on_0_before, released_on_1_before]


@pytest.mark.parametrize("broken", BROKEN)
def test_the_model_finds_what_breaks_the_rules(broken, model):
    with model:
        with _side_stream.fork_join(CUDA) as streams:
            result = broken(streams)
        with pytest.raises(AssertionError, match=broken.__name__.replace("_", " ")):
            model.check([result])


def test_the_model_finds_nothing_where_the_rules_are_kept(model):
    with model:
        x, out = torch.zeros(3), torch.empty(3)
        with _side_stream.fork_join(CUDA) as streams:
            with streams.on_side():
                torch.add(x, (x + 1).sort()[0], out=out)
            y = x * 2
        del x
        model.check([out, y])


def test_an_error_leaves_nothing_behind_on_the_side(model):
    def fail():
        with model, _side_stream.fork_join(CUDA) as streams, streams.on_side():
            torch.zeros(3)
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    assert model.calling.clock[1] == model.made[1].clock[1] > 0


# ------------------------------------------------------------------------------
# the operators

NUMBER, LENGTH = 2, 400  # long enough for the selected blocks to decide which algorithm runs
TOKENS = NUMBER * LENGTH


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of whole attention.

    Attributes:
        pattern: the sparse pattern.
        algorithm: of the selected branch.
        packed: whether there are offsets.
        own_queries: whether the compressed branch has queries of its own.
        strided: whether inputs have strides that kernels copy.
    """

    pattern: NSAConfig = SMALL
    algorithm: str = "auto"
    packed: bool = True
    own_queries: bool = False
    strided: bool = False

    def rows(self, count: int, number: int, size: int) -> Tensor:
        x = torch.zeros(count, number, size, dtype=torch.float32)
        return torch.zeros(count, size, number).transpose(1, 2) if self.strided else x

    def inputs(self) -> tuple[Any, ...]:
        """Inputs of the whole; keys and values of a branch are None if they are not read."""
        pattern, keys = self.pattern, list[Tensor | None]()
        q, q_cmp = (self.rows(TOKENS, pattern.num_heads, pattern.head_dim) for _ in "qq")
        for branch in BRANCHES:
            count = TOKENS // pattern.compress_stride if branch == "cmp" else TOKENS
            is_on = branch in pattern.branches
            has_keys = is_on or (branch == "cmp" and pattern.compresses_keys)
            for size, is_read in ((pattern.head_dim, has_keys), (pattern.value_dim, is_on)):
                keys.append(self.rows(count, pattern.num_kv_heads, size) if is_read else None)
        gates = torch.zeros(TOKENS, pattern.num_heads, 3)
        index = list[Tensor | None]([None, None])
        if pattern.has_index:
            heads = pattern.scoring
            numbers = (heads.num_heads, heads.num_kv_heads)
            index = [self.rows(TOKENS, number, heads.head_dim) for number in numbers]
        return q, q_cmp if self.own_queries else None, *keys, gates, *index

    def where(self) -> tuple[Any, ...]:
        cu = packed_offsets([LENGTH] * NUMBER) if self.packed else None
        cu_cmp = None if cu is None else compressed_cu_seqlens(cu, self.pattern)
        return cu, cu, cu_cmp, NUMBER, LENGTH, LENGTH, self.pattern.text, 0.25, self.algorithm


def run_twice(function: Callable[..., Any], model: StreamModel, *arguments: Any) -> Any:
    """Results of the second of two calls, which uses the plan of the first and the same streams."""
    launches, results, run = [], None, planned(function)
    for _ in range(2):
        del results
        before = len(model.launches)
        results = run(*arguments)
        model.check(results)
        assert model.current == [model.calling]
        launches.append(model.launches[before:])
    assert launches[0] == launches[1]
    return results


def flat(module: Any, inputs: Any, results: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of an operator's module, of flat arguments as PyTorch gives them."""
    count, dout = len(inputs._fields), len(inputs._fields) + len(results._fields)

    def forward(*given: Any) -> Any:
        return tuple(module._forward(*open_flat(inputs, count, given)))

    def backward(*given: Any) -> Any:
        opened, call = open_flat(inputs, count, (*given[:count], *given[dout + 1 :]))
        grads = module._backward(opened, results(*given[count:dout]), given[dout], call)
        return [x for x in grads if x is not None]

    return forward, backward


CALLS = {
    "packed": Call(),
    "dense": Call(packed=False),
    "tiled": Call(algorithm="tiled"),
    "gathered": Call(algorithm="gathered"),
    "copies": Call(strided=True),
    "queries of its own": Call(own_queries=True, strided=True),
    "two stages": Call(small(coarse_block_size=32, num_coarse_blocks=6)),
    "fp8": Call(small(score_precision="fp8")),
    "by token": Call(small(scores="token_max"), own_queries=True, strided=True),
    "by token, fp8": Call(
        small(scores="token_max", score_precision="fp8", branches=("slc", "win"))
    ),
    "index": Call(small(scores="index", index_keys="shared"), strided=True),
    "no window": Call(small(branches=("cmp", "slc"))),
    "no selection": Call(small(branches=("cmp", "win")), own_queries=True),
    "no compressed branch": Call(small(branches=("slc", "win"))),
    "window alone": Call(small(branches=("win",))),
}


@pytest.fixture(params=[1 << 26, 1], ids=["one segment", "segments"])
def segments(request, monkeypatch):
    """Partial results above this size are kept in segments, with more memory of the side stream."""
    monkeypatch.setattr(triton_launch, "SMALL", request.param)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("segments")
def test_whole_attention(name, model):
    call = CALLS[name]
    given, where = call.inputs(), call.where()
    with model:
        for x in filter(torch.is_tensor, (*given, *where)):
            model.track(x, "an input")
        forward, backward = flat(whole, BranchInputs, whole.AttentionResults)
        results = run_twice(forward, model, *given, *where)
        # Integers that kernels left out may be anything; used as places they must be some.
        saved = [x if x.dtype.is_floating_point else torch.zeros_like(x) for x in results[1:]]
        if call.strided and saved[1].numel():
            # lse of the compressed branch, as a compiler may pass it
            saved[1] = saved[1].contiguous()
        dout = torch.zeros_like(results[0])
        del results
        run_twice(backward, model, *given, dout, *saved, dout, *where)
    on = call.pattern.branches
    expected = 1 if len(on) == 1 else 3 if "slc" in on else 2
    assert len(set(model.launches)) == expected


@pytest.mark.parametrize("algorithm", ["tiled", "gathered", "auto"])
@pytest.mark.usefixtures("segments")
def test_selected_attention_alone(algorithm, model):
    call = Call(small(branches=("slc",)), strided=True)
    q, _, _, _, k, v, *_ = call.inputs()
    cu, *_ = call.where()
    where = (cu, cu, None, NUMBER, LENGTH, LENGTH, SMALL.text, 0.25, algorithm)
    forward, backward = flat(selected, SelectedInputs, SelectedResults)
    indices = torch.zeros(
        q.shape[0], SMALL.num_kv_heads, SMALL.num_selected_blocks, dtype=torch.int32
    )
    with model:
        for x in (q, k, v, cu, indices):
            model.track(x, "an input")
        results = forward(q, k, v, indices, *where)
        model.check(results)
        given = [q, k, v, indices, *results[:2], *(torch.zeros_like(x) for x in results[2:])]
        dout = torch.zeros_like(results[0])
        run_twice(backward, model, *given, dout, *where)
    assert set(model.launches) == {0, 1}
