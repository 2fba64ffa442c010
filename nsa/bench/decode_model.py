"""Whole models that generate: a step after a long context, and prompts."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nsa.bench.cases import CASES
from nsa.bench.clock import Timing, percentiles, samples_ms, synchronize
from nsa.bench.decode_attention import DENSE_KERNELS, KERNELS, bytes_of_keys
from nsa.bench.gate import Verdict, judge
from nsa.bench.host import BUDGET
from nsa.lm.config import LMConfig
from nsa.lm.decoder import Decoder
from nsa.lm.model import LanguageModel
from nsa.testing import assert_within_budget
from nsa.testing.decode import fill_cache

DTYPE = torch.bfloat16  # of weights, products, attention and the residual stream
GATE_LAYERS, GATE_STEPS = 2, 3  # on a GPU the third step replays the CUDA graph of the second
WARM_UP_STEPS, EXTRA_STEPS = 3, 5
PREFILLS = 5


@dataclass(frozen=True)
class Pass:
    """What is timed of a model.

    Attributes:
        call: a greedy step of all sequences, or a prompt.
        tokens: that one call takes in.
        kernels: parts of the names of kernels that have to run.
        method: how it is launched.
        calls: that are timed.
        count_bytes: gives keys, values and weights that a call loads, bytes; the keys are counted
            by kernels. None: nothing is counted.
    """

    call: Callable[[], object]
    tokens: int
    kernels: tuple[str, ...]
    method: str
    calls: int
    count_bytes: Callable[[], int] | None = None

    def time(self, device: torch.device) -> tuple[Timing, float]:
        """Times of warmed-up calls, and tokens/s over all of them."""
        for _ in range(WARM_UP_STEPS):
            self.call()
        synchronize(device)
        samples = samples_ms(self.call, device, self.calls)
        speed = 1000 * self.tokens * len(samples) / sum(samples)
        return percentiles(samples, 1, self.method), speed


def new_model(config: LMConfig, device: torch.device) -> LanguageModel:
    """With random weights in ``DTYPE``, the same ones on every device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LanguageModel(config).to(device, DTYPE).eval()


def prepare_step(
    config: LMConfig, context: int, batch: int, steps: int, device: torch.device
) -> Pass:
    """Greedy steps, each one's token the next one's input, after a context of random keys.

    The tokens stay on the device.
    """
    most = context + WARM_UP_STEPS + steps + EXTRA_STEPS
    model = new_model(config, device)
    decoder = Decoder(model, batch, max_tokens=most)
    tokens = decoder.prefill([[0]] * batch).argmax(-1, keepdim=True)
    fill_cache(decoder.cache, context - 2)

    def step() -> None:
        nonlocal tokens
        tokens = decoder.step(tokens).argmax(-1)

    @torch.no_grad()
    def count_bytes() -> int:
        heads, layers = config.nsa.num_kv_heads, decoder.cache.layers
        keys = len(layers) * batch * heads * max(decoder.cache.lengths)
        if config.attention == "nsa":
            reads = torch.zeros(batch * heads, 3, dtype=torch.int64, device=device)
            for layer in layers:
                layer.reads = reads
            decoder.take(tokens)  # not from the graph, whose kernels do not count
            keys = int(reads.sum())
        parts = model.num_parameters()
        weights = parts["total"] - parts["embedding"] * (not config.tie_head)
        return bytes_of_keys(keys, config.nsa, DTYPE) + weights * DTYPE.itemsize

    kernels = KERNELS if config.attention == "nsa" else DENSE_KERNELS
    method = "CUDA graph of a step, argmax apart" if device.type == "cuda" else "cpu"
    return Pass(step, batch, kernels, method, steps, count_bytes)


def prepare_prefill(config: LMConfig, length: int, device: torch.device) -> Pass:
    """A prompt of one sequence, from token numbers on the host to the logits behind it."""
    decoder = Decoder(new_model(config, device), max_tokens=length)
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(config.vocab_size, (length,), generator=generator).tolist()

    def prefill() -> Tensor:
        decoder.cache.free(0)
        return decoder.prefill([text])

    kernels = CASES["attention"].kernels[0] if config.attention == "nsa" else ()
    return Pass(prefill, length, kernels, "launches" if device.type == "cuda" else "cpu", PREFILLS)


def check_decoder(config: LMConfig, device: torch.device) -> Verdict:
    """Compare logits of a prompt and of steps behind it with full passes in fp64 on the CPU.

    Two layers and so few tokens that every block is selected: where blocks compete, rounding
    decides between two with nearly equal scores.
    """
    pattern, cpu = config.nsa, torch.device("cpu")
    config = replace(config, num_layers=min(config.num_layers, GATE_LAYERS))
    length = pattern.num_selected_blocks * pattern.block_size
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(config.vocab_size, (2, length), generator=generator)
    model = new_model(config, cpu)

    def expected(whole: LanguageModel) -> Tensor:
        with torch.no_grad():
            return torch.stack([whole(text)[-GATE_STEPS - 1 :] for text in texts])

    def measure(errors: dict[str, float]) -> None:
        plain, exact = expected(model), expected(deepcopy(model).double())
        decoder = Decoder(deepcopy(model).to(device), 2, max_tokens=length)
        found = [decoder.prefill(texts[:, :-GATE_STEPS].tolist())[:, None]]
        for token in texts[:, -GATE_STEPS:].to(device).split(1, dim=1):
            found.append(decoder.step(token).clone())
        logits = torch.cat(found, 1).cpu()
        within = assert_within_budget(logits, plain, exact, "logits", BUDGET)
        errors["logits"] = within.total

    return judge(measure)
