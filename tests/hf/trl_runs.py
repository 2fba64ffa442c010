"""Training of a model for a few steps by TRL's trainers, whole and by LoRA."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from nsa.hf import NSAForCausalLM, NSAForSequenceClassification
from nsa.hf.tokenizer import as_transformers

STEPS = 3
TEXTS = [f"line {i}: " + "the sea was calm " * (1 + i % 3) for i in range(40)]
ROWS: dict[str, list[dict[str, str]]] = {
    "SFT": [{"text": text} for text in TEXTS],
    "DPO": [{"prompt": text[:8], "chosen": text[8:], "rejected": text[:8]} for text in TEXTS],
    "Reward": [{"chosen": text[8:], "rejected": text[:8]} for text in TEXTS],
    # Longer than a compression block: without one its projections have no gradient.
    "GRPO": [{"prompt": 3 * text[: 12 + i % 5]} for i, text in enumerate(TEXTS)],
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


def train_by_trl(
    kind: str, exported: Path, out: Path, *, has_adapters: bool, use_cpu: bool
) -> list[str]:
    """Train an exported byte model for ``STEPS`` steps and return the faults.

    Losses must be finite, all that is trained must change, and with LoRA nothing else.

    Args:
        kind: a key of ``KINDS``.
        exported: folder of the model; TRL loads the reference model of DPO and GRPO from it.
        out: folder for TRL.
        has_adapters: whether LoRA adapters are trained in place of the weights.
        use_cpu: whether to train on the CPU in fp32; on a GPU it is bf16.
    """
    import datasets
    import peft
    import trl

    name, options = KINDS[kind]
    if name == "Reward":
        model = NSAForSequenceClassification.from_pretrained(exported, num_labels=1)
    else:
        model = NSAForCausalLM.from_pretrained(exported)
    defaults = {
        "report_to": [],
        "use_cpu": use_cpu,
        "bf16": not use_cpu,
        "disable_tqdm": True,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
        "gradient_checkpointing": False,
        "max_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 4,
    }
    arguments = getattr(trl, f"{name}Config")(str(out), **{**defaults, **options})
    given: dict[str, Any] = {"train_dataset": datasets.Dataset.from_list(ROWS[name])}
    if name == "GRPO":
        given["reward_funcs"] = lambda completions, **_: [
            float(x.count("e") + len(x) % 3) for x in completions
        ]
    if has_adapters:
        task = "SEQ_CLS" if name == "Reward" else "CAUSAL_LM"
        given["peft_config"] = peft.LoraConfig(task_type=task, r=4, target_modules="all-linear")
    model.train()
    tokenizer = as_transformers({"separator": "end", "tokenizer": None})
    trainer = getattr(trl, f"{name}Trainer")(
        model, args=arguments, processing_class=tokenizer, **given
    )
    before = {
        key: (x.requires_grad, x.detach().clone()) for key, x in trainer.model.named_parameters()
    }
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    is_finite = len(losses) == STEPS and all(map(math.isfinite, losses))
    faults = [] if is_finite else [f"losses {losses}"]
    for key, x in trainer.model.named_parameters():
        is_trained, old = before[key]
        is_adapter = "lora" in key or "modules_to_save" in key
        if bool((x != old.to(x.device)).any()) != is_trained:
            faults.append(f"{key} {'did not change' if is_trained else 'changed'}")
        if has_adapters and is_trained != is_adapter:
            faults.append(f"{key} {'is' if is_trained else 'is not'} trained")
    layers = trainer.model.get_base_model() if has_adapters else trainer.model
    keeps = {layer.keeps for layer in layers.model.lm.decoder_layers()}
    if keeps != {"input" if "checkpointed" in kind else "everything"}:
        faults.append(f"layers keep {keeps}")
    return faults
