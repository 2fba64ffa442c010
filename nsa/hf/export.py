"""Export of a run for transformers: weights, configuration, tokenizer, model card."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from nsa.errors import check
from nsa.files import new_folder
from nsa.hf.config import NSALMConfig
from nsa.hf.model import NSAForCausalLM
from nsa.hf.tokenizer import as_transformers
from nsa.lm.llama import llama_name, llama_settings
from nsa.lm.model import LanguageModel
from nsa.train.checkpoint import find_checkpoint, read_meta
from nsa.train.config import TrainConfig
from nsa.train.data import load_tokenizer
from nsa.train.environment import version
from nsa.train.pretrained import TOKENIZER
from nsa.train.run_folder import RunFolder
from nsa.train.runs.evaluation import load_model

Layout = Literal["nsa", "llama"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def export_run(
    folder: RunFolder,
    target: Path,
    *,
    checkpoint: str,
    layout: Layout,
    dtype: str,
    shard_size: str,
) -> str:
    """Write a checkpoint to a new folder, atomically.

    Args:
        folder: the run.
        target: folder to create.
        checkpoint: ``last``, ``best`` or a step.
        layout: ``nsa``, or ``llama`` for a dense model in the layout of transformers' Llama.
        dtype: dtype of the weights, ``fp32`` or ``bf16``.
        shard_size: maximum size of a weight file, such as ``5GB``.

    Returns:
        One line that describes the export.

    Raises:
        ValueError: the target exists, or Llama does not support the model.
    """
    check(not target.exists(), "DIR", "not exist yet", target)
    config = folder.load_config()
    if layout == "llama":
        llama_settings(config.model)
    is_size = re.fullmatch("[1-9][0-9]*[KMGT]B", shard_size) is not None
    check(is_size, "--shard-size", "be a size such as 5GB or 500MB", shard_size)
    path = find_checkpoint(folder.checkpoints, checkpoint)
    model, step = load_model(config.model, path, torch.device("cpu"))
    model.to(DTYPES[dtype])
    separator = load_tokenizer(folder.tokenizer).separator_id
    tokens = {"eos_token_id": separator, "pad_token_id": separator}
    values = {"max_position_embeddings": config.seq_len, "bos_token_id": None, **tokens}
    if layout == "llama":
        wrapped = as_llama(model, values)
    else:
        wrapped = NSAForCausalLM(NSALMConfig.of(model.config, **values), model)
    wrapped.generation_config = GenerationConfig(**tokens)
    card = model_card(config, model, read_meta(path), target.name, layout)
    with new_folder(target) as unfinished:
        wrapped.save_pretrained(unfinished, max_shard_size=shard_size)
        shutil.copyfile(folder.tokenizer, unfinished / TOKENIZER)
        saved = json.loads(folder.tokenizer.read_text(encoding="utf-8"))
        as_transformers(saved).save_pretrained(unfinished)
        (unfinished / "README.md").write_text(card, encoding="utf-8")
    size = sum(file.stat().st_size for file in target.iterdir())
    return f"{target}: step {step}, {dtype}, layout {layout}, {size / 1e6:,.1f} MB"


def as_llama(model: LanguageModel, values: dict[str, Any]) -> PreTrainedModel:
    """Convert a dense model to transformers' Llama with shared weights, for saving only.

    Args:
        model: the model.
        values: additional settings of ``LlamaConfig``.

    Raises:
        ValueError: Llama does not support the model.
    """
    settings = LlamaConfig(**llama_settings(model.config), **values)
    with torch.device("meta"):
        llama = LlamaForCausalLM(settings)
    state = {llama_name(name): x for name, x in model.state_dict().items()}
    llama.load_state_dict(state, assign=True)
    llama.tie_weights()
    return llama


def model_card(
    config: TrainConfig, model: LanguageModel, meta: dict[str, Any], name: str, layout: Layout
) -> str:
    """Model card: model, training data, loss, and how to load it.

    Args:
        config: the run.
        model: the model.
        meta: metadata of the checkpoint.
        name: name of the folder.
        layout: layout of the weights.
    """
    progress, data, nsa = meta["progress"], config.data, config.model.nsa
    figure = meta["val_bits_per_byte"]
    loss = "not evaluated at this step" if figure is None else f"{figure:.4f} bits a byte"
    attention = f"{nsa.num_heads} query heads in {nsa.num_kv_heads} groups of size {nsa.head_dim}"
    found = config.model.attention_kind
    if found != "dense":
        attention += f", branches {', '.join(nsa.branches)}, {nsa.num_selected_blocks} blocks of "
        attention += f"{nsa.block_size}, window {nsa.window_size}"
    source = f"{data.source} {data.path or ''}".strip()
    if config.model.layers:
        attention += f"; changes by layer: {json.dumps(config.model.layers)}"
    kind = {"nsa": "sparse (NSA)", "mixed": "sparse (NSA) and dense"}.get(found, found)
    needs = "import nsa.hf  # registers the classes\n" if layout == "nsa" else ""
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [{"llama" if found == "dense" else "native-sparse-attention"}]
---

# {name}

A causal language model with {kind} attention, trained with nsa {version("nsa")}.

| | |
|---|---|
| parameters | {model.num_parameters()["total"]:,} |
| layers, width | {config.model.num_layers}, {config.model.width} |
| attention | {attention} |
| tokenizer | {data.tokenizer}, {config.model.vocab_size:,} tokens |
| data | {source} |
| sequences in training | {config.seq_len:,} tokens |
| trained | {meta["step"]:,} steps, {progress["tokens"]:,} tokens |
| validation loss | {loss} |

```python
{needs}from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
batch = tokenizer(["Once"], return_tensors="pt")
print(tokenizer.batch_decode(model.generate(**batch, max_new_tokens=100)))
```

It repeats what its training text contains, mistakes and bias included, and has not been tuned to
follow instructions. No licence is stated.
"""
