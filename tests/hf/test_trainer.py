"""transformers' ``Trainer`` trains the model; it needs accelerate, which the package does not."""

from __future__ import annotations

import pytest
import torch

from nsa.hf import NSAForCausalLM
from tests.hf.tiny import VOCAB, tiny

pytest.importorskip("accelerate")


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("has_offsets", "index"),  # without offsets, positions restart
    [(True, {}), (False, {}), (True, {"scores": "index", "num_selected_blocks": 6})],
    ids=["offsets", "positions", "index"],
)
def test_a_few_steps(has_offsets, index, tmp_path):
    """The loss falls, with layers computed again; a checkpoint is what was trained."""
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    model = tiny(**index).float().train()
    initial = {n: p.detach().clone() for n, p in model.named_parameters() if "_idx_proj" in n}
    texts = [(torch.arange((100 if index else 30) + i) + i) % VOCAB for i in range(32)]
    options = {
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=12,
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        logging_steps=4,
        save_steps=12,
        gradient_checkpointing=True,
        **options,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=[{"input_ids": text.tolist()} for text in texts],
        data_collator=DataCollatorWithFlattening(return_flash_attn_kwargs=False),
    )
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < losses[0] - 0.3
    assert {layer.keeps for layer in model.lm.decoder_layers()} == {"input"}
    saved = NSAForCausalLM.from_pretrained(tmp_path / "checkpoint-12")
    trained = dict(model.named_parameters())
    assert not any(torch.equal(trained[name], x) for name, x in initial.items())
    assert len(initial) == (4 if index else 0)
    x = texts[0][None]
    assert torch.equal(saved(x).logits, model.eval()(x).logits)
