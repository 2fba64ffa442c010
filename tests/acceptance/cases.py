"""Cases of the acceptance run: the table, and the checks of each kind of case."""

from __future__ import annotations

import gc
import json
import math
import random
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from nsa.errors import option
from nsa.lm.decoder import Decoder
from nsa.train.checkpoint import list_checkpoints
from nsa.train.config import TrainConfig
from nsa.train.load import load_config
from nsa.train.run_folder import RunFolder
from nsa.train.runs.evaluation import load_model
from tests.acceptance import foreign_model, programs
from tests.acceptance.checks import (
    LOSS_WITHIN,
    PEAK_WITHIN,
    apart,
    differences,
    figures_of,
    training_faults,
)
from tests.acceptance.programs import NSA, last_lines, say, start, wait
from tests.acceptance.rows import COMMITTED, MEASURED, QUICK, Row, committed_loss, read_rows
from tests.acceptance.shards import make_shards
from tests.hf.trl_runs import train_by_trl

# Models that need two GPUs run fewer steps, so that a leg takes at most nine minutes.
QUICK_STEPS, FULL_STEPS, STEPS_ON_TWO = 60, 300, 100
QUICK_LOG_EVERY = 5
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")  # of compiled code
COMPILATION = '"kind": "compilation"'  # event: a step compiled after the first ones
# The exported and the trained model compute in fp32 with the same operators.
MAX_LOGIT_DIFFERENCE = 1e-4
PROMPT_TOKENS, NEW_TOKENS = 300, 64
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
TEXT = Path(programs.__file__).read_text(encoding="utf-8")
ADAPTER_STEPS = 20
RESUMED_STEPS, CHECKPOINTS = 120, 6
EVERY = RESUMED_STEPS // CHECKPOINTS
WITHIN_NATS = 2e-4  # two processes sum in a different order
# One row of metrics per step, and evaluations between the checkpoints.
RESUMED = (
    f"--steps {RESUMED_STEPS} --log-every 1 --sample-tokens 0 --checkpoint-every {EVERY} "
    f"--keep-checkpoints {CHECKPOINTS} --eval-every {EVERY + EVERY // 2} --eval-windows 4"
).split()


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        name: field ``config`` of its row. ``78m: eval`` uses the run of the case ``78m``.
        check: function that runs the case and returns its faults.
        expected_s: duration on an H200, seconds.
        leg: its leg of the full run.
        config: name or file of a configuration.
        quick: whether the quick run includes it.
        num_gpus: number of GPUs that it needs.
    """

    name: str
    check: Callable[[Setting], list[str]]
    expected_s: float
    leg: int
    config: str = ""
    quick: bool = False
    num_gpus: int = 1

    def __str__(self) -> str:
        return self.name


@dataclass
class Setting:
    """A running case and its results.

    Attributes:
        case: the case.
        out: folder of all cases.
        leg: number of the leg, or ``quick``.
        gpu: name of the GPU; ``cpu`` without one.
        num_gpus: number of GPUs of this machine.
        commit: commit of the code.
        shards: folder of prepared data; None prepares it here.
        figures: measured fields of the row.
        remarks: notes for the row.
    """

    case: Case
    out: Path
    leg: str
    gpu: str
    num_gpus: int
    commit: str
    shards: Path | None = None
    figures: Row = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        kind = self.out / (QUICK if self.leg == QUICK else "full")
        self.folder = kind / re.sub(r"\W+", "-", self.case.name)
        self.trained = kind / re.sub(r"\W+", "-", self.case.name.partition(":")[0]) / "run"
        self.log = self.folder / "log.txt"
        # A case may take three times as long as on an H200.
        self.limit_s = max(3 * self.case.expected_s, 90.0)

    def start(
        self, words: Sequence[str], log: Path | None = None
    ) -> AbstractContextManager[subprocess.Popen[bytes]]:
        """Start a program, see :func:`tests.acceptance.programs.start`.

        Args:
            words: command line.
            log: file for its output.
        """
        env = {name: str(self.out / "caches" / name) for name in CACHES}
        return start(words, log or self.log, env)

    def run(self, words: Sequence[str], log: Path | None = None) -> list[str]:
        """Run a program until it ends, and return its faults."""
        with self.start(words, log) as process:
            return wait(process, log or self.log, self.limit_s)

    def faults(self, committed: Path = COMMITTED) -> list[str]:
        """Run the case in an empty folder, and compare its last loss with the committed one."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        say(f"\n{self.case}, about {self.case.expected_s:.0f} s")
        faults, row = self.case.check(self), self.row()
        loss = committed_loss(row, committed)
        return [*faults, *apart("loss_last", row["loss_last"], loss, LOSS_WITHIN)]

    def row(self, failed: str = "", seconds: float = 0.0) -> Row:
        """Row of the case.

        Args:
            failed: reason of a failure; empty if the case passed.
            seconds: duration.
        """
        figures = {name: x for name, x in self.figures.items() if x is None or math.isfinite(x)}
        return {
            "config": self.case.name,
            **{
                name: None if (x := figures.get(name)) is None else round(x, 5) for name in MEASURED
            },
            "passed": not failed,
            "gpu": self.gpu,
            "commit": self.commit,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "note": "; ".join([*self.remarks, *([f"failed: {failed}"] if failed else [])]),
            "seconds": round(seconds, 1),
            "leg": self.leg,
        }


