"""Files of a run. No run writes over another."""

from __future__ import annotations

import difflib
import json
import logging
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nsa.errors import UserError, check, fail
from nsa.files import replace_text
from nsa.train.config import TrainConfig
from nsa.train.environment import collect
from nsa.train.load import load_config, to_yaml, yaml_text

logger = logging.getLogger(__name__)


class RunFolder:
    """The files of one run. Make it with :meth:`create` or :meth:`open`.

    Attributes:
        path: the folder.
        config: ``config.yaml``, the resolved configuration; never rewritten.
        environment: ``environment.json``, one entry under ``launches`` for the start and for each
            resumption.
        metrics_jsonl: ``metrics.jsonl``, one row a line, appended during the run.
        metrics_csv: ``metrics.csv``, the same rows with a header.
        tensorboard: ``tensorboard/``, event files.
        checkpoints: ``checkpoints/``.
        tokenizer: ``tokenizer.json``, the tokenizer that the run trained or read.
        loss_png: ``loss.png``.
        sample: ``sample.txt``, text generated at the end.
        log: ``log.txt``, the messages of the run.
        events: ``events.jsonl``: starts, checkpoints, warnings, ends.
        stacks: ``stacks/``, stack dumps of each process, by rank.
        tracking: ``tracking.json``, the last step that ``nsa track`` has sent to each tracker.
        halt: ``halt``, a file that ends the run with a checkpoint when it appears.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.environment = path / "environment.json"
        self.metrics_jsonl = path / "metrics.jsonl"
        self.metrics_csv = path / "metrics.csv"
        self.tensorboard = path / "tensorboard"
        self.checkpoints = path / "checkpoints"
        self.tokenizer = path / "tokenizer.json"
        self.loss_png = path / "loss.png"
        self.sample = path / "sample.txt"
        self.log = path / "log.txt"
        self.events = path / "events.jsonl"
        self.stacks = path / "stacks"
        self.tracking = path / "tracking.json"
        self.halt = path / "halt"

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @classmethod
    def create(
        cls,
        path: str | Path,
        config: TrainConfig,
        *,
        init_from: Path | None = None,
    ) -> RunFolder:
        """Make a new run folder with ``config.yaml``, ``environment.json`` and ``checkpoints/``.

        Args:
            path: folder that does not exist yet; its parents are made.
            config: resolved configuration.
            init_from: checkpoint whose weights the run begins with, for environment.json.

        Returns:
            The folder.

        Raises:
            UserError: ``path`` is empty or exists already, or a parent is a file.
        """
        check(str(path) != "", "--run-dir", "name a folder", "''")
        is_text = not re.search("[\ud800-\udfff]", str(path))  # TensorBoard opens no other name
        check(is_text, "--run-dir", "be valid UTF-8", path)
        folder = cls(Path(path))
        try:
            folder.path.mkdir(parents=True)
        except NotADirectoryError:
            fail("--run-dir", "lie in a folder", path)
        except FileExistsError:
            rule = "not exist yet, because no run writes over another"
            hint = "Give another --run-dir"
            if folder.config.is_file():
                quoted = shlex.quote(str(path))
                hint += f", or continue that run with: nsa train --resume {quoted}"
            fail("--run-dir", rule, path, hint)
        try:
            folder.checkpoints.mkdir()
            source = None if init_from is None else str(init_from.resolve())
            folder.record_launch(init_from=source)
            # The configuration last: a folder that has it is complete.
            replace_text(folder.config, to_yaml(config))
        except OSError:  # a full disk, for example
            shutil.rmtree(folder.path, ignore_errors=True)
            raise
        return folder

    @classmethod
    def open(cls, path: str | Path, argument: str = "RUN") -> RunFolder:
        """Open the run folder at ``path``.

        A missing configuration or tokenizer is restored from the newest checkpoint.

        Args:
            path: the folder.
            argument: name of the argument that gave the path, for messages.

        Raises:
            UserError: there is no run; the message has the nearest name.
        """
        folder = cls(Path(path))
        if not (folder.config.is_file() and folder.tokenizer.is_file()):
            folder._restore_from_checkpoint()
        if not folder.config.is_file():
            configs = folder.path.parent.glob("*/config.yaml")
            siblings = sorted(config.parent.name for config in configs)
            near = difflib.get_close_matches(folder.path.name, siblings, n=1, cutoff=0.0)
            hint = "Start one with: nsa train CONFIG"
            if near:
                hint = f"The nearest run is {folder.path.parent / near[0]}."
            if (folder.path / "config.json").is_file():
                hint = "It is a folder of transformers: load it there, or train with --init-from."
            rule = "be a folder that a run made (with config.yaml in it)"
            fail(argument, rule, path, hint)
        return folder

    def _restore_from_checkpoint(self) -> None:
        if not any(self.checkpoints.glob("step-*")):
            return  # without loading PyTorch
        from nsa.train.checkpoint import list_checkpoints, read_meta

        for path in reversed(list_checkpoints(self.checkpoints)):
            with suppress(UserError):  # damaged
                meta = read_meta(path)
                # The configuration last: a folder that has it is complete.
                texts = {self.tokenizer: meta["tokenizer"], self.config: yaml_text(meta["config"])}
                for file, text in texts.items():
                    if text is not None and not file.is_file():
                        replace_text(file, text)
                        logger.warning("%s was missing and has been restored", file)
                return

    def holds_no_run(self) -> bool:
        """Whether the run has written neither a row nor a checkpoint."""
        has_rows = self.metrics_jsonl.exists() and self.metrics_jsonl.stat().st_size > 0
        return not has_rows and not any(self.checkpoints.glob("*"))

    def load_config(self, overrides: Mapping[str, str] | None = None) -> TrainConfig:
        """Configuration of the run, with the newest ``steps`` and then ``overrides`` applied."""
        extensions = self._extensions()
        steps = {"steps": extensions[-1]} if extensions else {}
        return load_config(self.config, {**steps, **(overrides or {})})

    def former_ends(self) -> set[int]:
        """Values that ``steps`` had at the start of the run and at each resumption."""
        return {load_config(self.config).steps, *map(int, self._extensions())}

    def _extensions(self) -> list[str]:
        """Values of ``--steps`` that resumptions gave, oldest first."""
        given = [launch["overrides"] for launch in self.launches()]
        return [overrides["steps"] for overrides in given if "steps" in overrides]

    def launches(self) -> list[dict[str, Any]]:
        """Read the start and the resumptions of the run from ``environment.json``, oldest first.

        Raises:
            UserError: the file has other content.
        """
        if not self.environment.exists():
            return []
        try:
            launches: list[dict[str, Any]] = json.loads(self.environment.read_bytes())["launches"]
            fits = all(launch.keys() >= {"resumed_from_step", "overrides"} for launch in launches)
        except (ValueError, KeyError, TypeError, AttributeError):
            launches, fits = [], False
        name, rule = self.environment.name, "contain the launches of the run in JSON"
        hint = "Move the file away to continue without its record."
        check(fits, name, rule, self.environment, hint)
        return launches

    def record_launch(
        self,
        *,
        resumed_from_step: int | None = None,
        overrides: Mapping[str, str] | None = None,
        **more: str | None,
    ) -> None:
        """Add this process to ``environment.json``.

        Args:
            resumed_from_step: optimizer steps done when this launch began; None for the first.
            overrides: settings in which this launch differs from ``config.yaml``.
            more: other facts about the launch, as JSON types.
        """
        launch = {"resumed_from_step": resumed_from_step, "overrides": dict(overrides or {})}
        launches = {"launches": [*self.launches(), {**launch, **more, **collect()}]}
        replace_text(self.environment, json.dumps(launches, indent=2) + "\n")

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Context manager: lock the run against a second process.

        Raises:
            UserError: another process is working on the run.
        """
        import fcntl  # not on Windows, where nothing trains

        with self.config.open("r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                hint = "Stop that process first, or touch the file halt in the run folder."
                rule = "be a run that no other process is working on"
                fail("RUN", rule, self.path, hint)
            except OSError as error:
                text = "%s cannot be locked (%s): nothing keeps a second process from this run"
                logger.warning(text, self.path, error.strerror)
            yield

    def is_in_use(self) -> bool:
        """Whether a process is working on the run; true if the file system has no locks."""
        import fcntl

        with self.config.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return True
        return False


def next_run_path(config_path: str | Path, root: str | Path = "runs") -> Path:
    """Return ``<root>/<config>-<n>`` with the next free number.

    Args:
        config_path: configuration file; its name without the suffix names the run.
        root: folder of the runs.

    Returns:
        A path that does not exist.
    """
    stem = Path(config_path).stem
    check(bool(stem), "CONFIG", "have a file name", config_path)
    ends = (path.name.removeprefix(f"{stem}-") for path in Path(root).glob(f"{stem}-*"))
    last = max((int(end) for end in ends if end.isdecimal()), default=0)
    return Path(root) / f"{stem}-{last + 1}"
