"""Checkpoints on disk: whole or absent, verified, and loaded without running any code from the file.

A checkpoint is a folder ``step-00001000`` with files of ``torch.distributed.checkpoint`` (tensors alone) and ``meta.json`` (all
that is not a tensor, and a SHA-256 of every other file). It is written under another name, flushed to the disk and only then
renamed, so that a folder of this name is complete.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from nsa.errors import check

FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})")
_META = "meta.json"
_UNFINISHED = ".unfinished-"


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in ``folder``, oldest first."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def save_checkpoint(folder: Path, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], *, keep: int) -> Path:
    """Write a checkpoint, then remove all but the newest ``keep``.

    Args:
        folder: folder of all checkpoints of a run; made if need be.
        step: optimizer steps done, for the name.
        tensors: everything that is a tensor, by name.
        meta: everything else, as JSON.
        keep: checkpoints that stay, this one included.

    Returns:
        The folder of this checkpoint.

    Raises:
        FileExistsError: there is a checkpoint of this step.
    """
    target = folder / f"step-{step:08d}"
    if target.exists():
        raise FileExistsError(f"{target} exists already")
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(f"{_UNFINISHED}*"):  # of a process that was killed here
        shutil.rmtree(leftover)
    unfinished = folder / f"{_UNFINISHED}{target.name}"
    with _single_process():
        save(dict(tensors), storage_writer=FileSystemWriter(unfinished, sync_files=True), no_dist=True)
    files = {path.name: _sha256(path) for path in sorted(unfinished.iterdir())}
    described = {"format": FORMAT, "torch": torch.__version__, "files": files, **meta}
    with (unfinished / _META).open("w", encoding="utf-8") as file:
        json.dump(described, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _flush_folder(unfinished)
    unfinished.rename(target)
    _flush_folder(folder)
    for old in list_checkpoints(folder)[:-keep]:
        doomed = old.rename(folder / f"{_UNFINISHED}{old.name}")  # never half of a checkpoint under a valid name
        shutil.rmtree(doomed)
    return target


def read_meta(path: Path) -> dict[str, Any]:
    """Everything of a checkpoint that is not a tensor.

    Raises:
        ValueError: no complete checkpoint of this format is there.
    """
    check(
        _NAME.fullmatch(path.name) is not None and (path / _META).is_file(),
        "read_meta", "path", "be a complete checkpoint, step-... with a meta.json", path,
    )  # fmt: skip
    meta: dict[str, Any] = json.loads((path / _META).read_text(encoding="utf-8"))
    check(meta.get("format") == FORMAT, "read_meta", "path", f"hold a checkpoint of format {FORMAT}", meta.get("format"))
    return meta


def load_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Read tensors of a checkpoint into existing ones, on whatever device they are.

    Every file is first compared with its SHA-256. Only tensors are unpickled, by PyTorch's weights-only loader.

    Args:
        path: folder of a checkpoint.
        tensors: destinations by name; the checkpoint may hold more.

    Raises:
        ValueError: the checkpoint is damaged, lacks a name, or has another shape or dtype under it.
    """
    for name, expected in read_meta(path)["files"].items():
        file = path / name
        check(
            file.is_file() and _sha256(file) == expected,
            "load_tensors", "path", "hold an undamaged checkpoint", f"{file} missing or changed",
            "Remove this folder to go on from the checkpoint before it.",
        )  # fmt: skip
    reader = _Reader(path)
    stored = reader.read_metadata().state_dict_metadata
    for name, tensor in tensors.items():
        entry = stored.get(name)
        found = (entry.size, entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
        check(
            found == (tensor.shape, tensor.dtype),
            "load_tensors", "path", f"hold {name} as {tuple(tensor.shape)} {tensor.dtype}", found,
        )  # fmt: skip
    with _single_process():
        load(dict(tensors), storage_reader=reader, no_dist=True)


@contextmanager
def _single_process() -> Iterator[None]:
    """PyTorch warns that it takes this for a single process even when told so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


_INDEX_RECORDS = {
    "pathlib": {"PosixPath", "WindowsPath"},
    "torch": {"Size"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
    "torch.serialization": {"_get_layout"},
}


class _IndexUnpickler(pickle.Unpickler):
    """Builds nothing but the plain records that DCP's index consists of."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse every global that is not one of the records or a dtype."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _INDEX_RECORDS.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"the index of a checkpoint must not name {module}.{name}")


class _Reader(FileSystemReader):
    """DCP's reader, but for its index, which it would unpickle without restriction."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index of the checkpoint."""
        content = (Path(self.path) / ".metadata").read_bytes()
        metadata = _IndexUnpickler(io.BytesIO(content)).load()
        assert isinstance(metadata, Metadata)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush_folder(folder: Path) -> None:
    """Make renames and new files in ``folder`` survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
