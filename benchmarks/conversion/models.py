"""Models with the weights of one dense model, and their times."""

from __future__ import annotations

import os
import shutil
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from nsa.bench.clock import peak_mib, release_memory, samples_ms
from nsa.hf.convert import convert
from nsa.lm.decoder import Decoder
from nsa.lm.model import LanguageModel
from nsa.testing.decode import fill_cache
from nsa.train.checkpoint import find_checkpoint
from nsa.train.pretrained import CONFIG, load_initial
from nsa.train.run_folder import RunFolder
from nsa.train.runs.evaluation import load_model

BATCHES, SAMPLES = (1, 16), 7
Row = dict[str, Any]
PATTERN: Row = {
    "num_selected_blocks": 24,
    "num_init_blocks": 1,
    "num_local_blocks": 9,
    "block_size": 64,
}
DENSE = ("dense", "dense graph")  # of transformers, and of this package


def variants() -> dict[str, dict[str, Any]]:
    """Sparse models by name, as changes of the pattern; the last one is dense."""
    budget = PATTERN["num_selected_blocks"] * PATTERN["block_size"]
    return {
        "token_max": {},
        "mean keys": {"scores": "compressed"},
        "random": {"scores": "random"},
        "window": {"branches": ("win",), "window_size": budget},
        "index": {},
        DENSE[1]: {},
    }


class Foreign(nn.Module):
    """A model of transformers with the parts of a language model that are used here."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.head = model, model.get_output_embeddings()
        self.embedding = model.get_input_embeddings()

    def hidden_states(self, tokens: Tensor) -> Any:
        """Input of the head ``[B, T, width]`` for tokens ``[B, T]``."""
        return self.model.model(tokens, use_cache=False).last_hidden_state


def with_yarn(folder: Path, target: Path, factor: float) -> Path:
    """Link a model at ``target`` with rotations for a context that is ``factor`` times longer."""
    shutil.copytree(folder.resolve(), target, copy_function=os.symlink)
    config = AutoConfig.from_pretrained(folder)
    original = config.max_position_embeddings
    changes = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    config.rope_parameters = {**config.rope_parameters, **changes}
    config.max_position_embeddings = round(factor * original)
    (target / CONFIG).unlink()
    config.save_pretrained(target)
    return target


def open_models(
    folder: Path, scratch: Path, run: str | None, only: list[str] | None
) -> Iterator[tuple[str, Any]]:
    """Models by name, fp32 on the CPU; the dense one of transformers first.

    Args:
        folder: the dense model.
        scratch: existing folder for converted models.
        run: folder of a run with a trained index, which comes last.
        only: names of the sparse models with the dense model's weights; None for all.
    """
    dense = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    yield DENSE[0], Foreign(dense.float())
    for scores in ("token_max", "index"):
        convert(folder, scratch / scores, **PATTERN, scores=scores)
    for name, changes in variants().items():
        if only is not None and name not in (*only, *DENSE):
            continue
        path = scratch / ("index" if name == "index" else "token_max")
        config = AutoConfig.from_pretrained(path).lm
        attention = "dense" if name in DENSE else "nsa"
        config = replace(config, attention=attention, nsa=replace(config.nsa, **changes))
        model = LanguageModel(config)
        load_initial(path, model)
        yield name, model
    if run is not None:
        opened = RunFolder.open(run, "--index")
        last = find_checkpoint(opened.checkpoints, "last")
        model, step = load_model(opened.load_config().model, last, torch.device("cpu"))
        nsa = model.config.nsa
        shape = f" of {nsa.index_dim}" * (nsa.index_dim < nsa.head_dim)
        if nsa.index_keys == "shared":
            shape = f" of {nsa.index_heads} x {nsa.index_dim}, shared"
        yield f"index{shape}, {step} steps", model


# --- times
def prefill(model: Any, length: int) -> Callable[[], Any]:
    """Prepare passes over a prompt that fill a cache."""
    prompt = [[n % 1000 % model.head.weight.shape[0] for n in range(length)]]
    if isinstance(model, Foreign):
        ids = torch.tensor(prompt, device=model.head.weight.device)
        return torch.no_grad()(partial(model.model, ids, use_cache=True, logits_to_keep=1))
    decoder = Decoder(model, max_tokens=length)

    def call() -> Tensor:
        decoder.cache.free(0)
        return decoder.prefill(prompt)

    return call


def decode(model: Any, length: int, batch: int = 1) -> Callable[[], Any]:
    """Prepare steps of one token after ``length`` others; ours are random keys and values."""
    token = torch.ones(batch, 1, dtype=torch.int64, device=model.head.weight.device)
    if isinstance(model, Foreign):
        cache = prefill(model, length)().past_key_values
        return torch.no_grad()(partial(model.model, token, past_key_values=cache, use_cache=True))
    decoder = Decoder(model, batch, max_tokens=length + 4 * SAMPLES)
    decoder.prefill([[1]] * batch)
    fill_cache(decoder.cache, length - 1)
    return partial(decoder.step, token)


def _make_and_call(make: Callable[[], Callable[[], Any]]) -> Any:
    return make()()


def measure_times(model: Any, length: int) -> Iterator[Row]:
    """Median time and peak memory, with the cache, of a prefill and of a decode step."""
    device, batches = model.head.weight.device, BATCHES[: 1 if isinstance(model, Foreign) else None]
    made = [("prefill", 1, length, partial(prefill, model, length))]
    made += [("decode", x, x, partial(decode, model, length, x)) for x in batches]
    for case, batch, tokens, make in made:
        memory, call = peak_mib(partial(_make_and_call, make), device), make()
        samples_ms(call, device, 3)  # compiles and captures
        ms = statistics.median(samples_ms(call, device, SAMPLES))
        rate = {"ms": ms, "tokens_per_s": 1000 * tokens / ms, "peak_mib": memory}
        yield {"case": case, "batch": batch, **rate}
        del call
        release_memory(device)
