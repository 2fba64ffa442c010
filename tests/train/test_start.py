"""The start of a run: settings that do not fit are refused, and the rest is logged and set."""

from __future__ import annotations

from unittest.mock import Mock, call

import pytest
import torch

from nsa.train.config import ParallelConfig, TrainConfig
from nsa.train.distributed.launch import Launch, check_launch, read_launch
from nsa.train.trainer import Trainer
from tests.train.cases import new_trainer, tiny_config


def test_launch_that_does_not_fit_is_refused():
    config = TrainConfig(world_size=2, global_batch=8)
    message = r"world_size must equal the number of processes launched \(1\), got 2"
    with pytest.raises(ValueError, match=message):
        check_launch(config, Launch())
    check_launch(config, Launch(world_size=2))


def test_variables_of_torchrun_that_are_no_numbers(monkeypatch):
    monkeypatch.setenv("RANK", "abc")
    with pytest.raises(ValueError, match=r"^RANK must be a whole number from 0, got 'abc'"):
        read_launch()


TWO = {"world_size": 2, "global_batch": 8, "cuda_graphs": True}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"model": {"vocab_size": 300}}, r"vocab_size must equal the tokenizer's \(256\), got 300"),
        (
            {"device": "cuda"},
            "device must be cpu or auto where PyTorch finds no CUDA GPU, got cuda",
        ),
        (
            {"cuda_graphs": True, "device": "auto"},
            r"cuda_graphs must be left at False with device cpu, got True\. "
            r"No CUDA GPU was found\. On a CPU, for example: nsa train cpu-small",
        ),
        ({"allocator": "expandable_segments"}, "allocator must be left at default with device cpu"),
        (
            {"memory_fraction": 0.5},
            r"memory_fraction must be left at 1\.0 with device cpu, got 0\.5",
        ),
        (
            {**TWO, "parallel": ParallelConfig("fsdp")},
            r"cuda_graphs must be false with parallel\.strategy fsdp, got True\. Give --cuda",
        ),
        (
            {**TWO, "parallel": ParallelConfig(static_graph=True)},
            r"parallel\.static_graph must be false with cuda_graphs, got True\. Give --cuda",
        ),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused(tmp_path, monkeypatch, setting, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=message):
        new_trainer(tmp_path, **setting)


def test_batch_and_model_are_logged_at_the_start(tmp_path, caplog):
    caplog.set_level("INFO", logger="nsa")
    new_trainer(tmp_path)
    batch = "micro_batch 2 x accumulation 2 x world_size 1 = global_batch 4 sequences of 64 tokens"
    assert f"{batch} = 256 tokens an optimizer step" in caplog.text
    assert "0.0M parameters: embedding 8,192" in caplog.text


def test_memory_fraction_caps_the_allocator(
    monkeypatch,
    tmp_path,
):
    cap = Mock()
    monkeypatch.setattr("nsa.train.trainer.choose_device", lambda *args: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", cap)
    for share in (1.0, 0.25):
        Trainer._prepare_device(tiny_config(tmp_path, memory_fraction=share), Launch())
    assert cap.call_args_list == [call(0.25, torch.device("cuda", 0))]
