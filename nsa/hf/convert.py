"""Conversion of a dense pretrained model in Llama's layout to a sparse one, without training."""

from __future__ import annotations

import json
import math
import shutil
from contextlib import ExitStack
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nsa.config import NSAConfig, RopeScaling
from nsa.errors import check
from nsa.files import new_folder
from nsa.hf.config import CODE, CODE_FILE, NSALMConfig
from nsa.lm.config import LMConfig
from nsa.lm.llama import llama_name
from nsa.lm.model import LanguageModel
from nsa.rope import Rope
from nsa.train.config import DataConfig, OptimConfig, TrainConfig
from nsa.train.load import to_yaml
from nsa.train.pretrained import (
    CONFIG,
    INDEX,
    WEIGHTS,
    check_weights,
    is_exported,
    open_weights,
    read_object,
    weight_files,
)

_KINDS = ("llama", "mistral", "qwen2", "qwen3")
_MODEL, _OUT = "MODEL", "OUT"
# Configuration that trains an index, and tokens of its steps and sequences.
_TRAINING, _STEP, _SEQUENCE = "train.yaml", 65_536, 8192
# Weights of a model with an index.
_MODEL_FILE, _INDEX_FILE = "dense.safetensors", "index.safetensors"
# Tokenizer, generation settings, index of the weights, licence.
_KEPT = (".json", ".txt", ".model", ".jinja", "")
# Settings of the model that have the same meaning in both configurations.
_SHARED = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "dtype")


def convert(
    source: Path,
    target: Path,
    *,
    num_selected_blocks: int = 24,
    num_init_blocks: int = 1,
    num_local_blocks: int = 9,
    block_size: int = 64,
    scores: str = "token_max",
    index_dim: int | None = None,
    index_heads: int = 1,
    index_keys: str = "group",
) -> str:
    """Write a dense model as a sparse one to a new folder, which :mod:`nsa.hf` loads.

    The model has the selected branch alone, with a gate of 1, and keeps the dense model's weights
    under their names: these files are hard links, or copies on another file system. While all
    blocks are selected, that is for ``num_selected_blocks * block_size`` tokens, its logits are
    those of the dense model.

    Args:
        source: folder of transformers with safetensors (Llama, Mistral, Qwen 2, Qwen 3), or a GGUF
            file, whose weights are dequantized (needs the package ``gguf``).
        target: folder to create.
        num_selected_blocks: see :class:`nsa.NSAConfig`, as all further arguments.
        num_init_blocks: see there.
        num_local_blocks: see there.
        block_size: see there.
        scores: see there; until it is trained, an ``index`` scores by means of the dense model's
            queries and keys, by default the mean query of a group and its key.
        index_dim: see there; a divisor of the head size. A smaller index begins with evenly spaced
            rotated pairs of the heads. None means the head size.
        index_heads: see there; at most the query heads of an index key.
        index_keys: see there.

    Returns:
        One line that describes the result.

    Raises:
        ValueError: the target exists, or the model has a setting or weights that a sparse model
            does not support; the message names them.
    """
    pattern: dict[str, Any] = {
        "num_selected_blocks": num_selected_blocks,
        "num_init_blocks": num_init_blocks,
        "num_local_blocks": num_local_blocks,
        "block_size": block_size,
        "scores": scores,
    }
    if scores == "index":
        pattern |= {"index_heads": index_heads, "index_keys": index_keys}
        pattern |= {} if index_dim is None else {"index_dim": index_dim}
    check(not target.exists(), _OUT, "not exist yet", target)
    if source.suffix == ".gguf":
        with TemporaryDirectory(dir=target.parent, prefix=".unfinished") as folder:
            dequantize(source, Path(folder))
            return convert(Path(folder), target, **pattern)
    rule = f"be a folder with {CONFIG}, or a file *.gguf"
    check(is_exported(source), _MODEL, rule, source)
    kind = read_object(_MODEL, source / CONFIG).get("model_type")
    check(kind in _KINDS, f"model_type of {_MODEL}", f"be one of {', '.join(_KINDS)}", kind)
    dense = AutoConfig.from_pretrained(source)
    config = sparse_config(dense, **pattern)
    with ExitStack() as files, torch.device("meta"):
        named = LanguageModel(config).named_parameters()
        wanted = {llama_name(name): x for name, x in named if "_idx_" not in name}
        stored = open_weights(_MODEL, source, files)
        check_weights(_MODEL, stored, wanted, is_tied=config.tie_head)
    with new_folder(target) as unfinished:
        for file in source.iterdir():
            if file.is_file() and file.suffix in _KEPT and file.name != CONFIG:
                shutil.copyfile(file, unfinished / file.name)
        for name in weight_files(_MODEL, source):
            _link(source / name, unfinished / name)
        if config.has_index:
            _add_index(unfinished, config)
            training = index_training(config, dense.max_position_embeddings)
            (unfinished / _TRAINING).write_text(to_yaml(training), encoding="utf-8")
        values = {name: getattr(dense, name) for name in _SHARED}
        values["architectures"] = ["NSAForCausalLM"]
        NSALMConfig.of(config, **values).save_pretrained(unfinished)
        (unfinished / CODE_FILE).write_text(CODE, encoding="utf-8")
    blocks, same = f"{num_selected_blocks} blocks of {block_size}", num_selected_blocks * block_size
    line = f"{target}: {kind} with {blocks}, equal to the dense model for the first {same:,} tokens"
    train = f"nsa train {target / _TRAINING} --init-from {target} --data.path SHARDS"
    return line + f"; train its index: {train}" * (scores == "index")


