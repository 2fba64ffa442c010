"""transformers on the kernels: logits, ``generate``, two GPUs, ``Trainer``."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nsa.hf import NSAForCausalLM, NSALMConfig
from nsa.lm.config import LMConfig
from nsa.lm.model import LanguageModel
from nsa.testing import assert_within_budget
from nsa.train.config import DataConfig, OptimConfig, TrainConfig
from nsa.train.run_folder import RunFolder
from nsa.train.telemetry.metrics import read_metrics
from nsa.train.trainer import Trainer
from tests.gpu.matrix import DEVICE, SEED
from tests.hf.tiny import left_padded

ROOT = Path(__file__).resolve().parents[2]
MODEL = LMConfig(vocab_size=256, width=256, num_layers=2, nsa=SEED, mlp_hidden_size=512)
LENGTHS = (1, 63, 300, 640, 1100, 1500, 1999, 2000)  # mixed; from 1,024 tokens on blocks compete
NEW = 64
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")


def new_model(**changes: Any) -> NSAForCausalLM:
    """A model with random weights in fp32, whose texts do not repeat one token."""
    torch.manual_seed(0)
    model = NSAForCausalLM(NSALMConfig.of(dataclasses.replace(MODEL, **changes)))
    model.model.head.weight.data *= 20
    return model.eval()


# --------------------------------------------------------------------------------------------------
# logits


def few_tokens() -> Tensor:
    """So few that every block is selected: else rounding decides between blocks of equal scores."""
    generator = torch.Generator().manual_seed(1)
    length = SEED.num_selected_blocks * SEED.block_size
    return torch.randint(256, (2, length), generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_logits_of_a_loaded_model(dtype, tmp_path):
    """Bit for bit those of the project's model, and as near to fp64 as the reference is."""
    model, x = new_model(), few_tokens()
    model.save_pretrained(tmp_path)
    exact = deepcopy(model.lm).double()(x)
    plain = deepcopy(model.lm).to(dtype)(x)
    loaded = NSAForCausalLM.from_pretrained(tmp_path, dtype=dtype, device_map=DEVICE)
    logits = loaded(x.to(DEVICE)).logits
    assert_within_budget(logits.cpu(), plain, exact, "logits")
    assert torch.equal(model.lm.to(DEVICE, dtype)(x.to(DEVICE)), logits)


@TWO_GPUS
@torch.no_grad()
def test_two_devices(tmp_path):
    """Spread over them, with files of their own for parts of the weights."""
    model, x = new_model(num_layers=4), few_tokens()
    model.save_pretrained(tmp_path, max_shard_size="1MB")
    assert len(list(tmp_path.glob("model-0*.safetensors"))) > 2
    loaded = NSAForCausalLM.from_pretrained(tmp_path, device_map="auto")
    devices = {str(parameter.device) for parameter in loaded.parameters()}
    assert devices == {"cuda:0", "cuda:1"}
    mask = torch.ones_like(x)
    mask[1, :100] = 0
    for given in ({}, {"attention_mask": mask.to(DEVICE)}):
        logits = loaded(x.to(DEVICE), **given).logits.to(DEVICE)
        whole = model.to(DEVICE)(x.to(DEVICE), **given).logits
        torch.testing.assert_close(logits[0], whole[0], rtol=0, atol=1e-4)
        torch.testing.assert_close(logits[1, 100:], whole[1, 100:], rtol=0, atol=1e-4)
        options = {"attention_mask": torch.ones_like(x, device=DEVICE), **given}
        texts = [
            one.generate(
                x.to(DEVICE), max_new_tokens=9, do_sample=False, use_cache=cached, **options
            )
            for one, cached in ((model, True), (loaded, True), (loaded, False))
        ]
        assert texts[0].tolist() == texts[1].tolist() == texts[2].tolist()


# --------------------------------------------------------------------------------------------------
# generate


def on_device(rows: list[Tensor]) -> dict[str, Tensor]:
    return {name: x.to(DEVICE) for name, x in left_padded(rows).items()}


@torch.no_grad()
def first_differences(
    model: LanguageModel, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
) -> dict[int, tuple[int, float]]:
    """First token of each text that the model without a cache would not have written.

    Returns, by the index of the text, the position of the token and the distance of its logit from
    the largest one.
    """
    found = dict[int, tuple[int, float]]()
    device = model.embedding.weight.device
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        logits: Tensor = model(torch.tensor([*prompt, *text[:-1]], device=device))
        logits = logits[len(prompt) - 1 :]
        best, said = logits.argmax(-1), torch.tensor(text, device=device)
        wrong = (best != said).nonzero().flatten().tolist()
        if wrong:
            row = logits[wrong[0]]
            found[number] = wrong[0], float(row.max() - row[said[wrong[0]]])
    return found


