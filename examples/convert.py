"""A dense pretrained model made sparse without training, and compared with the dense one.

python -m examples.convert                     # a small random Llama, made here
hf download Qwen/Qwen3-0.6B --local-dir qwen   # or any Llama, Mistral, Qwen 2 or Qwen 3
python -m examples.convert qwen
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from nsa.hf.convert import convert
from nsa.hf.tokenizer import as_transformers

QUESTION, SAME, LONG = "The capital of France is", 24 * 64, 2000  # blocks times their tokens


def make_random(folder: Path) -> Path:
    """Save a small Llama that reads bytes."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=256, intermediate_size=128, initializer_range=0.2, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    as_transformers({"separator": None, "tokenizer": None}).save_pretrained(folder)
    return folder


@torch.no_grad()
def main(folder: str | None = None) -> None:
    """Print what both models answer, and how much their logits differ."""
    with TemporaryDirectory() as scratch:
        dense = make_random(Path(scratch) / "dense") if folder is None else Path(folder)
        sparse, logits = Path(scratch) / "sparse", []
        print(convert(dense, sparse))
        tokenizer = AutoTokenizer.from_pretrained(sparse)
        batch = tokenizer(QUESTION, return_tensors="pt")
        tokens = batch["input_ids"].repeat(1, LONG)[:, :LONG]
        for name in (dense, sparse):
            model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
            answer = model.generate(**batch, max_new_tokens=20, do_sample=False)
            print(f"{name.name}: {tokenizer.decode(answer[0])!r}")
            logits.append(model(tokens).logits)
        change = (logits[0] - logits[1]).abs()[0]
        for part, where in ((change[:SAME], "up to"), (change[SAME:], "after")):
            print(f"logits {where} {SAME:,} tokens differ by at most {part.max():.0e}")


if __name__ == "__main__":
    main(*sys.argv[1:])
