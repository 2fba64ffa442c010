"""The experiments: what is trained, and what is done with each run afterwards."""

from __future__ import annotations

from dataclasses import dataclass

BOOKS = "BOOKS"  # link to the prepared data in the folder where everything runs
ON_BOOKS = f"--data.source shards --data.path {BOOKS} --data.tokenizer byte"
NSA, DENSE, SMALL_DENSE = "nsa", "dense-equal-parameters", "dense-equal-width"
# Learning rates of benchmarks/quality/learning-rates.jsonl: NSA's best, and between dense's two.
RATES = {NSA: "5e-4", DENSE: "7e-4", SMALL_DENSE: "7e-4"}
EQUAL_MLP = 3344  # hidden size at which the dense model has NSA's parameters
CONFIGS = {
    NSA: "78m",
    DENSE: f"78m-dense --model.mlp-hidden-size {EQUAL_MLP}",
    SMALL_DENSE: "78m-dense",
}
SEEDS = (1337, 1338, 1339)
STEP_TOKENS = 65_536
WARMUP_STEPS, EVAL_EVERY = 150, 500
LONG = 8192
PROMPT = (
    "It was late in the evening when the carriage stopped before the old house, and nobody came "
    "to the door"
)


@dataclass(frozen=True)
class Command:
    """What is done with a run.

    Attributes:
        text: what follows ``nsa``; ``{run}`` is the run, ``{folder}`` the experiment's folder.
        output: file of that folder that gets what the command prints.
        files: what else it leaves that belongs there; lies elsewhere.
        alone: whether it measures times, so that nothing else runs beside it.
    """

    text: str
    output: str
    files: tuple[str, ...] = ()
    alone: bool = False


@dataclass(frozen=True)
class Experiment:
    """A training.

    Attributes:
        name: of its run and folder; up to the first ``-`` the group that its row names.
        model: what is trained, as the row names it.
        train: what follows ``nsa train``.
        afterwards: commands on the finished run, side by side but for those that must be alone.
        expected_s: how long all of it takes on an H100, seconds.
        in_legs: whether the training is stopped and resumed now and then.
    """

    name: str
    model: str
    train: str
    afterwards: tuple[Command, ...]
    expected_s: float
    in_legs: bool = False

    @property
    def group(self) -> str:
        """What it is compared with: experiments of the same group."""
        return self.name.partition("-")[0]


def measured(split: str) -> Command:
    """Bits per byte of a split, with the sums that ``nsa compare`` reads."""
    text = f"eval {{run}} --split {split} --json --save {{folder}}/{split}.npz"
    return Command(text, f"{split}.json")


def inspected(tokens: int) -> Command:
    """Gates and selected blocks of a text of so many tokens."""
    text = f"inspect {{run}} --tokens {tokens} --json --record {{folder}}/selected-{tokens}.npz"
    return Command(text, f"inspect-{tokens}.json")


def profiled(config: str, active: int) -> Command:
    """Chrome trace of some steps of a run of its own, and where their time goes."""
    files = ("trace.json.gz", "stages.txt", "stages.json", "kernels.txt")
    text = f"profile {config} --run-dir {{run}}-profile --active {active}"
    profile = tuple(f"{{run}}-profile/profile/{name}" for name in files)
    return Command(text, "profile.txt", profile, alone=True)


def whole_run(config: str, prompt: str, active: int) -> tuple[Command, ...]:
    """What is done with the run of 50,000 steps.

    Args:
        config: what follows ``nsa train``.
        prompt: what the model continues.
        active: steps of the profile.
    """
    longer = f"--seq-len {LONG} --micro-batch 1"
    generate = f"generate {{run}} --prompt '{prompt}' --max-new-tokens 512"
    return (
        Command("check {run}", "check.txt"),
        measured("test"),
        measured("validation"),
        Command(
            f"eval {{run}} --split test {longer} --json --save {{folder}}/test-{LONG}.npz",
            f"test-{LONG}.json",
        ),
        Command(generate, "generated.txt", alone=True),
        inspected(2048),
        inspected(LONG),
        profiled(config, active),
    )


def equal_tokens(
    name: str,
    model: str,
    *,
    tokens: int,
    expected_s: float,
    seed: int = SEEDS[0],
    seq_len: int = 2048,
    eval_windows: int = 512,
) -> Experiment:
    """A training on so many tokens, the same in the same order for each model of a seed."""
    batch, steps = STEP_TOKENS // seq_len, -(-tokens // STEP_TOKENS)
    train = (
        f"{CONFIGS[model]} {ON_BOOKS} --seq-len {seq_len} --micro-batch {batch} --accumulation 1 "
        f"--global-batch {batch} --steps {steps} --optim.lr {RATES[model]} "
        f"--optim.warmup-steps {WARMUP_STEPS} --seed {seed} --eval-every {EVAL_EVERY} "
        f"--eval-windows {eval_windows} --checkpoint-every 0 --sample-tokens 0"
    )
    splits = ("test",) if seq_len == LONG else ("test", "validation")
    afterwards = [measured(split) for split in splits]
    afterwards += [inspected(seq_len)] if model == NSA else []
    return Experiment(name, model, train, tuple(afterwards), expected_s)


_AS_SHIPPED = f"78m {ON_BOOKS} --micro-batch 4 --accumulation 1"  # its batch in one micro-batch
_TOKENS, _LONG_TOKENS = 200_000_000, 100_000_000
EXPERIMENTS = (
    Experiment(
        "50k", NSA, _AS_SHIPPED, whole_run(_AS_SHIPPED, PROMPT, 50), expected_s=1310, in_legs=True
    ),
    *(
        equal_tokens(f"200m-{word}-{seed}", model, tokens=_TOKENS, expected_s=seconds, seed=seed)
        for seed in SEEDS
        for word, model, seconds in (("nsa", NSA, 480), ("dense", DENSE, 425))
    ),
    equal_tokens(f"200m-small-dense-{SEEDS[0]}", SMALL_DENSE, tokens=_TOKENS, expected_s=425),
    *(
        equal_tokens(
            f"8k-{word}",
            model,
            tokens=_LONG_TOKENS,
            expected_s=390,
            seq_len=LONG,
            eval_windows=128,
        )
        for word, model in (("nsa", NSA), ("dense", DENSE))
    ),
)