def make_prompts(lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(0)
    numbers = (torch.randint(0, vocab_size, (n,), generator=generator) for n in lengths)
    return [prompt.tolist() for prompt in numbers]


# A dense layer, smaller blocks, more KV heads.
MIXED: Any = [{"attention": "dense"}, {"block_size": 32}, {"num_kv_heads": 4, "window_size": 128}]


@pytest.mark.parametrize(
    "changes", [{}, {"attention": "dense"}, {"num_layers": 3, "layers": MIXED}], ids=str
)
def test_left_padded_batch(changes):
    """Each row as if it were alone, and as the model says without a cache, but for near ties."""
    model = new_model(**changes).to(DEVICE)
    prompts = make_prompts(LENGTHS, 256)
    rows = [torch.tensor(prompt) for prompt in prompts]
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    found = model.generate(**on_device(rows), **options)[:, -NEW:].tolist()
    alone = [model.generate(**on_device([row]), **options)[0, -NEW:].tolist() for row in rows]
    differences = first_differences(model.lm, prompts, found)
    print(f"\n{changes}: differences {differences}")
    assert len(differences) <= 1
    assert sum(x != y for x, y in zip(found, alone, strict=True)) <= 1
    assert len({token for text in found for token in text}) > 30


@pytest.mark.parametrize("number", [3, 20])
@torch.no_grad()
def test_prompt_lookup(number):
    """Candidates, some of which are wrong, change nothing but at a near tie."""
    model = new_model().to(DEVICE)
    text = torch.tensor(make_prompts((300,), 256)[0] * 2)  # all blocks are selected
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    batch = on_device([text])
    found = model.generate(**batch, **options, prompt_lookup_num_tokens=number)
    differences = first_differences(model.lm, [text.tolist()], found[:, -NEW:].tolist())
    assert all(gap < 1e-3 for _, gap in differences.values())
    cache = model.new_cache(max_tokens=len(text) + 40)
    x = batch["input_ids"]
    model(x, past_key_values=cache)
    logits = model(x[:, :8], past_key_values=cache).logits
    for _ in range(3):  # eager, captured, replayed
        cache.crop(-8)
        again = model(x[:, :8], past_key_values=cache).logits
        torch.testing.assert_close(again, logits, rtol=0, atol=1e-4)


def test_beams():
    """Their scores are those of the reference in fp64, and so are texts but for a near tie."""
    model = new_model()
    rows = [torch.tensor(prompt) for prompt in make_prompts((500, 40), 256)]
    options: dict[str, Any] = {
        "max_new_tokens": 8,
        "do_sample": False,
        "num_beams": 3,
        "num_return_sequences": 3,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    wanted = deepcopy(model).double().generate(**left_padded(rows), **options)
    found = model.to(DEVICE).generate(**on_device(rows), **options)
    scores = found.sequences_scores.double().cpu()
    torch.testing.assert_close(scores, wanted.sequences_scores.double(), rtol=1e-3, atol=1e-3)
    texts = (found.sequences[:, -8:].cpu() == wanted.sequences[:, -8:]).all(1)
    assert texts.sum() >= 4


# --------------------------------------------------------------------------------------------------
# Trainer

TRAINING: dict[str, Any] = {
    "steps": 200,
    "seq_len": 512,
    "log_every": 20,
    "compute_dtype": "bf16",
    "device": DEVICE,
}
WINDOWS = 8  # of a step


def train_config() -> TrainConfig:
    """A run whose windows are sequences and whose matrices do not decay, as with ``Trainer``."""
    return TrainConfig(
        model=MODEL,
        data=DataConfig(source="corpus", document_mask=False),
        optim=OptimConfig(lr=1e-3, min_lr_ratio=0.1, warmup_steps=20, weight_decay=0.0),
        **TRAINING,
        micro_batch=WINDOWS,
        accumulation=1,
        global_batch=WINDOWS,
        eval_every=0,
        checkpoint_every=0,
        sample_tokens=0,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder for :mod:`tests.gpu.trained_by_transformers`, and the losses of ``nsa train``."""
    folder, config = tmp_path_factory.mktemp("trained"), train_config()
    trainer = Trainer(config, RunFolder.create(folder / "run", config))
    start = NSAForCausalLM(NSALMConfig.of(config.model), deepcopy(trainer.model).cpu())
    start.save_pretrained(folder / "start")
    sampler = trainer.data.sampler(config.seq_len, config.seed)
    order = map(sampler.sequence_at, range(config.steps * WINDOWS))
    windows = np.stack([trainer.data.train.sequence(config.seq_len, index) for index in order])
    np.save(folder / "windows.npy", windows)
    (folder / "settings.json").write_text(json.dumps(dataclasses.asdict(config)), encoding="utf-8")
    trainer.run()
    rows = read_metrics(folder / "run/metrics.jsonl")
    return folder, [float(str(row["loss_nats"])) for row in rows]


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=TWO_GPUS)])
def test_trainer_of_transformers(trained, processes):
    """200 steps on one GPU and on two have the losses of ``nsa train`` with the same batches."""
    pytest.importorskip("accelerate")
    folder, ours = trained
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *launcher, "-m", "tests.gpu.trained_by_transformers", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    theirs = json.loads((folder / "losses.json").read_text(encoding="utf-8"))
    print(f"\nlosses of nsa train {ours}\nof Trainer, {processes} processes {theirs}")
    assert len(theirs) == len(ours) == TRAINING["steps"] // TRAINING["log_every"]
    assert theirs[-1] < theirs[0] - 0.5
    assert theirs[-1] == pytest.approx(ours[-1], rel=0.01)
