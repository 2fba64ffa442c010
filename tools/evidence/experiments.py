"""The experiments: what is trained, and what is done with each run afterwards."""

from __future__ import annotations

from dataclasses import dataclass

BOOKS = "BOOKS"  # link to the prepared data in the folder where everything runs
ON_BOOKS = f"--data.source shards --data.path {BOOKS} --data.tokenizer byte"
NSA, SHARED = "nsa", "nsa-shared"
DENSE, SMALL_DENSE = "dense-equal-parameters", "dense-equal-width"
SPARSE = (SHARED, NSA)  # of those in a group the first is compared with all others
ADAMW, MUON = "adamw", "muon"
# Of AdamW for steps of 65,536 tokens: NSA's best in benchmarks/quality/learning-rates.jsonl, and
# one between dense's two best. For steps of 8,192 the best of NSA (of three) and of dense in
# benchmarks/quality/rates.
LARGE_STEP_RATES = {NSA: "5e-4", DENSE: "7e-4"}
RATES = dict.fromkeys((SHARED, NSA, DENSE), "4e-4")
TRIED_RATES = {
    SHARED: ("2e-4", "4e-4", "8e-4", "1.6e-3"),
    NSA: ("1e-4", "2e-4", "4e-4", "8e-4"),
    DENSE: ("1e-4", "2e-4", "4e-4", "8e-4"),
}
# Of Muon: the best of nsa-shared and of dense in benchmarks/quality/muon_rates. What is no matrix
# of a layer learns by AdamW.
MUON_RATES = dict.fromkeys((SHARED, NSA, DENSE, SMALL_DENSE), "0.01")
TRIED_MUON_RATES = {
    SHARED: ("0.0025", "0.005", "0.01", "0.02"),
    DENSE: ("0.005", "0.01", "0.02", "0.04"),
}
BESIDE_MUON = "--optim.lr 4e-4 --optim.weight-decay 0.1"
EQUAL_MLP = 3344  # hidden size at which the dense model has the parameters of both sparse ones
CONFIGS = {
    SHARED: "78m-shared",
    NSA: "78m",
    DENSE: f"78m-dense --model.mlp-hidden-size {EQUAL_MLP}",
    SMALL_DENSE: "78m-dense",
}
SEEDS = (1337, 1338, 1339)
LONG = 8192
REPEATED, REPEATED_FILE = 128, "repeats.json"  # tokens of a passage
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


def repeated() -> Command:
    """Loss of repeated passages by the distance back to them."""
    text = f"eval {{run}} --split test --windows 512 --repeat {REPEATED} --json"
    return Command(text, REPEATED_FILE)


@dataclass(frozen=True)
class Tokens:
    """How many tokens models are trained on, and in which steps.

    Attributes:
        total: tokens, rounded up to whole steps.
        step: tokens of an optimizer step, one micro-batch.
        warmup_steps: see ``optim.warmup_steps``.
        eval_every: see the trainer's.
        seq_len: tokens of a window.
        eval_windows: windows of an evaluation.
        log_every: steps of a row of metrics.
    """

    total: int
    step: int
    warmup_steps: int
    eval_every: int
    seq_len: int = 2048
    eval_windows: int = 512
    log_every: int = 20

    def settings(self, model: str, lr: str, seed: int, optimizer: str = ADAMW) -> str:
        """What follows ``nsa train``: for each seed the same data in the same order.

        Args:
            model: see ``CONFIGS``.
            lr: learning rate of the optimizer; what goes with Muon's is ``BESIDE_MUON``.
            seed: of weights and data.
            optimizer: see ``optim.name``.
        """
        batch, steps = self.step // self.seq_len, -(-self.total // self.step)
        rates = f"--optim.name adamw --optim.lr {lr} --optim.weight-decay 0.01"
        if optimizer == MUON:
            rates = f"--optim.name muon --optim.muon-lr {lr} {BESIDE_MUON}"
        return (
            f"{CONFIGS[model]} {ON_BOOKS} --seq-len {self.seq_len} --micro-batch {batch} "
            f"--accumulation 1 --global-batch {batch} --steps {steps} {rates} "
            f"--optim.warmup-steps {self.warmup_steps} --seed {seed} "
            f"--log-every {self.log_every} --eval-every {self.eval_every} "
            f"--eval-windows {self.eval_windows} --checkpoint-every 0 --sample-tokens 0"
        )


