"""One number of sequences for every micro-batch of a run.

Compiled code and CUDA graphs take a fixed number of sequences. Batches of documents differ in it,
so every micro-batch is padded with empty sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

from nsa.train.config import TrainConfig
from nsa.train.data import Batch
from nsa.train.data.batch import TokenSource
from nsa.train.distributed.processes import Processes
from nsa.train.state import Progress

# Mean length of documents in tokens that is assumed without an index.
SHORT_DOCUMENT = 64


class SequenceCapacity:
    """Pads micro-batches to ``progress.sequence_capacity`` sequences, which a checkpoint stores.

    The index of the data gives the largest number of document parts in a micro-batch. A stream has
    no index: its capacity is one sequence for ``SHORT_DOCUMENT`` tokens. A batch with more
    sequences raises the capacity on all processes together.

    Args:
        config: the run; batches are padded only if it masks documents and compiles or captures.
        source: training text.
        progress: of the run; its capacity is raised to that of the index, and never lowered.
        processes: this process and the other ranks of the run.
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
        """Largest number of sequences in a micro-batch if it exceeds the capacity, else 0."""
        most = max((batch.num_sequences for batch in batches), default=0)
        capacity = self._progress.sequence_capacity
        return most if 0 < capacity < most else 0

    def grow(self, needed: int) -> str:
        """Raise the capacity; all processes of the run call this together.

        Args:
            needed: result of :meth:`needed` on this process.

        Returns:
            A message for the log.
        """
        (needed,) = self._processes.largest(needed)
        before = self._progress.sequence_capacity
        after = self._progress.sequence_capacity = 1 << (needed - 1).bit_length()
        return (
            f"a micro-batch of {needed} sequences exceeds the capacity of {before}, which is now "
            f"{after}: the step is captured again"
        )

    def padded(self, batches: Sequence[Batch]) -> list[Batch]:
        """Pad the micro-batches to the capacity."""
        capacity = self._progress.sequence_capacity
        return [batch.padded(capacity) if capacity else batch for batch in batches]


def _capacity(config: TrainConfig, source: TokenSource) -> int:
    """Capacity of a new run; 0 if the number of sequences may vary."""
    documents = config.data.document_mask and source.separator_id is not None
    if not documents or not (config.compile or config.cuda_graphs):
        return 0
    most = source.most_sequences(config.seq_len, config.micro_batch)
    if most is None:
        most = config.micro_batch * config.seq_len // SHORT_DOCUMENT
    # More than micro_batch: sequences without a boundary would be computed by other code.
    return max(most, config.micro_batch + 1)