def sparse_config(dense: PretrainedConfig, **pattern: Any) -> LMConfig:
    """Return the configuration of the sparse model.

    Args:
        dense: configuration of a Llama, Mistral, Qwen 2 or Qwen 3.
        pattern: fields of :class:`nsa.NSAConfig` that describe the selection.

    Raises:
        ValueError: a setting is not supported; the message names it and its value.
    """
    window, longest = getattr(dense, "sliding_window", None), dense.max_position_embeddings
    kinds = getattr(dense, "layer_types", None) or ["sliding_attention"]
    is_wide = window is None or window >= longest or "sliding_attention" not in kinds
    quantization, mlp_bias = getattr(dense, "quantization_config", None), "mlp_bias"
    for name, value, rule, fits in (
        ("hidden_act", dense.hidden_act, "be silu", dense.hidden_act in ("silu", "swish")),
        ("sliding_window", window, f"be null or at least {longest}", is_wide),
        (mlp_bias, True, "be false", not getattr(dense, mlp_bias, False)),
        ("quantization_config", quantization, "be absent", quantization is None),
    ):
        check(fits, f"{name} of {_MODEL}", rule, value)
    heads = dense.num_attention_heads
    size = getattr(dense, "head_dim", None) or dense.hidden_size // heads
    bias = "all" if getattr(dense, "attention_bias", False) else "none"
    fields: dict[str, Any] = {"projection_bias": "qkv" if dense.model_type == "qwen2" else bias}
    # Fields of the compressed branch, which is off, must fit the block size.
    block = min(pattern.get("block_size", 64), 32)
    fields |= {"compress_block_size": block, "compress_stride": min(block, 16)}
    if pattern.get("scores") == "index":  # its first projections are those of the model
        pattern = {"index_dim": size, "index_heads": 1, "index_keys": "group"} | pattern
        most = heads // (dense.num_key_value_heads if pattern["index_keys"] == "group" else 1)
        rule, given = f"be a divisor of the head size, {size}", pattern["index_dim"]
        check(size % given == 0, "index_dim", rule, given)
        rule, given = f"be at most {most}, the query heads of an index key", pattern["index_heads"]
        check(given <= most, "index_heads", rule, given)
    nsa = NSAConfig(
        num_heads=heads,
        num_kv_heads=dense.num_key_value_heads,
        head_dim=size,
        value_dim=size,
        branches=("slc",),
        share_kv=True,
        gate="fixed",
        rope_theta=dense.rope_parameters["rope_theta"],
        rope_scaling=_rope_scaling(dense, size),
        qk_norm=dense.model_type == "qwen3",
        qk_norm_eps=dense.rms_norm_eps,
        **fields,
        **pattern,
    )
    return LMConfig(
        vocab_size=dense.vocab_size,
        width=dense.hidden_size,
        num_layers=dense.num_hidden_layers,
        nsa=nsa,
        mlp="swiglu",
        mlp_hidden_size=dense.intermediate_size,
        tie_head=dense.tie_word_embeddings,
        norm_eps=dense.rms_norm_eps,
        init_std=dense.initializer_range,
    )


