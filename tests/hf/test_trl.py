"""TRL's trainers train the model for a few steps, whole and by LoRA."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from nsa.hf import NSAForCausalLM, NSAForSequenceClassification
from nsa.hf.tokenizer import as_transformers
from tests.hf.tiny import tiny

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
datasets = pytest.importorskip("datasets")

STEPS = 5
TEXTS = [f"line {i}: " + "the sea was calm " * (1 + i % 3) for i in range(40)]
ROWS: dict[str, list[dict[str, str]]] = {
    "SFT": [{"text": text} for text in TEXTS],
    "DPO": [{"prompt": text[:8], "chosen": text[8:], "rejected": text[:8]} for text in TEXTS],
    "Reward": [{"chosen": text[8:], "rejected": text[:8]} for text in TEXTS],
    "GRPO": [{"prompt": text[: 4 + i % 5]} for i, text in enumerate(TEXTS)],
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "SFT": ("SFT", {"max_length": 64}),
    "SFT packed": ("SFT", {"max_length": 96, "packing": True}),
    "SFT wrapped": ("SFT", {"max_length": 96, "packing": True, "packing_strategy": "wrapped"}),
    "SFT padding-free": ("SFT", {"max_length": None, "padding_free": True}),
    "SFT checkpointed": ("SFT", {"max_length": 64, "gradient_checkpointing": True}),
    "DPO": ("DPO", {"max_length": 64}),
    "DPO checkpointed": ("DPO", {"max_length": 64, "gradient_checkpointing": True}),
    "Reward": ("Reward", {"max_length": 64}),
    "GRPO": ("GRPO", {"num_generations": 4, "max_completion_length": 9, "beta": 0.1}),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("has_adapters", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_five_steps(kind: str, has_adapters: bool, tmp_path: Path) -> None:
    """Losses are finite; what is trained changes, and with LoRA nothing else."""
    name, options = KINDS[kind]
    tiny(vocab_size=256).float().save_pretrained(tmp_path / "model")
    # TRL loads the reference model of DPO and GRPO from the same folder.
    if name == "Reward":
        model = NSAForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=1)
    else:
        model = NSAForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = as_transformers({"separator": "end", "tokenizer": None})
    defaults = {
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
        "gradient_checkpointing": False,
        "max_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 4,
    }
    arguments = getattr(trl, f"{name}Config")(str(tmp_path), **{**defaults, **options})
    given: dict[str, Any] = {"train_dataset": datasets.Dataset.from_list(ROWS[name])}
    if name == "GRPO":
        given["reward_funcs"] = lambda completions, **_: [
            float(x.count("e") + len(x) % 3) for x in completions
        ]
    if has_adapters:
        task = "SEQ_CLS" if name == "Reward" else "CAUSAL_LM"
        given["peft_config"] = peft.LoraConfig(task_type=task, r=4, target_modules="all-linear")
    model.train()
    trainer = getattr(trl, f"{name}Trainer")(
        model, args=arguments, processing_class=tokenizer, **given
    )
    parameters = trainer.model.named_parameters()
    before = {key: (x.requires_grad, x.detach().clone()) for key, x in parameters}
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == STEPS
    assert all(map(math.isfinite, losses))
    for key, x in trainer.model.named_parameters():
        is_trained, old = before[key]
        assert (x != old).any() == is_trained, key
        assert is_trained == ("lora" in key or "modules_to_save" in key) or not has_adapters
    layers = trainer.model.get_base_model() if has_adapters else trainer.model
    keeps = {layer.keeps for layer in layers.model.lm.decoder_layers()}
    assert keeps == {"input" if "checkpointed" in kind else "everything"}
