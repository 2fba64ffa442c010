"""TRL's trainers train the model for a few steps, whole and by LoRA."""

from __future__ import annotations

import pytest

from tests.hf.tiny import tiny
from tests.hf.trl_runs import KINDS, train_by_trl

for name in ("trl", "peft", "datasets"):
    pytest.importorskip(name)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("kind", "has_adapters"),
    [(kind, kind in ("SFT checkpointed", "Reward", "GRPO")) for kind in KINDS if kind != "DPO"],
)
def test_a_few_steps(kind, has_adapters, tmp_path):
    tiny(vocab_size=256).float().save_pretrained(tmp_path / "model")
    exported = tmp_path / "model"
    faults = train_by_trl(kind, exported, tmp_path, has_adapters=has_adapters, use_cpu=True)
    assert not faults
