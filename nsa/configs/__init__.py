"""Configurations of the package, one YAML file each; commands accept their names."""

from __future__ import annotations

from pathlib import Path

from nsa.errors import fail, nearest

FOLDER = Path(__file__).parent
# Older names, which rows of `nsa bench` keep, so that they can be compared with older rows.
RENAMED = {
    "seed": "78m",
    "seed-dense": "78m-dense",
    "seed-gpt2": "117m",
    "seed-gpt2-dense": "117m-dense",
    "seed-fineweb": "117m-fineweb",
    "seed-fineweb-dense": "117m-fineweb-dense",
}


def names() -> list[str]:
    """Names of the configurations, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find(config: str | Path) -> Path:
    """File of a configuration.

    Args:
        config: a name of :func:`names`, or the path of a YAML file, which ends in ``.yaml`` or
            ``.yml`` or contains a folder.

    Returns:
        A path; only that of a name is known to exist.

    Raises:
        UserError: there is no configuration of that name.
    """
    path = Path(config)
    if path.suffix in (".yaml", ".yml") or path.parent != Path():
        return path
    name = str(config)
    if name not in names():
        near = nearest(name, names())
        hint = "`nsa configs` lists them; the path of a file ends in .yaml."
        hint = hint if near is None else f"The nearest is {near}; {hint}"
        fail("the configuration", "be one that comes with the package", repr(name), hint)
    return FOLDER / f"{name}.yaml"


def name_in_rows(config: str | Path) -> str:
    """Name of a configuration in benchmark rows: its name in the first release.

    Args:
        config: as for :func:`find`.
    """
    name = Path(config).stem
    return next((old for old, new in RENAMED.items() if new == name), name)


def summary(name: str) -> str:
    """First sentence of the comment at the top of a configuration."""
    lines = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    comment = " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))
    return comment.partition(". ")[0].removesuffix(".") + "."
