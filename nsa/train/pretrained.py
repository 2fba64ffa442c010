"""Initial weights of a run: from another run, or from a folder in transformers' format."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from nsa.errors import check, fail
from nsa.lm.config import LMConfig
from nsa.lm.llama import LLAMA_EMBEDDING, as_fp32, check_llama, llama_name
from nsa.lm.model import LanguageModel
from nsa.train.checkpoint import load_tensors, read_into, read_meta
from nsa.train.run_folder import RunFolder
from nsa.train.state import weights

logger = logging.getLogger(__name__)

CONFIG, TOKENIZER = "config.json", "nsa_tokenizer.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_SUFFIX, _FLOATS = ".safetensors", ("F64", "F32", "F16", "BF16")
_WHERE = "--init-from"
# Buffers in old checkpoints, which every reader computes itself.
ROTARY = "rotary_emb.inv_freq"
# Fields of the pattern that do not show in the shapes of weights. Weights keep their meaning with
# other frequencies, which a run with longer sequences may want.
_HEADS = ("num_heads", "num_kv_heads", "head_dim", "value_dim")
_FREQUENCIES = ("rotary_dim", "rope_theta", "rope_scaling", "qk_norm_eps")


def is_exported(path: Path) -> bool:
    """Whether a folder contains a model in transformers' format."""
    return (path / CONFIG).is_file()


def initial_tokenizer(path: Path) -> Path | None:
    """Return the tokenizer of the weights, None if the configuration names it."""
    if not is_exported(path):
        return RunFolder(path.parent.parent).tokenizer
    return path / TOKENIZER if (path / TOKENIZER).is_file() else None


def load_initial(path: Path, model: LanguageModel) -> None:
    """Read the weights of a checkpoint, or of an exported folder in either layout.

    Projections of an index that it lacks keep their initial values, which is logged.

    Args:
        path: the checkpoint or the folder.
        model: model of the new run, sharded or whole.

    Raises:
        ValueError: the checkpoint or folder is damaged, contains another model, or weights that are
            not finite. Nothing has been loaded then.
    """
    wanted = weights(model)
    index = [name for name in wanted if "_idx_" in name]
    if not is_exported(path):
        _check_settings(read_meta(path)["config"]["model"], model.config)
        _log_absent(path, load_tensors(path, wanted, index))
        return
    found = read_object(_WHERE, path / CONFIG)
    kind = found.get("model_type")
    hint = "nsa export and nsa convert make them."
    check(kind in ("nsa_lm", "llama"), _WHERE, "be of type nsa_lm or llama", kind, hint)
    if kind == "llama":
        check_llama(_WHERE, found, model.config)
    else:
        _check_settings(found, model.config)
    with ExitStack() as files:
        stored = open_weights(_WHERE, path, files)
        names = {name: name for name in wanted}
        if kind == "llama" or LLAMA_EMBEDDING in stored:  # nsa convert keeps Llama's names
            names = {name: llama_name(name.removeprefix("model.")) for name in wanted}
        absent = [name for name in index if names[name] not in stored]
        wanted = {names[name]: x for name, x in wanted.items() if name not in absent}
        check_weights(_WHERE, stored, wanted, is_tied=model.config.tie_head)
        for name, tensor in wanted.items():
            is_finite = stored[name][...].to(tensor.dtype).isfinite().all()
            check(bool(is_finite), _WHERE, f"hold finite numbers in {name}", "inf or nan")
        for name, tensor in wanted.items():
            read_into(tensor, [stored[name]])
    _log_absent(path, absent)


def weight_files(argument: str, path: Path) -> list[str]:
    """Names of the files with weights in a folder of transformers.

    Args:
        argument: argument that named the folder, for messages.
        path: the folder.

    Raises:
        ValueError: the folder has neither one file nor the index of several.
    """
    return [WEIGHTS] if (path / WEIGHTS).is_file() else _indexed(argument, path / INDEX)


def open_weights(argument: str, path: Path, files: ExitStack) -> dict[str, Any]:
    """Open the tensors of a folder of transformers as slices by name, without reading them.

    Args:
        argument: argument that named the folder, for messages.
        path: the folder.
        files: closes the files.

    Raises:
        ValueError: a file is missing or damaged.
    """
    stored = dict[str, Any]()
    for name in weight_files(argument, path):
        try:
            file = files.enter_context(safe_open(path / name, framework="pt"))
        except (SafetensorError, OSError) as error:
            fail(argument, "hold tensors in the format of safetensors", f"{name} ({error})")
        stored |= {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
    return stored


def check_weights(
    argument: str, stored: Mapping[str, Any], wanted: Mapping[str, Tensor], *, is_tied: bool
) -> None:
    """Raise an error if stored weights differ from a model's in names, shapes or kind of number.

    Args:
        argument: argument that named the folder, for messages.
        stored: slices of the folder.
        wanted: weights of the model, by their names in the folder.
        is_tied: whether the head is the embedding; the folder may contain it too.
    """
    for name, tensor in wanted.items():
        shape = tuple(stored[name].get_shape()) if name in stored else None
        rule = f"hold {name} as {tuple(tensor.shape)}"
        check(shape == tuple(tensor.shape), argument, rule, shape)
        kind = stored[name].get_dtype()
        check(kind in _FLOATS, argument, f"hold {name} as one of {', '.join(_FLOATS)}", kind)
    extra = {name for name in stored if not name.endswith(ROTARY)} - wanted.keys()
    extra -= {"lm_head.weight"} if is_tied else set()
    check(not extra, argument, f"hold no {min(extra, default=None)}", "one")


def _check_settings(found: Mapping[str, Any], config: LMConfig) -> None:
    """Raise an error if weights belong to other heads, and warn of other frequencies and eps.

    Args:
        found: settings of the model that the weights belong to.
        config: the model of the run.
    """
    theirs = {**found.get("nsa", {}), "norm_eps": found.get("norm_eps", config.norm_eps)}
    ours = {**asdict(config.nsa), "norm_eps": config.norm_eps}
    for name in (*_HEADS, *_FREQUENCIES, "norm_eps"):
        value, wanted = theirs.get(name, ours[name]), ours[name]
        if as_fp32(value) != as_fp32(wanted):
            check(name not in _HEADS, _WHERE, f"have nsa.{name} {wanted}, as the run", value)
            logger.warning("%s has %s %s, this run %s", _WHERE, name, value, wanted)


def _log_absent(path: Path, names: list[str]) -> None:
    if names:
        count = f"{len(names)} weights of an index"
        logger.info("%s are not in %s and keep their initial values", count, path)


def _indexed(argument: str, path: Path) -> list[str]:
    """Return the files that an index names, which must be in the same folder."""
    found: Any = read_object(argument, path).get("weight_map")
    check(isinstance(found, dict), argument, f"hold a weight_map in {path.name}", found)
    for name in found.values():
        is_beside = isinstance(name, str) and name == Path(name).name and name.endswith(_SUFFIX)
        check(is_beside, argument, f"name files *{_SUFFIX} of the folder in {path.name}", name)
    return sorted({*found.values()})


def read_object(argument: str, path: Path) -> dict[str, Any]:
    """Read a JSON object from a file in the folder that ``argument`` named."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        fail(argument, "hold JSON in its files", f"{path} ({error})")
    check(isinstance(found, dict), argument, "hold JSON objects in its files", path)
    return dict(found)