# ----------------------------------------------------------------------------------------- training


def changes(config: TrainConfig, **wanted: int) -> list[str]:
    """Command line options for the settings that differ from a configuration."""
    differing = {name: value for name, value in wanted.items() if getattr(config, name) != value}
    return [word for name, value in differing.items() for word in (option(name), str(value))]


def train_words(processes: int) -> list[str]:
    """Command line of ``nsa train``, with torchrun for several processes."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [sys.executable, *(torchrun if processes > 1 else []), *NSA[1:], "train"]


def spread(config: TrainConfig, num_gpus: int) -> tuple[int, int]:
    """Number of processes and accumulation steps of a configuration on all usable GPUs."""
    processes, accumulation = config.world_size, config.accumulation
    while processes > 1 and accumulation % 2 == 0 and 2 * processes <= num_gpus:
        processes, accumulation = 2 * processes, accumulation // 2
    return processes, accumulation


def train(setting: Setting) -> list[str]:
    """Train a committed configuration for a number of steps."""
    config = load_config(setting.case.config)
    processes, accumulation = spread(config, setting.num_gpus)
    steps, log_every = STEPS_ON_TWO if processes == 2 else FULL_STEPS, config.log_every
    if setting.leg == QUICK:
        steps, log_every = QUICK_STEPS, min(log_every or QUICK_LOG_EVERY, QUICK_LOG_EVERY)
    added = changes(config, steps=steps, log_every=log_every)
    added += changes(config, world_size=processes, accumulation=accumulation)
    words = [*train_words(processes), setting.case.config, "--run-dir", str(setting.trained)]
    words += added
    if config.data.source == "shards":
        words += ["--data.path", str(setting.shards or make_shards(setting.out))]
        added += ["--data.path", "SHARDS"]
    setting.remarks.append(f"added: {' '.join(added)}" if added else "as it ships")
    return judge(setting, words, config, steps)


def make_train(setting: Setting) -> list[str]:
    """Run ``make train`` to its end with empty compile caches."""
    arguments, cold = shlex.join(["--run-dir", str(setting.trained)]), setting.folder / "cold"
    words = ["env", *(f"{name}={cold / name}" for name in CACHES), "make", "train"]
    words += [f"PYTHON={sys.executable}", f"ARGS={arguments}", "CONFIG="]
    config = load_config(setting.case.config)
    setting.remarks.append("as it ships")
    faults = judge(setting, words, config, config.steps)
    shutil.rmtree(cold, ignore_errors=True)
    return faults


def judge(setting: Setting, words: Sequence[str], config: TrainConfig, steps: int) -> list[str]:
    """Run a training command, and store its measurements and the planned peak memory.

    Args:
        setting: the case.
        words: command line.
        config: its configuration.
        steps: number of optimizer steps that it must complete.
    """
    on_gpu = setting.num_gpus > 0 and config.device != "cpu"
    planned = plan_mib(setting, config) if on_gpu else None
    faults = setting.run(words)
    rows, events = read_rows(setting.trained / "metrics.jsonl"), setting.trained / "events.jsonl"
    warnings = events.read_text(encoding="utf-8").count(COMPILATION) if events.exists() else 0
    setting.figures |= figures_of(rows, warnings) | {"plan_mib": planned}
    first_steps = [row["first_step_s"] for row in rows if "first_step_s" in row]
    setting.remarks += [f"first step after {seconds:.1f} s" for seconds in first_steps]
    faults += training_faults(rows, setting.figures, steps=steps, on_gpu=on_gpu)
    faults += ["nsa plan gave no peak"] if on_gpu and planned is None else []
    peak = setting.figures.get("peak_mib")
    return faults + apart("the peak", peak, planned, PEAK_WITHIN)


def plan_mib(setting: Setting, config: TrainConfig) -> float | None:
    """Peak memory that ``nsa plan`` predicts, MiB; None if it predicts none."""
    processes, accumulation = spread(config, setting.num_gpus)
    words = changes(config, world_size=processes, accumulation=accumulation)
    log = setting.folder / "plan.txt"
    setting.run([*NSA, "plan", setting.case.config, "--json", *words], log)
    found = [json.loads(line) for line in last_lines(log, 20) if line.startswith("{")]
    return found[-1]["memory_bytes"]["peak"] / 2**20 if found else None


# --------------------------------------------------------------------------------------- a command


def command(text: str, *files: str, says: str = "") -> Callable[[Setting], list[str]]:
    """Return a check that runs a command.

    Args:
        text: arguments of ``nsa``; ``{run}`` is the run folder, ``{folder}`` that of the case.
        files: files that it must write.
        says: pattern of a line that it must print; the match becomes a note.
    """

    def check(setting: Setting) -> list[str]:
        names = {"run": setting.trained, "folder": setting.folder}
        words = [word.format(**names) for word in shlex.split(text)]
        faults = setting.run([*NSA, *words])
        found = re.search(says, setting.log.read_text(encoding="utf-8", errors="replace"))
        paths = [Path(file.format(**names)) for file in files]
        faults += [] if found else [f"it did not print {says!r}"]
        faults += [f"it did not write {path}" for path in paths if not path.is_file()]
        results = [*(path.name for path in paths), found[0].strip() if found else ""]
        setting.remarks += [f"nsa {words[0]}", *filter(None, results)]
        return faults

    return check


# -------------------------------------------------------------------------------------- resumption


def kill_steps(rng: random.Random) -> tuple[int, int]:
    """Choose two steps to kill at, each after two checkpoints of which the first is complete."""
    return rng.randint(2 * EVERY + 1, 3 * EVERY), rng.randint(4 * EVERY + 1, 5 * EVERY)


def killed_and_resumed(setting: Setting) -> list[str]:
    """Kill a run with SIGKILL at two random steps; it must equal an uninterrupted run bit for bit.

    Both runs train at the same time.
    """
    whole, killed, log = (setting.folder / name for name in ("whole", "killed", "whole.txt"))
    kills, config = kill_steps(random.Random()), setting.case.config
    words = [*train_words(1), config, "--run-dir", str(killed), *RESUMED]
    with setting.start([*train_words(1), config, "--run-dir", str(whole), *RESUMED], log) as other:
        for step in kills:
            with setting.start(words) as process:
                if faults := wait_for_step(process, killed, step, setting.limit_s):
                    return faults
                process.kill()  # not its children, which exit by themselves
                process.wait()
            say(f"    killed at step {step}")
            words = [*train_words(1), "--resume", str(killed)]
        faults = [f"the resumed run: {fault}" for fault in setting.run(words)]
        faults += [f"the uninterrupted run: {fault}" for fault in wait(other, log, setting.limit_s)]
    note = f"{RESUMED_STEPS} steps, killed at steps {kills[0]} and {kills[1]}"
    return faults or compare_losses(setting, note, whole, killed, 0.0)


def wait_for_step(
    process: subprocess.Popen[bytes], run: Path, step: int, limit_s: float
) -> list[str]:
    """Wait until a run has reached a step and has a checkpoint; return faults otherwise."""
    end = time.monotonic() + limit_s
    while process.poll() is None and time.monotonic() < end:
        rows = read_rows(run / "metrics.jsonl")
        if rows and rows[-1]["step"] >= step and list_checkpoints(run / "checkpoints"):
            return []
        time.sleep(0.02)
    return [f"did not reach step {step}: exit code {process.poll()}"]


def resumed_on_two(setting: Setting) -> list[str]:
    """Resume a run on two GPUs from the middle of a run on one: losses equal within rounding."""
    whole, two, log = (setting.folder / name for name in ("whole", "two", "whole.txt"))
    words = [*train_words(1), setting.case.config, "--run-dir", str(whole), *RESUMED]
    if faults := setting.run(words, log):
        return [f"on one GPU: {fault}" for fault in faults]
    shutil.copytree(whole, two)
    for path in list_checkpoints(two / "checkpoints")[CHECKPOINTS // 2 :]:
        shutil.rmtree(path)
    config = load_config(setting.case.config)
    halved = changes(config, world_size=2, accumulation=config.accumulation // 2)
    faults = setting.run([*train_words(2), "--resume", str(two), *halved])
    note = f"{RESUMED_STEPS} steps"
    return [f"on two GPUs: {fault}" for fault in faults] or compare_losses(
        setting, note, whole, two, WITHIN_NATS
    )


def compare_losses(
    setting: Setting, note: str, whole: Path, other: Path, within: float
) -> list[str]:
    """Return the faults of a resumed run; if there are none, remove the large checkpoints."""
    rows = read_rows(whole / "metrics.jsonl")
    faults = differences(rows, read_rows(other / "metrics.jsonl"), within=within)
    for run in (whole, other) if not faults else ():
        shutil.rmtree(run / "checkpoints")
    losses = [row["loss_nats"] for row in rows]
    setting.figures |= {"loss_first": losses[0], "loss_last": losses[-1]}
    setting.remarks.append(note)
    return faults


# ---------------------------------------------------------------------- export and a foreign model


@torch.no_grad()
def loaded(setting: Setting) -> list[str]:
    """Load the export of a run in transformers and compare it with the run."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import nsa.hf  # noqa: F401 - registers the classes

    exported, folder = setting.trained.parent / "exported", RunFolder.open(setting.trained)
    newest = list_checkpoints(folder.checkpoints)[-1]
    ours, step = load_model(folder.load_config().model, newest, torch.device("cuda"))
    theirs = AutoModelForCausalLM.from_pretrained(exported).cuda()
    tokenizer = AutoTokenizer.from_pretrained(exported)
    ids = tokenizer(TEXT, return_tensors="pt").to("cuda")["input_ids"]
    difference = float((ours(ids[0]) - theirs(input_ids=ids).logits[0]).abs().max())
    prompt = ids[:, :PROMPT_TOKENS]
    drawn = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), **GREEDY)
    decoder = Decoder(ours, max_tokens=prompt.shape[1] + NEW_TOKENS)
    logits, expected = decoder.prefill(prompt.tolist()), prompt[0].tolist()
    for _ in range(NEW_TOKENS):
        expected.append(int(logits.argmax()))
        logits = decoder.step(torch.tensor([expected[-1:]], device="cuda"))
    note = f"step {step}, {ids.shape[1]} tokens, logits differ by {difference:.1e}"
    setting.remarks.append(note)
    faults = {
        f"logits differ by {difference:.2e}": not difference <= MAX_LOGIT_DIFFERENCE,
        "generate() writes another text": drawn[0].tolist() != expected,
    }
    del ours, theirs, decoder
    gc.collect()
    torch.cuda.empty_cache()
    return [fault for fault, is_found in faults.items() if is_found]


