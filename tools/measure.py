"""``python -m tools.measure``: every measurement behind the committed rows of one GPU, one after the other."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

ATTENTION = "bench attention"
WHOLE = f"{ATTENTION} --case attention"
CHOSEN = f"{WHOLE},attention.selected"
OPERATORS = f"{ATTENTION} --case " + ",".join(
    f"attention.{name}" for name in ("compress", "compressed", "choice", "window", "combine")
)
TRAIN = "bench train --config seed"
# Whole windows, so that the dense model takes the causal kernel; 65,536 tokens a step at once.
UNMASKED = "--set data.document_mask=false"
STEP = f"--tokens 65536 --micro-batch 32 {UNMASKED}"
DENSE = "--provider nsa,dense-cudnn"
OPTIONS = " ".join(
    f"--variant {variant}"
    for variant in (
        "coarse:coarse_block_size=256,num_coarse_blocks=24",
        "coarse512:coarse_block_size=512,num_coarse_blocks=16",
        "fp8:score_precision=fp8",
        "table:num_selected_blocks_table=[[-1,65536,8]]",
    )
)
POLICIES = " ".join(f"--variant {name}:checkpointing.policy={name}" for name in ("every", "operators", "full"))
SWITCHES = (
    "--variant launched:cuda_graphs=false --variant eager:compile=false,cuda_graphs=false --variant silent:telemetry=false"
)
# Folder and name of the file, and words of `nsa`. What makes a ratio is of one command: ratios are of one run.
MEASUREMENTS: tuple[tuple[str, str, str], ...] = (
    ("results", "seed", f"{CHOSEN} --seqs 2048,8192,32768,65536 --choice random,shared16 {DENSE}"),
    ("results", "wide", f"{CHOSEN} --shape wide --seqs 8192,65536 --choice random,shared16 {DENSE}"),
    ("results", "seed-operators", f"{OPERATORS} --seqs 2048,8192,32768,65536 --provider nsa"),
    ("results", "wide-operators", f"{OPERATORS} --shape wide --seqs 8192,65536 --provider nsa"),
    ("results", "paper", f"{WHOLE} --shape paper --seqs 8192 {DENSE}"),
    ("results", "others", f"{WHOLE},attention.window --seqs 2048,65536 --provider nsa,dense-cudnn,dense-fa2,flex"),
    ("results", "reference", f"{ATTENTION} --seqs 512 --tokens 512 --provider nsa,reference"),
    ("results", "shared4", f"{ATTENTION} --case attention.selected --seqs 8192 --choice shared4,random --provider nsa"),
    ("results", "lengths", f"{WHOLE} --seqs 128,256,512,1024,4096,16384,131072 {DENSE}"),
    ("results", "lengths", f"{WHOLE} --seqs 262144,524288,1048576 --provider nsa"),
    ("results", "groups", f"{WHOLE} --shape 12x2x64x64 --tokens 65536 --seqs 2048,65536 --provider nsa"),
    ("results", "groups", f"{WHOLE} --shape 16x2x64x64 --tokens 65536 --seqs 2048,65536 --provider nsa"),
    ("results", "choice-options", f"{ATTENTION} --case attention.choice --seqs 8192,65536 --choice random,shared16 "
     f"--provider nsa --recall {OPTIONS}"),
    ("results", "train", f"{TRAIN} --seqs 2048,8192,65536 {STEP}"),
    ("results", "train", f"{TRAIN} {UNMASKED} --mode fwd_bwd --provider nsa,dense"),
    ("results", "train", f"{TRAIN} --seqs 128,512 --tokens 65536 --micro-batch 512 {UNMASKED} "
     "--mode fwd_bwd --provider nsa,dense"),
    ("results", "shipped", f"{TRAIN} --mode fwd_bwd --provider nsa,dense --dense-unmasked"),
    ("results", "shipped", f"{TRAIN} --tokens 65536 --micro-batch 32 --mode fwd_bwd "
     "--provider nsa,dense --dense-unmasked"),
    ("results", "designs", f"{ATTENTION} --case attention.selected --seqs 2048,4096,8192,65536 --choice random,shared16 "
     "--provider nsa,tiled,gathered"),
    ("results", "designs", f"{ATTENTION} --case attention.selected --shape wide --seqs 8192,65536 --choice random,shared16 "
     "--provider nsa,tiled,gathered"),
    ("consumers", "", f"{ATTENTION} --case attention.selected --seqs 2048,8192 --provider nsa,mask,ranges,gather"),
    ("memory", "", f"{TRAIN} --set cuda_graphs=false {STEP} --mode fwd_bwd --provider nsa "
     f"{POLICIES}"),
    ("host", "", "bench host"),
    ("switches", "", f"{TRAIN} {STEP} --mode fwd_bwd --provider nsa {SWITCHES}"),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all measurements, or some; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks"), help="folder that gets results/, memory/ and others")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="some, by file or folder: seed, train, memory")
    parser.add_argument(
        "--shards", type=Path, help="prepared data of bytes on which models train; else what the configuration says"
    )
    parser.add_argument("--commit", help="commit to record where the checkout has no git")
    parser.add_argument("--list", action="store_true", help="print the commands alone")
    options = parser.parse_args(arguments)
    gpu, failed = gpu_name(), []
    for folder, name, text in MEASUREMENTS:
        if options.only and (name or folder) not in options.only:
            continue
        path = options.out / folder / f"{'-'.join(part for part in (gpu, name) if part)}.jsonl"
        words = [*text.split(), "--out", str(path)]
        if options.shards is not None and text.startswith(TRAIN):
            words += ["--set", "data.source=shards", "--set", f"data.path={options.shards}"]
        if options.commit is not None:
            words += ["--commit", options.commit]
        print("$ nsa", *words, flush=True)
        if not options.list:
            begin = time.monotonic()
            code = subprocess.run([sys.executable, "-m", "nsa", *words], check=False).returncode
            print(f"exit code {code} after {time.monotonic() - begin:.0f} s", flush=True)
            failed += [f"{name or folder} ({code})"] * (code != 0)
    print(f"failed: {', '.join(failed)}" if failed else "all done")
    return 1 if failed else 0


def gpu_name() -> str:
    """The GPU in names of files: h200; cpu where there is none."""
    if not torch.cuda.is_available():
        return "cpu"
    words = re.sub(r"[^a-z0-9]+", " ", torch.cuda.get_device_name().lower()).split()
    return "-".join(word for word in words if word not in ("nvidia", "geforce"))


if __name__ == "__main__":
    sys.exit(main())
