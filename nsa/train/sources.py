"""Formats of data sets by the names of their files, and names that the hub can have."""

from __future__ import annotations

import re
from pathlib import Path, PurePath

FORMATS = {
    ".parquet": "parquet",
    ".jsonl": "json",
    ".json": "json",
    ".ndjson": "json",
    ".txt": "text",
    ".md": "text",
}
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
# Of a data set on the hub: a name, or an owner and a name.
_HUB_NAME = re.compile(r"\w[\w.-]*(?:/\w[\w.-]*)?")


def format_of(name: str) -> str | None:
    """Format of a file, maybe compressed, by its name: ``parquet``, ``json``, ``text`` or None."""
    suffixes = [suffix.lower() for suffix in PurePath(name).suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return FORMATS.get(suffixes[-1]) if suffixes else None


def is_mistyped_path(source: str) -> bool:
    """Whether ``source`` does not exist here and is a path by its look, not a name on the hub.

    Args:
        source: a file, a folder, or the name of a data set on the hub.
    """
    suffixes = Path(source).suffixes
    is_file_name = any(suffix in (*FORMATS, *COMPRESSED) for suffix in suffixes[-1:])
    return not Path(source).exists() and (is_file_name or _HUB_NAME.fullmatch(source) is None)