def adapted(setting: Setting) -> list[str]:
    """Train LoRA adapters on the export of a run; generate with them on, off and merged.

    The adapters must learn the text and leave the weights as they are; in each state, greedy
    generation with the cache must equal that without it.
    """
    import peft
    from transformers import AutoModelForCausalLM

    import nsa.hf  # noqa: F401 - registers the classes

    base = AutoModelForCausalLM.from_pretrained(setting.trained.parent / "exported").cuda()
    weights = {name: x.clone() for name, x in base.state_dict().items()}
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear")
    model = peft.get_peft_model(base, config)
    ids = torch.tensor([list(TEXT.encode())], device="cuda")
    trained = [x for x in model.parameters() if x.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=2e-3), list[float]()
    for _ in range(ADAPTER_STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    faults, drawn = list[str](), dict[str, list[int]]()

    def generate(state: str) -> None:
        prompt = ids[:, :PROMPT_TOKENS]
        given = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), **GREEDY}
        found = [model.generate(**given, use_cache=x) for x in (True, False)]
        drawn[state] = found[0][0].tolist()
        if not torch.equal(*found):
            faults.append(f"adapters {state}: the text differs from that without a cache")

    model.eval()
    generate("on")
    with model.disable_adapter():
        generate("off")
    model.merge_adapter()
    generate("merged")
    model.unmerge_adapter()
    state = model.get_base_model().state_dict()
    kept = {name.replace(".base_layer", ""): x for name, x in state.items()}
    moved = [n for n, x in weights.items() if not torch.allclose(kept[n], x, atol=1e-6)]
    faults += [f"the weights {moved[:3]} have changed"] if moved else []
    faults += [] if drawn["on"] == drawn["merged"] else ["merged adapters write another text"]
    faults += [] if drawn["on"] != drawn["off"] else ["the adapters change nothing"]
    fell = losses[0] - losses[-1]
    faults += [] if fell > 0.1 else [f"the loss fell by {fell:.3f} nats"]
    note = f"{ADAPTER_STEPS} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}"
    setting.remarks.append(note)
    return faults


