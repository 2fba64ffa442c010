"""``python -m tools.accept.exported RUN FOLDER``: what transformers loads is what was trained."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import nsa.hf  # noqa: F401 - registers the classes
from nsa.lm.decoder import Decoder
from nsa.lm.model import LanguageModel
from nsa.train.checkpoint import list_checkpoints
from nsa.train.pretrained import load_initial
from nsa.train.run_folder import RunFolder
from nsa.train.runs.inputs import load_model
from tools.accept.case import Result

# Both compute in fp32 by the same operators.
LARGEST_DIFFERENCE = 1e-4
PROMPT_TOKENS, NEW_TOKENS = 300, 64


@torch.no_grad()
def compare(run: Path, exported: Path, device: torch.device, text: str, new_tokens: int) -> Result:
    """Load both models, and the exported weights into a third.

    Args:
        run: run folder of a byte model.
        exported: what ``nsa export`` has made of its last checkpoint, in fp32.
        device: where they compute.
        text: to read.
        new_tokens: to generate greedily.
    """
    folder = RunFolder.open(run)
    config = folder.load_config().model
    ours, step = load_model(config, list_checkpoints(folder.checkpoints)[-1], device)
    theirs = AutoModelForCausalLM.from_pretrained(exported).to(device)
    back = LanguageModel(config)
    load_initial(exported, back)
    pairs = zip(ours.parameters(), back.parameters(), strict=True)
    is_equal = all(torch.equal(a.cpu(), b) for a, b in pairs)
    tokens = AutoTokenizer.from_pretrained(exported)(text, return_tensors="pt").to(device)
    ids = tokens["input_ids"]
    difference = float((ours(ids[0]) - theirs(input_ids=ids).logits[0]).abs().max())
    prompt = ids[:, :PROMPT_TOKENS]
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": new_tokens}
    drawn = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    wanted = _greedy(ours, prompt, new_tokens)
    faults = [] if is_equal else ["weights read back from the folder are not those of the run"]
    if ids[0].tolist() != [*text.encode()]:
        faults.append("the tokenizer does not give the bytes of a text")
    if not difference <= LARGEST_DIFFERENCE:
        faults.append(f"logits differ by {difference:.2e}, at most {LARGEST_DIFFERENCE}")
    if drawn[0, prompt.shape[1] :].tolist() != wanted:
        faults.append("generate() writes another text")
    said = f"step {step}, {ids.shape[1]} tokens, logits differ by {difference:.1e}"
    return Result(remarks=[said, f"{new_tokens} tokens generated"], faults=faults)


def _greedy(model: LanguageModel, prompt: Tensor, count: int) -> list[int]:
    decoder = Decoder(model, max_tokens=prompt.shape[1] + count)
    logits = decoder.prefill(prompt.tolist())
    drawn = [int(logits.argmax())]
    while len(drawn) < count:
        logits = decoder.step(torch.tensor([drawn[-1:]], device=prompt.device))
        drawn.append(int(logits.argmax()))
    return drawn


def main(run: str, exported: str) -> int:
    """Print the result as JSON; 1 if something failed."""
    text = Path(__file__).read_text(encoding="utf-8")
    found = compare(Path(run), Path(exported), torch.device("cuda"), text, NEW_TOKENS)
    print(json.dumps(asdict(found)))
    return 1 if found.faults else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
