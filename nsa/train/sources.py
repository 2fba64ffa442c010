"""Whether a name can be that of a data set at all, without asking the hub."""

from __future__ import annotations

import re
from pathlib import Path

FORMATS = {
    ".parquet": "parquet",
    ".jsonl": "json",
    ".json": "json",
    ".ndjson": "json",
    ".txt": "text",
}
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
# Of a data set on the hub: a name, or an owner and a name.
_HUB_NAME = re.compile(r"\w[\w.-]*(?:/\w[\w.-]*)?")


def is_mistyped_path(source: str) -> bool:
    """Whether ``source`` does not exist here and is a path by its look, not a name on the hub.

    Args:
        source: a file, a folder, or the name of a data set on the hub.
    """
    suffixes = Path(source).suffixes
    is_file_name = any(suffix in (*FORMATS, *COMPRESSED) for suffix in suffixes[-1:])
    return not Path(source).exists() and (is_file_name or _HUB_NAME.fullmatch(source) is None)
