"""The start of a run: settings that do not fit are refused, and what is said and set before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.train.config import TrainConfig
from nsa.train.distributed.launch import Launch, check_launch
from nsa.train.trainer import Trainer
from tests.train.cases import make_trainer, tiny_config


def test_launch_that_does_not_fit_is_refused() -> None:
    config = TrainConfig(world_size=2, global_batch=8)
    with pytest.raises(
        ValueError,
        match=r"world_size must equal the number of processes launched \(1\), got 2",
    ):
        check_launch(config, Launch())
    check_launch(config, Launch(world_size=2))
    check_launch(TrainConfig(), Launch())


def test_vocabulary_must_be_the_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"model\.vocab_size must equal the tokenizer's \(256\), got 300",
    ):
        make_trainer(tiny_config(tmp_path, model={"vocab_size": 300}), tmp_path / "run")


def test_gpu_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ValueError,
        match="device must be cpu or auto where PyTorch finds no CUDA GPU, got cuda",
    ):
        make_trainer(tiny_config(tmp_path, device="cuda"), tmp_path / "run")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"cuda_graphs": True}, "train: cuda_graphs must be false on a CPU, got True"),
        (
            {"allocator": "expandable_segments"},
            "train: allocator must be default on a CPU, got expandable_segments",
        ),
        ({"memory_fraction": 0.5}, r"train: memory_fraction must be 1 on a CPU, got 0\.5"),
    ],
    ids=str,
)
def test_settings_of_a_gpu_are_refused_on_a_cpu(
    tmp_path: Path,
    setting: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(tiny_config(tmp_path, **setting), tmp_path / "run")


def test_batch_and_model_are_said_at_the_start(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="nsa")
    make_trainer(tiny_config(tmp_path), tmp_path / "run")
    batch = "2 windows x 2 micro-batches x 1 process = 4 windows of 64 tokens"
    assert f"{batch} = 256 tokens an optimizer step" in caplog.text
    assert "0.0M parameters: embedding 8,192" in caplog.text


def test_memory_fraction_caps_the_allocator(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    capped: list[tuple[float, str]] = []
    monkeypatch.setattr("nsa.train.trainer.choose_device", lambda *args: torch.device("cuda", 0))
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda share, device: capped.append((share, str(device))),
    )
    for share in (1.0, 0.25):
        Trainer._prepare_device(tiny_config(tmp_path, memory_fraction=share), Launch())
    assert capped == [(0.25, "cuda:0")]