def trained_by_trl(setting: Setting) -> list[str]:
    """Fine-tune the export of a run by TRL: SFT with packing, DPO and GRPO, whole and by LoRA."""
    exported, faults = setting.trained.parent / "exported", list[str]()
    for kind in ("SFT packed", "DPO", "GRPO"):
        for has_adapters in (False, True):
            options = {"has_adapters": has_adapters, "use_cpu": False}
            found = train_by_trl(kind, exported, setting.folder / "trl", **options)
            what = f"{kind}{' with LoRA' * has_adapters}"
            setting.remarks.append(what)
            faults += [f"{what}: {fault}" for fault in found]
    return faults


def foreign(setting: Setting) -> list[str]:
    """Train the module in another decoder, eager and compiled."""
    figures, remarks, faults = foreign_model.measure()
    setting.figures |= figures
    setting.remarks += remarks
    return faults


# --------------------------------------------------------------------------------------- the table

_GENERATE = "generate {run} --prompt 'def ' --max-new-tokens 64"
_WEIGHTS = "{run}/../exported/model.safetensors"
_PROFILE = [f"{{folder}}/run/profile/{x}" for x in ("stages.json", "kernels.txt", "trace.json.gz")]


def _on_78m(name: str, check: Callable[[Setting], list[str]], expected_s: float) -> Case:
    return Case(f"78m: {name}", check, expected_s, 1, "78m", quick=True)


