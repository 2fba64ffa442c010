"""One number of sequences for every micro-batch of a run.

Code that ``torch.compile`` compiled or a CUDA graph holds serves one number of sequences. Batches
of documents differ in theirs, so empty sequences behind the others bring every micro-batch to the
same one.
"""

from __future__ import annotations

from collections.abc import Sequence

from nsa.train.config import TrainConfig
from nsa.train.data import Batch
from nsa.train.data.source import TokenSource
from nsa.train.distributed.processes import Processes
from nsa.train.state import Progress

# Mean length of documents, tokens, that is taken for short where there is no index of them.
SHORT_DOCUMENT = 64


class SequenceCapacity:
    """Pads micro-batches to ``progress.sequence_capacity`` sequences, which a checkpoint keeps.

    No micro-batch has more document parts than the index of the data says. A stream
    has no index: there the capacity is one sequence for ``SHORT_DOCUMENT`` tokens. A fuller batch
    raises the capacity, on all processes together.

    Args:
        config: the run. Only where it compiles or captures and masks documents is anything padded.
        source: of the training text.
        progress: of the run; its capacity is raised to what the index says, and never lowered.
        processes: this process among those of the run.
    """

    def __init__(
        self,
        config: TrainConfig,
        source: TokenSource,
        progress: Progress,
        processes: Processes,
    ) -> None:
        self._progress, self._processes = progress, processes
        progress.sequence_capacity = max(progress.sequence_capacity, _capacity(config, source))

    def needed(self, batches: Sequence[Batch]) -> int:
        """Sequences of the fullest of these micro-batches if they exceed the capacity, else 0."""
        most = max((batch.num_sequences for batch in batches), default=0)
        capacity = self._progress.sequence_capacity
        return most if 0 < capacity < most else 0

    def grow(self, needed: int) -> str:
        """Raise the capacity; every process of the run has to come here.

        Args:
            needed: what :meth:`needed` said on this process.

        Returns:
            What there is to say about it.
        """
        (needed,) = self._processes.largest(needed)
        before = self._progress.sequence_capacity
        after = self._progress.sequence_capacity = 1 << (needed - 1).bit_length()
        return (
            f"a micro-batch of {needed} sequences exceeds the capacity of {before}, which is now "
            f"{after}: the step is captured anew"
        )

    def padded(self, batches: Sequence[Batch]) -> list[Batch]:
        """The micro-batches with as many sequences as the capacity says."""
        capacity = self._progress.sequence_capacity
        return [batch.padded(capacity) if capacity else batch for batch in batches]


def _capacity(config: TrainConfig, source: TokenSource) -> int:
    """What a new run begins with; 0 where the number of sequences may vary."""
    documents = config.data.document_mask and source.separator_id is not None
    if not documents or not (config.compile or config.cuda_graphs):
        return 0
    most = source.most_sequences(config.seq_len, config.micro_batch)
    if most is None:
        most = config.micro_batch * config.seq_len // SHORT_DOCUMENT
    # More than micro_batch: sequences without a boundary would be computed by other code.
    return max(most, config.micro_batch + 1)
