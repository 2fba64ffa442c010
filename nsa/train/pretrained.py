"""Initial weights of a run: from another run, or from a folder of ``nsa export``."""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from nsa.errors import check, fail
from nsa.lm.llama import check_llama, llama_name
from nsa.lm.model import LanguageModel
from nsa.train.checkpoint import load_tensors, read_into
from nsa.train.run_folder import RunFolder
from nsa.train.state import weights

logger = logging.getLogger(__name__)

CONFIG, TOKENIZER = "config.json", "nsa_tokenizer.json"
_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SUFFIX, _FLOATS = ".safetensors", ("F64", "F32", "F16", "BF16")
_WHERE = "--init-from"


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
    index = [name for name in weights(model) if "_idx_proj." in name]
    if not is_exported(path):
        _log_absent(path, load_tensors(path, weights(model), index))
        return
    found = _json(path / CONFIG)
    kind = found.get("model_type")
    hint = "nsa export makes both."
    check(kind in ("nsa_lm", "llama"), _WHERE, "be of type nsa_lm or llama", kind, hint)
    wanted = weights(model)
    if kind == "llama":
        check_llama(_WHERE, found, model.config)
        wanted = {llama_name(name.removeprefix("model.")): x for name, x in wanted.items()}
    names = [_FILE]
    if not (path / _FILE).is_file():
        names = _indexed(path / _INDEX)
    with ExitStack() as files:
        stored = dict[str, Any]()
        for name in names:
            try:
                file = files.enter_context(safe_open(path / name, framework="pt"))
            except (SafetensorError, OSError) as error:
                fail(_WHERE, "hold tensors in the format of safetensors", f"{name} ({error})")
            stored |= {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        absent = [name for name in index if name not in stored]
        wanted = {name: x for name, x in wanted.items() if name not in absent}
        for name, tensor in wanted.items():
            shape = tuple(stored[name].get_shape()) if name in stored else None
            rule = f"hold {name} as {tuple(tensor.shape)}"
            check(shape == tuple(tensor.shape), _WHERE, rule, shape)
            kind = stored[name].get_dtype()
            check(kind in _FLOATS, _WHERE, f"hold {name} as one of {', '.join(_FLOATS)}", kind)
            is_finite = stored[name][...].to(tensor.dtype).isfinite().all()
            check(bool(is_finite), _WHERE, f"hold finite numbers in {name}", "inf or nan")
        extra = sorted(stored.keys() - wanted.keys())
        if model.config.tie_head and extra == ["lm_head.weight"]:
            extra = []
        check(not extra, _WHERE, f"hold no {', '.join(extra[:1])}", "one")
        for name, tensor in wanted.items():
            read_into(tensor, [stored[name]])
    _log_absent(path, absent)


def _log_absent(path: Path, names: list[str]) -> None:
    if names:
        count = f"{len(names)} projections of an index"
        logger.info("%s are not in %s and keep their initial values", count, path)


def _indexed(path: Path) -> list[str]:
    """Return the files that an index names, which must be in the same folder."""
    found: Any = _json(path).get("weight_map")
    check(isinstance(found, dict), _WHERE, f"hold a weight_map in {path.name}", found)
    for name in found.values():
        is_beside = isinstance(name, str) and name == Path(name).name and name.endswith(_SUFFIX)
        check(is_beside, _WHERE, f"name files *{_SUFFIX} of the folder in {path.name}", name)
    return sorted({*found.values()})


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        fail(_WHERE, "hold JSON in its files", f"{path} ({error})")
    check(isinstance(found, dict), _WHERE, "hold JSON objects in its files", path)
    return dict(found)