def _train(config: str, expected_s: float, leg: int, **options: Any) -> Case:
    return Case(config, train, expected_s, leg, config, **options)


CASES = (
    Case("make train", make_train, 50, 1, "gpu-small", quick=True),
    _train("78m", 50, 1, quick=True),
    _train("78m-dense", 50, 1),
    _train("117m", 50, 1, quick=True),
    _train("117m-dense", 50, 1),
    _on_78m("eval", command("eval {run}", says=r"loss: .+"), 20),
    _on_78m("generate", command(_GENERATE, says=r"\ndef \s*\S.*"), 20),
    _on_78m("report", command("report {run}", "{run}/report.html"), 8),
    _on_78m("check", command("check {run}", says="everything agrees"), 8),
    _on_78m("export", command("export {run} {run}/../exported", _WEIGHTS), 15),
    _on_78m("loaded", loaded, 30),
    _on_78m("LoRA", adapted, 40),
    _on_78m("TRL", trained_by_trl, 60),
    Case("78m: profile", command("profile 78m --run-dir {folder}/run", *_PROFILE), 60, 1, "78m"),
    _train("gpu-small", 45, 2),
    _train("gpu-small-dense", 40, 2),
    _train("78m-shared", 50, 2, quick=True),
    _train("78m-shared-dense", 50, 2),
    _train("117m-fineweb", 90, 2),
    _train("117m-fineweb-dense", 60, 2),
    Case("78m: killed and resumed", killed_and_resumed, 70, 2, "78m", quick=True),
    Case("foreign model", foreign, 110, 2, quick=True),
    _train("1b", 300, 3, num_gpus=2),
    _train("78m-8k", 50, 3),
    _train("78m-8k-dense", 50, 3),
    _train("1b-dense", 280, 4, num_gpus=2),
    _train("78m-64k", 80, 4),
    _train("78m-64k-dense", 70, 4),
    _train("7m-64k", 50, 5),
    _train("7m-64k-dense", 45, 5),
    Case("78m: resumed on two GPUs", resumed_on_two, 110, 5, "78m", num_gpus=2),
    _train("cpu-small", 60, 5, num_gpus=0),
    _train("cpu-small-dense", 35, 5, num_gpus=0),
)
