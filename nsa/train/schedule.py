"""Learning rate over a run, counted in optimizer steps."""

from __future__ import annotations

import math


def lr_factor(step: int, num_steps: int, warmup_steps: int, min_ratio: float = 0.0) -> float:
    """Factor on the peak learning rate of an optimizer step: linear warm-up, then a cosine.

    A function of the step alone, so that a resumed run needs nothing else, and micro-batches play
    no part in it.

    Args:
        step: optimizer steps already done; the first update is step 0.
        num_steps: optimizer steps of the run.
        warmup_steps: steps of the linear rise; step ``warmup_steps - 1`` is the first at the peak.
        min_ratio: where the cosine ends, reached after the last step, so that the last update is
            not wasted on a rate of 0.

    Returns:
        A factor from 0 to 1, above 0 for every step of the run unless the cosine has ended.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min((step - warmup_steps) / max(num_steps - warmup_steps, 1), 1.0)
    return min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))
