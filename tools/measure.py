"""``python -m tools.measure``: every measurement behind the committed rows of one GPU."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from nsa.ops._triton.tuning import table_name

ATTENTION = "bench attention"
WHOLE = f"{ATTENTION} --case attention"
SELECTED = f"{ATTENTION} --case attention.selected"
BOTH = f"{WHOLE},attention.selected"
SELECTION = f"{ATTENTION} --case attention.choice"
OPERATORS = f"{SELECTION},attention.compressed,attention.window --provider nsa"
TRAIN = "bench train --config 78m"
# Whole sequences, so that the dense model uses the causal kernel; 65,536 tokens a step at once.
UNMASKED = "--data.document-mask false"
STEP = f"--tokens 65536 --micro-batch 32 {UNMASKED}"
PAIR = "--provider nsa,dense"
MODELS = f"--mode fwd_bwd {PAIR}"
ACROSS = "--variant dense-unmasked:model.attention=dense,data.document_mask=false"
DENSE = "--provider nsa,dense-cudnn"
SHARED = "--choice random,shared16"
OPTIONS = " ".join(
    f"--variant {variant}"
    for variant in (
        "coarse:coarse_block_size=256,num_coarse_blocks=24",
        "coarse512:coarse_block_size=512,num_coarse_blocks=16",
        "fp8:score_precision=fp8",
        "table:num_selected_blocks_table=[[-1,65536,8]]",
    )
)
BY_TOKENS = " ".join(
    f"--variant {name}:branches=[slc,win],{settings}"
    for name, settings in (
        ("token_max", "scores=token_max"),
        ("token_max-fp8", "scores=token_max,score_precision=fp8"),
        ("index", "scores=index"),
        ("index-32", "scores=index,index_dim=32,index_keys=shared"),
    )
)
SHARED_KV = "--variant shared:share_kv=true"
SHARED_KV += " --variant shared-token_max:share_kv=true,branches=[slc,win],scores=token_max"
KEPT = ("every", "operators", "full")
POLICIES = " ".join(f"--variant {name}:checkpointing.policy={name}" for name in KEPT)
SWITCHES = "--variant launched:cuda_graphs=false --variant silent:telemetry=false"
EAGER = "--variant eager:compile=false,cuda_graphs=false"
# With few tokens the host is the limit: layers compiled one by one, and as one graph.
LAUNCHED = "--variant launched:cuda_graphs=false"
WHOLE_GRAPH = "--variant whole:cuda_graphs=false,parallel.compile_layers=false"
NSA = "--provider nsa"
# A model that fits one GPU at a million tokens if layers keep only what attention computed. Two of
# its eight layers select; in the variant all do.
LONG = f"bench train --config 7m-64k --data.mixture [] {UNMASKED} --checkpointing.policy operators"
LONG += " --variant eight:model.layers=null"
AT_ONCE, FEW_STEPS = "--tokens 65536 --micro-batch 512", "--warmup 2 --steps 5"
DECODE = "bench decode --case decode"
# Words of `nsa` by the name of their file in results/, or of their folder. Both rows of a ratio
# come from one command, so that they are of one run.
MEASUREMENTS = {
    "seed": [f"{BOTH} --seqs 2048,8192,32768,65536 {SHARED} {DENSE}"],
    "wide": [f"{BOTH} --shape wide --seqs 8192,65536 {SHARED} {DENSE}"],
    "seed-operators": [f"{OPERATORS} --seqs 2048,8192,32768,65536"],
    "32x8": [f"{WHOLE} --shape 32x8x128x128 --seqs 2048,8192,65536 {DENSE}"],
    "wide-operators": [f"{OPERATORS} --shape wide --seqs 8192,65536"],
    "paper": [f"{WHOLE} --shape paper --seqs 8192 {DENSE}"],
    "others": [f"{WHOLE},attention.window {DENSE},dense-fa2,flex"],
    "reference": [f"{ATTENTION} --seqs 512 --tokens 512 {NSA},reference"],
    "shared4": [f"{SELECTED} --seqs 8192 --choice shared4,random {NSA}"],
    "lengths": [
        f"{WHOLE} --seqs 128,256,512,1024,4096,16384,131072 {DENSE}",
        f"{WHOLE} --seqs 262144,524288,1048576 {NSA}",
    ],
    "groups": [
        f"{WHOLE} --shape 12x2x64x64 --tokens 65536 {NSA}",
        f"{WHOLE} --shape 16x2x64x64 --tokens 65536 {NSA}",
    ],
    "choice-options": [f"{SELECTION} --seqs 8192,65536 {SHARED} {NSA} {OPTIONS}"],
    "shared-kv": [f"{WHOLE} --seqs 2048,4096,8192,65536 {DENSE} {SHARED_KV}"],
    "selection": [f"{WHOLE},attention.with_index_loss --seqs 2048,8192,65536 {DENSE} {BY_TOKENS}"],
    "index-loss": [
        f"bench train --config 78m-8k --seqs 8192,65536 {STEP} --mode fwd_bwd {NSA}"
        " --variant index:model.nsa.scores=index"
    ],
    "train": [
        f"{TRAIN} --seqs 2048,8192,65536 {STEP}",
        f"{TRAIN} {UNMASKED} {MODELS}",
        f"{TRAIN} --seqs 128,512,1024 --tokens 65536 --micro-batch 512 {UNMASKED} {MODELS}",
    ],
    "shipped": [
        f"{TRAIN} {MODELS} {ACROSS}",
        f"{TRAIN} --tokens 65536 --micro-batch 32 {MODELS} {ACROSS}",
    ],
    "memory": [f"{TRAIN} --cuda-graphs false {STEP} --mode fwd_bwd {NSA} {POLICIES}"],
    "decode": [
        f"{DECODE}.attention",
        f"{DECODE}.attention --shape seed --points 65536,65536x64",
        f"{DECODE}.model",
    ],
    "decode-index": [
        f"{DECODE}.attention --shape seed {NSA} {BY_TOKENS} --points 65536,65536x64",
        f"{DECODE}.model --config 78m-8k {NSA} {BY_TOKENS} --points 65536,65536x64"
        " --variant compressed:scores=compressed,branches=[cmp,slc,win]",
    ],
    "model-lengths": [
        f"{LONG} {PAIR} --seqs 128,512,2048 {AT_ONCE}",
        f"{LONG} {PAIR} --seqs 4096,16384,65536 {AT_ONCE}",
        f"{LONG} {PAIR} --seqs 131072,262144 {FEW_STEPS}",
        f"{LONG} {PAIR} --seqs 524288 {FEW_STEPS}",
        f"{LONG} {NSA} --seqs 1048576 {FEW_STEPS}",
        f"{DECODE}.model --config 7m-64k --points 128,1024,4096,16384,65536,262144,1048576",
    ],
    "host": ["bench host"],
    "switches": [
        f"{TRAIN} {STEP} --mode fwd_bwd {NSA} {SWITCHES} {EAGER}",
        f"{TRAIN} --mode fwd_bwd {NSA} {LAUNCHED} {WHOLE_GRAPH}",
    ],
}
FOLDERS = ("memory", "host", "switches")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every measurement behind the committed rows of one GPU; 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.measure", description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks"), help="for results/, ..")
    parser.add_argument("--only", nargs="+", choices=MEASUREMENTS, default=[*MEASUREMENTS])
    parser.add_argument("--shards", help="prepared data of bytes for training")
    parser.add_argument("--commit", help="commit to record if the checkout has no git")
    parser.add_argument("--list", action="store_true", help="print the commands only")
    options = parser.parse_args(arguments)
    gpu, failed = gpu_name(), ""
    chosen = [(name, text) for name in options.only for text in MEASUREMENTS[name]]
    for name, text in chosen:
        file = f"{name}/{gpu}.jsonl" if name in FOLDERS else f"results/{gpu}-{name}.jsonl"
        words = [*text.split(), "--out", str(options.out / file)]
        if options.shards and text.startswith("bench train"):
            words += ["--data.source", "shards", "--data.path", options.shards]
        words += ["--commit", options.commit] if options.commit else []
        print("$ nsa", *words, flush=True)
        if not options.list:
            begin = time.monotonic()
            code = subprocess.run([sys.executable, "-m", "nsa", *words], check=False).returncode
            print(f"exit code {code} after {time.monotonic() - begin:.0f} s", flush=True)
            failed += f" {name} ({code})" * (code != 0)
    print(f"failed:{failed}" if failed else "all done")
    return int(bool(failed))


def gpu_name() -> str:
    """GPU in names of files, such as ``h200``; ``cpu`` without one."""
    if not torch.cuda.is_available():
        return "cpu"
    name = table_name(torch.cuda.get_device_name())
    return re.sub(r"nvidia-|geforce-|-\d+gb.*", "", name)


if __name__ == "__main__":
    sys.exit(main())
