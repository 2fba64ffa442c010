"""``generate`` of transformers with a static cache: this model's, and a dense Llama's."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from nsa.bench.clock import Timing, percentiles, synchronize
from nsa.bench.gate import Verdict, judge
from nsa.bench.implementations import UnsupportedError
from nsa.lm.config import LMConfig
from nsa.testing.budget import CEILING

# Its prompt is not made up: a longer one would take minutes.
LONGEST = 65_536
DTYPE = torch.bfloat16
_OPTIONS: dict[str, Any] = {
    "do_sample": False,
    "cache_implementation": "static",  # of Llama on a GPU, steps are compiled then
    "eos_token_id": None,
    "pad_token_id": 0,
}


def new_llama(config: LMConfig, max_tokens: int) -> Any:
    """transformers' Llama, as large as a dense model, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    matrices = 3 if config.mlp == "swiglu" else 2
    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.nsa.num_heads,
        "num_key_value_heads": config.nsa.num_kv_heads,
        "head_dim": config.nsa.head_dim,
        "intermediate_size": config.mlp_hidden_size * matrices // 3,  # of three matrices
        "max_position_embeddings": max_tokens,
        "tie_word_embeddings": config.tie_head,
    }
    return LlamaForCausalLM(LlamaConfig.from_dict(sizes))


def new_nsa(config: LMConfig, max_tokens: int) -> Any:
    """This model with the interface of transformers, with random weights."""
    from nsa.hf import NSAForCausalLM, NSALMConfig

    return NSAForCausalLM(NSALMConfig.of(config, max_position_embeddings=max_tokens))


# What makes a model, by the name in rows, and the attention of its configuration.
GENERATORS = {"hf": ("nsa", new_nsa), "transformers": ("dense", new_llama)}


def time_generate(
    name: str, config: LMConfig, context: int, batch: int, steps: int, device: torch.device
) -> tuple[Verdict, Timing]:
    """Check the last logits against a pass without a cache, and time steps behind a prompt.

    Weights are in bf16, and so is all that is computed.

    Raises:
        UnsupportedError: more than one sequence, or a prompt that would take minutes.
    """
    from transformers import LogitsProcessor

    if batch > 1 or context > LONGEST:
        raise UnsupportedError(f"measured with one sequence of at most {LONGEST:,} tokens")
    torch.manual_seed(0)
    model = GENERATORS[name][1](config, context + steps + 1).to(device, DTYPE).eval()
    prompt = torch.randint(config.vocab_size, (1, context), device=device)
    # Without it tokens that equal the padding would be masked.
    options = {**_OPTIONS, "attention_mask": torch.ones_like(prompt)}
    marks, last = list[float](), list[Tensor]()

    class Clock(LogitsProcessor):
        """Sees the logits of every step."""

        def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
            synchronize(device)
            marks.append(1000 * time.perf_counter())
            last[:] = [logits[0].clone()]
            return logits

    for _ in range(2):  # the first time compiles
        marks.clear()
        options["logits_processor"] = [Clock()]
        ids = model.generate(prompt, max_new_tokens=steps + 1, **options)

    def measure(errors: dict[str, float]) -> None:
        with torch.no_grad():
            exact = model(ids[:, :-1], logits_to_keep=1).logits[0, -1].float()
        errors["logits"] = float((last[0].float() - exact).norm() / exact.norm())
        assert errors["logits"] <= CEILING[DTYPE], f"logits: error {errors['logits']:.3g}"

    times = [end - start for start, end in pairwise(marks)]
    return judge(measure), percentiles(times, 1, "generate() with a static cache")