def index_training(model: LMConfig, longest: int) -> TrainConfig:
    """Return the configuration that trains an index of a frozen model, in 600 steps.

    Args:
        model: the sparse model.
        longest: most tokens of a sequence.
    """
    length = min(_SEQUENCE, longest)
    batch = max(_STEP // length, 1)
    schedule: dict[str, Any] = {"trained": "index", "lr": 1e-3, "index_warmup_steps": 600}
    return TrainConfig(
        model=model,
        data=DataConfig(source="shards", path="SHARDS", tokenizer="file", document_mask=False),
        optim=OptimConfig(**schedule, warmup_steps=20, betas=(0.9, 0.95), weight_decay=0.0),
        steps=600,
        seq_len=length,
        micro_batch=batch,
        accumulation=1,
        global_batch=batch,
        compile=True,
        loss_chunk=_SEQUENCE,
        telemetry=False,
        log_every=20,
        eval_every=0,
        eval_windows=8,
        checkpoint_every=0,
        sample_tokens=0,
    )


def _rope_scaling(dense: PretrainedConfig, size: int) -> RopeScaling | None:
    """Scaling of the rotary frequencies; an error unless frequencies equal those of transformers.

    Args:
        dense: see :func:`sparse_config`.
        size: size of a head.
    """
    given, name = dense.rope_parameters, f"rope_parameters of {_MODEL}"
    kind = given.get("rope_type")
    kinds = ("default", "linear", "yarn", "llama3")
    check(kind in kinds, name, f"have a rope_type of {', '.join(kinds)}", given)
    if kind == "default":
        return None
    names = {"factor": "factor", "original_max_position": "original_max_position_embeddings"}
    names |= {"beta_fast": "beta_fast", "beta_slow": "beta_slow"}
    if kind == "llama3":
        names |= {"beta_fast": "high_freq_factor", "beta_slow": "low_freq_factor"}
    known = {ours: given[theirs] for ours, theirs in names.items() if given.get(theirs) is not None}
    scaling = RopeScaling(kind, **known)
    cpu = torch.device("cpu")
    wanted, magnitude = ROPE_INIT_FUNCTIONS[kind](dense, cpu)
    rope = Rope(size, given["rope_theta"], scaling)
    found = rope.inverse_frequencies(cpu)
    fits = found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-5, atol=0)
    fits = fits and math.isclose(rope.magnitude, magnitude, rel_tol=1e-6)
    check(fits, name, "have no other settings than nsa.RopeScaling", given)
    return scaling


def _link(source: Path, target: Path) -> None:
    """Link a file, which may be a symbolic link itself; copy it to another file system.

    Only for weights: safetensors replaces a file that it saves, other writers change it in place.
    """
    try:
        target.hardlink_to(source.resolve())
    except OSError:
        shutil.copyfile(source, target)


def _add_index(folder: Path, config: LMConfig) -> None:
    """Add the first weights of an index: means of heads, of which it has evenly spaced pairs."""
    table, whole, nsa = folder / INDEX, folder / WEIGHTS, config.nsa
    keys = nsa.num_kv_heads if nsa.index_keys == "group" else 1
    step, half = nsa.head_dim // nsa.index_dim, nsa.head_dim // 2
    columns = torch.arange(nsa.head_dim).view(2, half)[:, ::step].flatten()
    found = dict[str, Tensor]()
    with ExitStack() as files:
        stored = open_weights(_MODEL, folder, files)
        parts = ("proj.weight", "proj.bias", "norm.weight")
        for layer, name, part in product(range(config.num_layers), "qk", parts):
            key = llama_name(f"layers.{layer}.attention.{name}_{part}")
            if key not in stored:
                continue
            first = stored[key][...]
            if part == "norm.weight":
                first = first[columns]
            else:  # mean of the heads of each index head, which are neighbors
                heads = first.unflatten(0, (keys, -1, nsa.head_dim))[:, :, columns].float()
                split = heads.tensor_split(nsa.index_heads if name == "q" else 1, 1)
                means = torch.stack([x.mean(1) for x in split], 1)
                first = means.to(first.dtype).flatten(0, 2)
            found[key.replace(f"{name}_{part}", f"{name}_idx_{part}")] = first
        where = dict.fromkeys(stored, _MODEL_FILE)
    if whole.is_file():
        whole.rename(folder / _MODEL_FILE)
    else:
        where = read_object(_MODEL, table)["weight_map"]
    save_file(found, folder / _INDEX_FILE, metadata={"format": "pt"})
    where |= dict.fromkeys(found, _INDEX_FILE)
    content = {"metadata": {}, "weight_map": where}
    table.write_text(json.dumps(content, indent=2), encoding="utf-8")


def dequantize(source: Path, folder: Path) -> None:
    """Write a GGUF file as a folder of transformers."""
    hint = "Install with: pip install 'nsa[gguf]'"
    check(
        find_spec("gguf") is not None, _MODEL, "be a folder without the package gguf", source, hint
    )
    # Older ones read another end token and decoder from some files.
    found = version("transformers")
    fits = tuple(map(int, found.split(".")[:2])) >= (5, 23)
    check(fits, "transformers", "be 5.23 or newer for a GGUF file", found, hint)
    from transformers import GgufConfig

    where: dict[str, Any] = {"pretrained_model_name_or_path": source.parent}
    where["gguf_file"] = source.name
    whole = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**where, quantization_config=whole)
    model.hf_quantizer = None  # it would refuse to save the dequantized weights
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
