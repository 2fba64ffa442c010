"""TRL's trainers train the model for a few steps, whole and by LoRA."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.hf.tiny import tiny
from tests.hf.trl_runs import KINDS, train_by_trl

NEEDED = ("trl", "peft", "datasets")  # seconds to import: found here, imported by the test


@pytest.mark.skipif(None in map(find_spec, NEEDED), reason="needs trl, peft and datasets")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("kind", "has_adapters", "pattern"),
    [
        *(
            (kind, kind in ("SFT checkpointed", "Reward", "GRPO"), {})
            for kind in KINDS
            if kind != "DPO"
        ),
        ("SFT wrapped", True, {"scores": "index", "num_selected_blocks": 6}),
    ],
    ids=str,
)
def test_five_steps(kind, has_adapters, pattern, tmp_path):
    tiny(vocab_size=256, **pattern).float().save_pretrained(tmp_path / "model")
    exported = tmp_path / "model"
    faults = train_by_trl(kind, exported, tmp_path, has_adapters=has_adapters, use_cpu=True)
    assert not faults
