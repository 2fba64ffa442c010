"""Configuration of a training run: frozen dataclasses, one YAML file each run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, get_args

from nsa.errors import (
    UserError,
    check,
    check_at_most,
    check_default,
    check_not_negative,
    check_positive,
)
from nsa.fields import check_field, settle
from nsa.lm.config import LMConfig

if TYPE_CHECKING:
    from nsa.lm.recomputation import Keeps
    from nsa.ops.index_loss import Ranked

MAX_STEPS, MAX_SEQUENCES = 1_000_000_000, 2**20
Text = Literal["corpus", "stdlib", "folder", "shards", "stream"]
Synthetic = Literal["uniform", "copy", "induction", "needle"]


@dataclass(frozen=True)
class RecallConfig:
    """Lines about made-up words that are inserted into training text, for retrieval in context.

    See :class:`nsa.train.data.recall.RecallSource`.

    Attributes:
        density: share of a sequence's tokens in inserted lines, above 0 and at most 1.
        text_share: share of all other targets that count, drawn at random; those of repeated values
            always count. 0 trains on values alone.
    """

    density: float = 0.5
    text_share: float = 0.1

    def __post_init__(self) -> None:
        settle(self)
        check_field(self, 0 < self.density <= 1, "density", "be above 0 and at most 1")
        check_field(self, 0 <= self.text_share <= 1, "text_share", "be from 0 to 1")


@dataclass(frozen=True)
class PartConfig:
    """A part of a mixture of training data.

    Attributes:
        weight: share of the sequences, relative to the weights of the other parts.
        source: source of text; None means that of the run, with its path and other settings.
        path: see :class:`DataConfig`; None means that of the run unless the part has a ``source``,
            and so for the fields below.
        pattern: the same.
        subset: the same.
        split: the same.
        revision: the same.
        text_field: the same.
        recall: the same.
    """

    weight: float = 1.0
    source: Text | None = None
    path: str | None = None
    pattern: str | None = None
    subset: str | None = None
    split: str | None = None
    revision: str | None = None
    text_field: str | None = None
    recall: RecallConfig | None = None

    def __post_init__(self) -> None:
        settle(self)
        check_positive(self, "weight")


@dataclass(frozen=True)
class DataConfig:
    """Source of the tokens.

    Attributes:
        source: ``corpus`` (embedded plays), ``stdlib`` (the running Python's standard library),
            ``folder`` (a text file or a folder of them), ``shards`` (what ``nsa data prepare``
            made), ``stream`` (a data set while it is read), or a synthetic task: ``uniform``,
            ``copy``, ``induction``, ``needle``.
        path: file or folder of ``folder``, folder of ``shards``; for ``stream`` a data set on the
            Hugging Face hub or a local file or folder of Parquet, JSON lines or text.
        pattern: glob of the files of a folder, for example ``*.txt``, matched at every depth.
        tokenizer: ``byte``, ``gpt2`` (GPT-2 BPE), ``bpe`` (trained on the training text of this
            run), or ``file``; for ``shards`` the kind that they were made with.
        tokenizer_path: a ``tokenizers`` JSON file, for ``file``; not for ``shards``, which bring
            theirs.
        bpe_vocab_size: vocabulary of ``bpe``, separator included.
        document_mask: whether documents inside a sequence are invisible to each other.
        validation_fraction: share of the text for validation, above 0 and at most 0.5; that of
            ``shards`` was fixed when they were made.
        test_fraction: share of the text for the test split, on which results are reported; 0 for
            none, and at most 0.5 together with ``validation_fraction``. See docs/evaluation.md.
        subset: configuration of a data set of ``stream``, for example ``sample-10BT``.
        split: split of a data set of ``stream``.
        revision: commit, branch or tag on the hub, for ``stream``.
        text_field: column that holds the text, for ``stream``.
        time_limit_s: seconds without a document after which a ``stream`` is given up.
        validation_tokens: tokens of validation text, and of test text if there is any, that are
            read from a ``stream`` before training begins.
        synthetic_fallback: synthetic task to train on if ``shards`` or a ``stream`` are not there
            when the run starts; every row of metrics then says ``data_synthetic``. ``none`` makes
            that an error.
        recall: lines to be retrieved, inserted into the training text; None for plain text.
        mixture: parts of the training data, for example ``[{weight: 3}, {weight: 1, recall: {}}]``;
            empty for one source. Validation and test text are those of the first part.
    """

    source: Literal[Text, Synthetic] = "corpus"
    path: str | None = None
    pattern: str = "*"
    tokenizer: Literal["byte", "gpt2", "bpe", "file"] = "byte"
    tokenizer_path: str | None = None
    bpe_vocab_size: int = 8192
    document_mask: bool = True
    validation_fraction: float = 0.1
    test_fraction: float = 0.0
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    text_field: str = "text"
    time_limit_s: float = 300.0
    validation_tokens: int = 262_144
    synthetic_fallback: Literal["none", Synthetic] = "none"
    recall: RecallConfig | None = None
    mixture: tuple[PartConfig, ...] = ()

    def __post_init__(self) -> None:
        settle(self)
        own_tokenizer = self.tokenizer == "file" and self.source != "shards"
        of_file = "tokenizer file (and another source than shards)"
        reads = self.source in ("folder", "shards", "stream")
        for name, rule, is_wanted in (
            ("path", "source folder, shards or stream", reads),
            ("tokenizer_path", of_file, own_tokenizer),
        ):
            is_given = getattr(self, name) is not None
            check_field(self, is_given == is_wanted, name, f"be given with {rule} and only then")
        where, is_stream = f"source {self.source}", self.source == "stream"
        check_default(self, self.source in ("folder", "stream"), where, "pattern")
        check_default(self, is_stream, where, *_OF_A_STREAM)
        check_default(self, self.source in ("shards", "stream"), where, "synthetic_fallback")
        is_split_here = self.source in ("corpus", "stdlib", "folder", "stream")
        check_default(self, is_split_here, where, "validation_fraction", "test_fraction")
        check_default(self, self.source in get_args(Text), where, "recall", "mixture")
        check_fractions(*self.fractions)
        check_positive(self, "time_limit_s", "validation_tokens", "bpe_vocab_size")
        fits, hint = self.tokenizer != "bpe" or not is_stream, "`nsa data prepare` trains one."
        check_field(self, fits, "tokenizer", "be byte, gpt2 or file with source stream", hint)
        fits = self.tokenizer in ("byte", "gpt2")
        check_default(self, fits, f"tokenizer {self.tokenizer}", "synthetic_fallback")
        _ = self.parts  # checks them

    @property
    def parts(self) -> list[DataConfig]:
        """Data of each part of the mixture; this one alone without parts."""
        found = []
        for number, part in enumerate(self.mixture):
            given = {name: value for name, value in vars(part).items() if value is not None}
            del given["weight"]
            # A part with a source of its own takes nothing that belongs to the run's.
            fields = DataConfig.__dataclass_fields__
            base = {name: fields[name].default for name in _OF_A_SOURCE if part.source}
            try:
                found.append(replace(self, **{**base, **given, "mixture": ()}))
            except UserError as error:
                argument = f"mixture.{number}.{error.argument}"
                raise UserError(argument, error.rule, error.value, error.hint) from None
        return found or [self]

    @property
    def fractions(self) -> tuple[float, float]:
        """Shares of the text for validation and test."""
        return self.validation_fraction, self.test_fraction


def check_fractions(
    validation: float,
    test: float,
    names: tuple[str, str] = ("validation_fraction", "test_fraction"),
) -> None:
    """Check the shares of a text for validation and test; the message names the one at fault."""
    check(0 < validation <= 0.5, names[0], "be above 0 and at most 0.5", validation)
    rule = f"be at least 0, and at most 0.5 together with {names[0]} ({validation})"
    check(test >= 0 and validation + test <= 0.5, names[1], rule, test)


_OF_A_SOURCE = ("path", "pattern", "subset", "split", "revision", "text_field", "recall")
_OF_A_STREAM = (
    "subset",
    "split",
    "revision",
    "text_field",
    "time_limit_s",
    "validation_tokens",
)


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and schedule; every count is in optimizer steps.

    Attributes:
        name: ``adamw`` (fused), or ``muon`` for the matrices of the layers and AdamW for all else.
        lr: peak learning rate (of AdamW).
        muon_lr: peak learning rate of Muon's matrices.
        min_lr_ratio: the cosine ends at this share of the peak.
        warmup_steps: linear warm-up.
        betas: AdamW's moment decays.
        eps: AdamW's epsilon.
        weight_decay: decoupled decay of matrices (embeddings, norms, biases and gates' biases are
            not decayed).
        grad_clip: largest gradient norm; 0 switches clipping off.
        trained: ``all`` weights, or those of the ``index`` alone: the others are frozen, without
            gradients, moments or decay.
        index_weight: factor on the loss that trains the index of layers with scores ``index``, a
            sum over these layers, see :func:`nsa.index_loss`; 0 leaves out that loss.
        index_lr: peak learning rate of the index's projections, which AdamW then updates; None
            treats them as other projections.
        index_warmup_steps: steps at first in which that loss ranks all blocks and not only the
            selected ones, at the cost of dense attention.
    """

    name: Literal["adamw", "muon"] = "adamw"
    lr: float = 2e-4
    muon_lr: float = 0.02
    min_lr_ratio: float = 0.0
    warmup_steps: int = 2000
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    trained: Literal["all", "index"] = "all"
    index_weight: float = 1.0
    index_lr: float | None = None
    index_warmup_steps: int = 0

    def __post_init__(self) -> None:
        settle(self)
        check_positive(self, "lr", "muon_lr", "eps")
        check_not_negative(self, "warmup_steps", "weight_decay", "grad_clip")
        check_not_negative(self, "index_weight", "index_warmup_steps")
        fits = self.index_lr is None or self.index_lr > 0
        check_field(self, fits, "index_lr", "be positive, or null")
        fits = self.trained == "all" or self.index_weight > 0
        check_field(self, fits, "index_weight", "be positive with trained index")
        fits = all(0 <= beta < 1 for beta in self.betas)
        check_field(self, fits, "betas", "lie between 0 and 1, 1 excluded")
        check_field(self, 0 <= self.min_lr_ratio <= 1, "min_lr_ratio", "lie between 0 and 1")


@dataclass(frozen=True)
class CheckpointingConfig:
    """Activation checkpointing: recompute activations in the backward pass to save memory.

    Gradients do not change. Figures: ``docs/training.md``.

    Attributes:
        policy: ``none``; ``full``, every layer keeps its input alone; ``range``, the layers from
            ``first`` to ``last`` do; ``every``, each ``every``-th layer does; ``operators``, every
            layer also keeps what its attention computed, the costliest part to repeat (with
            ``model.attention`` nsa on a GPU alone).
        first: first layer of a ``range``, counted from 0.
        last: last layer of a ``range``, itself included.
        every: 2 means the layers 1, 3, 5 and so on.
    """

    policy: Literal["none", "full", "range", "every", "operators"] = "none"
    first: int = 0
    last: int = 0
    every: int = 2

    def __post_init__(self) -> None:
        settle(self)
        where = f"policy {self.policy}"
        check_default(self, self.policy == "range", where, "first", "last")
        check_default(self, self.policy == "every", where, "every")
        check_positive(self, "every")
        check_not_negative(self, "first")
        check_field(self, self.last >= self.first, "last", f"be at least first ({self.first})")

    def keeps(self, layer: int) -> Keeps:
        """Activations that a layer keeps; see :class:`nsa.lm.model.DecoderLayer`.

        Args:
            layer: number of the layer, from 0.
        """
        if self.policy == "operators":
            return "attention"
        chosen = {
            "none": False,
            "full": True,
            "range": self.first <= layer <= self.last,
            "every": layer % self.every == self.every - 1,
        }
        return "input" if chosen[self.policy] else "everything"


@dataclass(frozen=True)
class ParallelConfig:
    """How several processes share a run; with one, only ``compile_layers`` has an effect.

    Attributes:
        strategy: ``ddp``, equal replicas of the model that average their gradients; ``fsdp``, every
            process holds a part of all weights, gradients and moments (FSDP2).
        gradient_compression: ``bf16`` sends gradients rounded, half the bytes; ``none`` sends fp32.
        gather_dtype: dtype in which ``fsdp`` gathers the layers' weights; ``bf16`` halves the bytes
            and rounds norms and biases too (matrix products round their weights anyway), and needs
            ``compute_dtype`` bf16.
        bucket_mib: gradients that ``ddp`` sends at a time, MiB.
        static_graph: tells ``ddp`` that every step is like the first; not with ``cuda_graphs``.
        compile_layers: with ``compile``, whether each layer is a graph of its own: compiled once
            for all layers, which shortens the start, and with several processes gradients are sent
            while those of the layers before are computed. One process and ``ddp`` may also have the
            whole model as one graph.
    """

    strategy: Literal["ddp", "fsdp"] = "ddp"
    gradient_compression: Literal["none", "bf16"] = "none"
    gather_dtype: Literal["fp32", "bf16"] = "fp32"
    bucket_mib: float = 25.0
    static_graph: bool = False
    compile_layers: bool = True

    def __post_init__(self) -> None:
        settle(self)
        check_positive(self, "bucket_mib")
        where, is_ddp = f"strategy {self.strategy}", self.strategy == "ddp"
        check_default(self, not is_ddp, where, "gather_dtype")
        check_default(self, is_ddp, where, "bucket_mib", "static_graph", "compile_layers")


@dataclass(frozen=True)
class TrainConfig:
    """A training run.

    Attributes:
        model: the language model; its ``vocab_size`` must equal the tokenizer's.
        data: source of the tokens.
        optim: optimizer and schedule.
        parallel: how several processes share the run.
        checkpointing: which activations are computed twice.
        steps: optimizer steps.
        seq_len: tokens of a sequence.
        stages: shorter sequences at the beginning: steps and tokens of a sequence for each stage,
            for example ``[[2000, 2048], [1000, 8192]]``; the other steps have ``seq_len``, which
            is a multiple of each. Steps keep their tokens: as much shorter sequences are, more are
            in a micro-batch and in an evaluation.
        micro_batch: sequences of one forward and backward on one process.
        accumulation: micro-batches of one optimizer step.
        world_size: number of processes.
        global_batch: sequences of one optimizer step; must equal ``micro_batch * accumulation *
            world_size``.
        seed: of initialisation and data order.
        device: ``auto`` takes a CUDA GPU if there is one.
        compute_dtype: ``bf16`` runs matrix products under autocast, master weights stay fp32;
            ``fp32`` runs none.
        compile: whether model and loss go through ``torch.compile``, as one graph.
        cuda_graphs: whether forward and backward of a micro-batch are replayed from a CUDA graph,
            and Muon's update from another, which spares the host its work: for micro-batches of few
            tokens. Needs a GPU; several processes need ``parallel.strategy`` ddp.
        tf32: whether fp32 matrix products may use TF32.
        allocator: ``expandable_segments`` lets PyTorch's CUDA allocator grow its segments, so that
            sizes that change from step to step leave less memory in pieces; ``default`` leaves it
            as it is, or as PYTORCH_ALLOC_CONF says. Needs a GPU.
        memory_fraction: share of the GPU's memory that PyTorch may take; a run that
            needs more ends. Needs a GPU unless it is 1.
        loss_chunk: positions whose logits exist at a time; 0 means all.
        telemetry: whether statistics of gates and selection are collected in every layer in the
            steps that have a row.
        log_every: optimizer steps from one row of metrics to the next; 0 means only at the end.
        eval_every: optimizer steps from one evaluation to the next; 0 means only at the end.
        checkpoint_every: optimizer steps from one checkpoint to the next; 0 means only at the end.
        eval_windows: validation sequences of an evaluation, at most what there is.
        keep_checkpoints: newest checkpoints kept; the best one is kept too. It is the one with the
            lowest validation loss among those taken at a step that was evaluated, so
            ``checkpoint_every`` should be a multiple of ``eval_every``.
        nonfinite: policy for a non-finite loss or gradient: ``skip`` the update, ``rollback`` to
            the last checkpoint, or ``stop``.
        nonfinite_limit: consecutive such steps after which the run stops whatever the policy.
        sample_tokens: tokens of the sample written at the end, at most.
        sample_limit_s: longest time for the sample, seconds; 0 means without limit.
        data_limit_s: longest wait for the next batch, seconds, before the run ends with a
            checkpoint; 0 means without limit. A stream has ``data.time_limit_s`` instead.
        stall_limit_s: longest time without a heartbeat, seconds, before the watchdog reports the
            stacks of a process and ends it; at least ten times the last step or the last time in
            the same phase; 0 disables the watchdog.
    """

    model: LMConfig = field(default_factory=LMConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpointing: CheckpointingConfig = field(default_factory=CheckpointingConfig)
    steps: int = 50_000
    seq_len: int = 2048
    stages: tuple[tuple[int, int], ...] = ()
    micro_batch: int = 2
    accumulation: int = 2
    world_size: int = 1
    global_batch: int = 4
    seed: int = 1337
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compute_dtype: Literal["bf16", "fp32"] = "bf16"
    compile: bool = False
    cuda_graphs: bool = False
    tf32: bool = False
    allocator: Literal["default", "expandable_segments"] = "default"
    memory_fraction: float = 1.0
    loss_chunk: int = 0
    telemetry: bool = True
    log_every: int = 20
    eval_every: int = 1000
    eval_windows: int = 64
    checkpoint_every: int = 5000
    keep_checkpoints: int = 3
    nonfinite: Literal["skip", "rollback", "stop"] = "skip"
    nonfinite_limit: int = 10
    sample_tokens: int = 512
    sample_limit_s: float = 5.0
    data_limit_s: float = 30.0
    stall_limit_s: float = 40.0

    def __post_init__(self) -> None:
        settle(self)
        check_positive(self, "steps", "seq_len", "micro_batch", "accumulation", "world_size")
        check_positive(self, "keep_checkpoints", "nonfinite_limit")
        check_not_negative(self, "loss_chunk", "log_every", "eval_every", "eval_windows")
        check_not_negative(self, "checkpoint_every", "sample_tokens", "sample_limit_s", "seed")
        check_not_negative(self, "data_limit_s", "stall_limit_s")
        # Beyond them a run or one of its steps would not end.
        check_at_most(self, MAX_STEPS, "steps")
        check_at_most(self, MAX_SEQUENCES, "global_batch")
        # Positions are counted in 32 bits.
        rule = f"be at most 2**30 / micro_batch ({self.micro_batch})"
        check_field(self, self.seq_len * self.micro_batch <= 2**30, "seq_len", rule)
        check_field(self, 0 < self.memory_fraction <= 1, "memory_fraction", "be above 0, at most 1")
        for steps, length in self.stages:
            fits = steps > 0 and length > 0 and self.seq_len % length == 0
            rule = f"have positive steps, and lengths that divide seq_len ({self.seq_len})"
            check(fits, "stages", rule, [steps, length])
        product = self.micro_batch * self.accumulation * self.world_size
        rule = f"equal micro_batch * accumulation * world_size ({product})"
        check_field(self, self.global_batch == product, "global_batch", rule)
        layers = self.model.num_layers
        rule = f"be below model.num_layers ({layers})"
        check_field(self, self.checkpointing.last < layers, "checkpointing.last", rule)
        waits, limit = self.data_limit_s, self.stall_limit_s
        fits = waits < limit or 0 in (waits, limit)
        check_field(self, fits, "data_limit_s", f"be below stall_limit_s ({limit:g})")
        self._check_parallel()
        index = ("trained", "index_weight", "index_lr", "index_warmup_steps")
        check_default(self.optim, self.model.has_index, "no layer with scores index", *index)

    def ranked(self, step: int) -> Ranked | None:
        """Blocks that the loss of the index ranks in a step; None without that loss."""
        if not (self.model.has_index and self.optim.index_weight):
            return None
        return "all" if step < self.optim.index_warmup_steps else "selected"

    @cached_property
    def by_stage(self) -> list[tuple[int, TrainConfig]]:
        """Each stage: the number of steps until its end, and the run with its sequences."""
        found, end = list[tuple[int, TrainConfig]](), 0
        for steps, seq_len in self.stages:
            end, more = end + steps, self.seq_len // seq_len
            run = replace(
                self,
                stages=(),
                seq_len=seq_len,
                micro_batch=more * self.micro_batch,
                global_batch=more * self.global_batch,
                eval_windows=more * self.eval_windows,
            )
            found.append((end, run))
        return [*found, (MAX_STEPS + 1, self)]

    def at(self, step: int) -> TrainConfig:
        """The run with the sequences of an optimizer step.

        Args:
            step: number of steps before it.
        """
        return next(run for end, run in self.by_stage if step < end)

    def _check_parallel(self) -> None:
        gathered, dtype = self.parallel.gather_dtype, self.compute_dtype
        fits = gathered == "fp32" or dtype == "bf16"
        check_field(self, fits, "parallel.gather_dtype", f"be fp32 with compute_dtype {dtype}")
        fits = self.world_size == 1 or not self.cuda_graphs
        is_ddp, hint = self.parallel.strategy == "ddp", "Give --cuda-graphs false."
        rule = "be false with parallel.strategy fsdp"
        check_field(self, fits or is_ddp, "cuda_graphs", rule, hint)
        fits = fits or not self.parallel.static_graph
        check_field(self, fits, "parallel.static_graph", "be false with cuda_graphs", hint)
