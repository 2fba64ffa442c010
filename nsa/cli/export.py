"""``nsa export``; everything heavy is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal


def export(
    run: str,
    folder: Path,
    *,
    checkpoint: str = "last",
    layout: Literal["nsa", "llama"] = "nsa",
    dtype: Literal["fp32", "bf16"] = "fp32",
    shard_size: str = "5GB",
) -> int:
    """Write a trained model as a folder that transformers loads.

    With its configuration, tokenizer and a card. nsa train CONFIG --init-from FOLDER begins a run
    with it.
      nsa export runs/cpu-small-1 my-model
      nsa export runs/cpu-small-dense-1 my-llama --layout llama

    Args:
        run: run folder, for example runs/cpu-small-1
        folder: folder to make
        checkpoint: last, best or a step
        layout: llama for a dense model with SwiGLU, which transformers reads without this package
        dtype: of the weights
        shard_size: of a file at most, for example 500MB
    """
    from nsa.extras import require
    from nsa.train.run_folder import RunFolder

    require("nsa export", "hf")
    opened = RunFolder.open(run)

    # PyTorch from here on: a mistyped path is answered without it.
    from nsa.hf.export import export_run

    options = {"checkpoint": checkpoint, "dtype": dtype, "shard_size": shard_size}
    print(export_run(opened, folder, layout=layout, **options))
    return 0