def equal_tokens(
    name: str,
    model: str,
    tokens: Tokens,
    *,
    lr: str,
    expected_s: float,
    seed: int = SEEDS[0],
    optimizer: str = ADAMW,
    further: tuple[Command, ...] = (),
) -> Experiment:
    """A training, the test text and, of short windows, the validation text; what NSA selects.

    Args:
        name: of the experiment.
        model: see ``CONFIGS``.
        tokens: what it is trained on.
        lr: see :meth:`Tokens.settings`.
        expected_s: see :class:`Experiment`.
        seed: of weights and data.
        optimizer: see ``optim.name``.
        further: more to do with the finished run.
    """
    splits = ("test",) if tokens.seq_len == LONG else ("test", "validation")
    afterwards = [*(measured(split) for split in splits), *further]
    afterwards += [inspected(tokens.seq_len)] if model in (NSA, SHARED) else []
    train = tokens.settings(model, lr, seed, optimizer)
    return Experiment(name, model, train, tuple(afterwards), expected_s)


_SMALL_STEPS = Tokens(200_000_000, 8_192, warmup_steps=1000, eval_every=2000, log_every=100)
_SWEPT = Tokens(30_000_000, 8_192, warmup_steps=500, eval_every=0, log_every=100)
_LARGE_STEPS = Tokens(200_000_000, 65_536, warmup_steps=150, eval_every=500)
_LONG = Tokens(
    200_000_000,
    8_192,
    warmup_steps=1000,
    eval_every=2000,
    seq_len=LONG,
    eval_windows=128,
    log_every=100,
)
_LONG_IN_LARGE_STEPS = Tokens(
    100_000_000, 65_536, warmup_steps=150, eval_every=500, seq_len=LONG, eval_windows=128
)


def long_run(name: str, model: str, expected_s: float) -> Experiment:
    """50,000 steps of a configuration as it ships, its batch in one micro-batch, on books."""
    train = f"{CONFIGS[model]} {ON_BOOKS} --micro-batch 4 --accumulation 1"
    after = whole_run(train, PROMPT, 50)
    return Experiment(name, model, train, after, expected_s, in_legs=True)


WORDS = {SHARED: "shared", NSA: "nsa", DENSE: "dense", SMALL_DENSE: "small-dense"}


def sweep(group: str, model: str, lr: str, expected_s: float, optimizer: str) -> Experiment:
    """A short training with one learning rate."""
    train = _SWEPT.settings(model, lr, SEEDS[0], optimizer)
    return Experiment(f"{group}-{WORDS[model]}-{lr}", model, train, (), expected_s)


EXPERIMENTS = (
    long_run("50k", NSA, 1310),
    long_run("50k_shared", SHARED, 1750),
    *(
        sweep("rates", model, lr, 95 if model == DENSE else 130, ADAMW)
        for model, rates in TRIED_RATES.items()
        for lr in rates
    ),
    *(
        sweep("muon_rates", model, lr, 130, MUON)
        for model, rates in TRIED_MUON_RATES.items()
        for lr in rates
    ),
    *(
        equal_tokens(
            f"2k-{WORDS[model]}-{seed}",
            model,
            _SMALL_STEPS,
            lr=RATES[model],
            expected_s=535 if model == DENSE else 660,
            seed=seed,
            further=(repeated(),),
        )
        for seed in SEEDS
        for model in RATES
        if model != NSA or seed == SEEDS[0]
    ),
    *(
        equal_tokens(
            f"muon-{WORDS[model]}-{seed}",
            model,
            _SMALL_STEPS,
            lr=lr,
            expected_s=735 if model in SPARSE else 635,
            seed=seed,
            optimizer=MUON,
            further=(repeated(),),
        )
        for seed in SEEDS
        for model, lr in MUON_RATES.items()
        if model != NSA or seed == SEEDS[0]
    ),
    *(
        equal_tokens(
            f"200m-{WORDS[model]}-{seed}",
            model,
            _LARGE_STEPS,
            lr=lr,
            expected_s=480 if model == NSA else 425,
            seed=seed,
        )
        for seed in SEEDS
        for model, lr in LARGE_STEP_RATES.items()
    ),
    *(
        equal_tokens(
            f"muon_long-{WORDS[model]}",
            model,
            _LONG,
            lr=MUON_RATES[model],
            expected_s=800,
            optimizer=MUON,
            further=(repeated(),),
        )
        for model in (SHARED, DENSE)
    ),
    *(
        equal_tokens(f"8k-{WORDS[model]}", model, _LONG_IN_LARGE_STEPS, lr=lr, expected_s=390)
        for model, lr in LARGE_STEP_RATES.items()
    ),
)
