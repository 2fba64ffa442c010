"""Text from the model of nanogpt.py, token by token with the decode cache.

python -m examples.nanogpt      # trains the model
python -m examples.generate
"""

from __future__ import annotations

import torch

from examples.nanogpt import CONFIG, GPT
from nsa import NSACache


@torch.no_grad()
def generate(model: GPT, prompt: bytes, num_tokens: int, temperature: float = 0.8) -> bytes:
    """Return ``num_tokens`` bytes drawn after ``prompt``."""
    tokens = torch.tensor([list(prompt)])
    cache = NSACache(CONFIG, len(model.blocks), batch_size=1, max_tokens=len(prompt) + num_tokens)
    logits = model(tokens, cache)[:, -1]  # the prompt in one pass
    drawn = []
    for _ in range(num_tokens):
        token = torch.multinomial((logits / temperature).softmax(-1), 1)  # [1, 1]
        drawn.append(int(token))
        logits = model(token, cache)[:, -1]  # one step reads the cache
    return bytes(drawn)


def main(path: str = "nanogpt.pt", num_tokens: int = 300) -> str:
    """Load the weights and print a continuation."""
    torch.manual_seed(0)
    model = GPT()
    model.load_state_dict(torch.load(path))
    text = "HAMLET. " + generate(model, b"HAMLET. ", num_tokens).decode(errors="replace")
    print(text)
    return text


if __name__ == "__main__":
    main()
