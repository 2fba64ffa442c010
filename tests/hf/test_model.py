"""The model in transformers: logits, loss, checkpointing, folders, Auto classes, mistakes."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from nsa import NSAConfig, Sequences
from nsa.config import RopeScaling
from nsa.hf import NSAForCausalLM, NSALMConfig, NSAModel
from nsa.lm.config import LMConfig
from tests.hf.tiny import VOCAB, left_padded, tiny, tokens
from tests.lm.test_decoder import MIXED
from tests.ops.cases import offsets, small

KINDS: list[dict[str, Any]] = [
    {"phi": "mlp", "mlp": "swiglu"},
    {"attention": "dense", "tie_head": True},
    {"scores": "token_max", "branches": ("slc", "win")},
    {"scores": "index", "index_heads": 2, "branches": ("slc", "win")},
    {"branches": ("slc", "win"), "gate": "softmax", "gate_hidden_size": 4, "tie_head": True},
    MIXED,
]
ROOT = Path(__file__).resolve().parents[2]


def same(model: NSAForCausalLM, other: Any) -> None:
    x = tokens(2, 60)
    assert type(other) is NSAForCausalLM
    assert torch.equal(other(x).logits, model(x).logits)


# --------------------------------------------------------------------------------------------------
# the model


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_logits_and_folders(kind, tmp_path):
    """Bit for bit those of the project's model, before and behind a folder of several files."""
    model, x = tiny(**kind).float(), tokens(2, 60)
    logits = model(x, attention_mask=torch.ones_like(x)).logits
    assert torch.equal(logits, model.lm(x))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-0000*.safetensors"))) > 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    same(model, loaded)
    assert loaded.config.lm == model.config.lm
    is_tied = loaded.model.head.weight is loaded.model.embedding.weight
    assert is_tied == model.config.lm.tie_head
    frozen = {name for name, x in model.named_parameters() if not x.requires_grad}
    assert {name for name, x in loaded.named_parameters() if not x.requires_grad} == frozen
    names = {name for file in tmp_path.glob("*.safetensors") for name in load_file(file)}
    is_saved = {f"model.{name}" for name in model.lm.state_dict()} - {"model.head.weight"}
    assert names - {"model.head.weight"} == is_saved
    loaded.save_pretrained(tmp_path / "again")
    same(model, NSAForCausalLM.from_pretrained(tmp_path / "again"))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_base_model(kind):
    """Its last hidden state is the input of the head, with padding, embeddings or a cache too."""
    model, batch = tiny(**kind), left_padded([tokens(n, seed=n) for n in (60, 33)])
    base, head, embedding = model.base_model, model.get_output_embeddings(), model.lm.embedding
    assert base is model.get_decoder()
    assert model.get_input_embeddings() is base.get_input_embeddings() is embedding
    ids, mask = batch["input_ids"], batch["attention_mask"]
    valid = mask == 1
    found = base(**batch, output_hidden_states=True)
    logits = model(**batch, output_hidden_states=True)
    assert torch.equal(head(found.last_hidden_state), logits.logits)
    assert found.past_key_values is None
    for x, y in zip(found.hidden_states, logits.hidden_states, strict=True):
        assert torch.equal(x, y)
    assert torch.equal(found.hidden_states[-1], found.last_hidden_state)
    embedded = {"inputs_embeds": embedding(ids), "attention_mask": mask}
    assert torch.equal(found.last_hidden_state, base(**embedded, return_dict=False)[0])
    assert torch.equal(logits.logits, model(**embedded).logits)

    row = ids[1, -33:]
    sequences = Sequences(None, 1, 33, 33, row.device)
    states = [embedding(row)]
    for layer in model.lm.decoder_layers():
        states.append(layer(states[-1], sequences, None))
    states[-1] = model.lm.norm(states[-1])
    for x, wanted in zip(found.hidden_states, states, strict=True):
        torch.testing.assert_close(x[1, -33:], wanted, rtol=0, atol=1e-12)

    for name, x in (("input_ids", ids), ("inputs_embeds", embedding(ids))):
        for part, wanted in ((model, logits.logits), (base, found.last_hidden_state)):
            cache = model.new_cache(2, max_tokens=60)
            for start, stop in ((0, 50), (50, 60)):
                cached = part(
                    **{name: x[:, start:stop]},
                    attention_mask=mask[:, :stop],
                    past_key_values=cache,
                    output_hidden_states=True,
                )
                for y, state in zip(cached.hidden_states, found.hidden_states, strict=True):
                    is_token = valid[:, start:stop]
                    state = state[:, start:stop][is_token]
                    torch.testing.assert_close(y[is_token], state, rtol=0, atol=1e-11)
                result = next(iter(cached.values()))
                wanted_part = wanted[:, start:stop][is_token]
                torch.testing.assert_close(result[is_token], wanted_part, rtol=0, atol=1e-11)
            assert cached.past_key_values is cache


def test_copies_and_replaced_modules():
    """The model, its base and its language model have the same modules, in copies as well."""
    model, x = tiny(), tokens(1, 20)
    other = copy.deepcopy(model)
    other.model.head = torch.nn.Linear(24, 3).double()
    other.lm.norm = torch.nn.Identity()  # type: ignore[assignment]
    assert other(x).logits.shape == (1, 20, 3)
    assert other.lm(x).shape == (1, 20, 3)
    assert other.model.norm is other.lm.norm
    assert torch.equal(model(x).logits, model.lm(x))
    assert {id(p) for p in model.parameters()}.isdisjoint(map(id, other.parameters()))


@pytest.mark.parametrize(
    ("auto", "rows"),
    [(AutoModelForSequenceClassification, (2, 1)), (AutoModelForTokenClassification, (2, 30, 1))],
)
def test_models_with_other_heads(auto, rows, tmp_path):
    """From a folder of a language model: its weights and a new head, which is trained and saved."""
    model, x = tiny().float(), tokens(2, 30)
    model.config.pad_token_id = VOCAB
    wanted = model.base_model(x).last_hidden_state
    model.save_pretrained(tmp_path / "language")
    base = AutoModel.from_pretrained(tmp_path / "language")
    assert type(base) is NSAModel
    base.save_pretrained(tmp_path / "base")
    for place in ("language", "base"):
        loaded = AutoModel.from_pretrained(tmp_path / place)
        assert torch.equal(loaded(x).last_hidden_state, wanted)
        assert not [name for name, _ in loaded.named_parameters() if "head" in name]
        classifier = auto.from_pretrained(tmp_path / place, num_labels=1)
        assert torch.equal(classifier.model(x).last_hidden_state, wanted)
        assert 0.1 < classifier.score.weight.std() < 0.4
    with pytest.raises(ValueError, match="the folder must hold model"):
        NSAForCausalLM.from_pretrained(tmp_path / "base")
    classifier._set_gradient_checkpointing()
    assert {layer.keeps for layer in classifier.model.lm.decoder_layers()} == {"input"}
    result = classifier.train()(x, attention_mask=torch.ones_like(x))
    assert result.logits.shape == rows
    result.logits.sum().backward()
    trained = [p for p in classifier.parameters() if p.requires_grad]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trained)
    classifier.eval().save_pretrained(tmp_path / "head")
    again = auto.from_pretrained(tmp_path / "head")
    assert torch.equal(again(x).logits, classifier(x).logits)
    loaded = AutoModel.from_pretrained(tmp_path / "head")
    assert torch.equal(loaded(x).last_hidden_state, wanted)


@pytest.mark.parametrize("lengths", [((33, 1, 7, 19),), ((23, 7), (30,))], ids=str)
def test_positions_that_restart(lengths):
    """They separate documents, as ``cu_seq_lens_q`` does, for logits and loss."""
    model, every = tiny(), [n for row in lengths for n in row]
    x = tokens(len(lengths), 60 // len(lengths))
    positions = torch.cat([torch.arange(n) for n in every]).view(x.shape)
    options = {"cu_seq_lens_q": offsets(every), "position_ids": positions + 5}  # not read
    wanted, found = (
        model(x, labels=x, **given) for given in (options, {"position_ids": positions})
    )
    assert torch.equal(found.logits, wanted.logits)
    assert torch.equal(found.loss, wanted.loss)
    hidden = model.base_model(x, position_ids=positions).last_hidden_state
    assert torch.equal(model.lm.head(hidden), wanted.logits)
    assert not torch.equal(wanted.logits, model(x).logits)


def test_positions_that_the_model_counts():
    model, batch = tiny(), left_padded([tokens(n, seed=n) for n in (60, 33)])
    ids, mask = batch["input_ids"], batch["attention_mask"]
    wanted, column = model(**batch).logits, torch.arange(60)[None]
    for positions in (column, (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)):
        assert torch.equal(model(**batch, position_ids=positions).logits, wanted)
        cached = {"past_key_values": model.new_cache(2, max_tokens=60)}
        model(ids[:, :50], attention_mask=mask[:, :50], position_ids=positions[:, :50], **cached)
        late = {"attention_mask": mask, "position_ids": positions[:, 50:], **cached}
        found = model(ids[:, 50:], **late).logits
        torch.testing.assert_close(found, wanted[:, 50:], rtol=0, atol=1e-11)
        with pytest.raises(ValueError, match="position_ids must be the columns of the tokens"):
            model(
                ids[:, :1], attention_mask=torch.ones(2, 61), position_ids=column[:, :1], **cached
            )
    assert torch.equal(model(ids, position_ids=column).logits, model(ids).logits)


def test_loss_and_checkpointing():
    """The loss of the next token; a backward pass that computes layers again has its gradients."""
    model, x = tiny(), tokens(2, 40)
    labels = x.clone()
    labels[0, :10] = -100

    def gradients():
        model.zero_grad()
        model(x, labels=labels).loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain = gradients()
    expected = torch.nn.functional.cross_entropy(
        model(x).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    )
    torch.testing.assert_close(model(x, labels=labels).loss.double(), expected, rtol=1e-6, atol=0)
    # its name before transformers 5.20
    names = ("gradient", "activation")
    name = names[hasattr(model, "activation_checkpointing_enable")]
    getattr(model, f"{name}_checkpointing_enable")()
    assert {layer.keeps for layer in model.lm.decoder_layers()} == {"input"}
    for found, wanted in zip(gradients(), plain, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    getattr(model, f"{name}_checkpointing_disable")()
    assert {layer.keeps for layer in model.lm.decoder_layers()} == {"everything"}
    model._set_gradient_checkpointing(every_n_layers=2)
    assert [layer.keeps for layer in model.lm.decoder_layers()] == ["input", "everything"]


def with_index(**changes: Any) -> NSAForCausalLM:
    """Three of seven selected blocks are forced; the second layer is dense."""
    index = {"scores": "index", "index_dim": 16, "index_heads": 2, "num_selected_blocks": 7}
    layers = {1: {"attention": "dense"}}
    return tiny(layers=layers, num_layers=3, **{**index, **changes}).train()


@pytest.mark.parametrize("items", [None, 400])
def test_index_loss(items):
    """The index has the gradient of its loss over the tokens that are no padding, and no other."""
    model, x = with_index(), tokens(2, 170)
    mask = torch.ones_like(x)
    mask[1, 150:] = 0
    given: Any = {"labels": x, "attention_mask": mask}
    share = 1.0
    if items is not None:
        given["num_items_in_batch"] = items
        share = (169 + 149) / items

    def run() -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        loss = model(x, **given).loss
        loss.backward()
        return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    def is_index(name: str) -> bool:
        return "_idx_proj" in name

    model.config.index_weight = 0.0
    without, plain = run()
    assert torch.equal(without, model.eval()(x, **given).loss)
    model.train().config.index_weight = 0.5
    loss, found = run()
    assert torch.equal(model.eval()(x, **given).loss, without)
    cu_seqlens, packed = torch.tensor([0, 170, 320]).int(), torch.cat((x[0], x[1, :150]))
    losses: list[Any] = []
    model.zero_grad()
    model.lm.hidden_states(packed, cu_seqlens, 170, ranked="selected", losses=losses)
    assert len(losses) == 2
    mean = share * sum(total / number for total, number in losses) / 2
    torch.testing.assert_close(loss - without, 0.5 * mean.detach(), rtol=0, atol=1e-6)
    (0.5 * mean).backward()
    for name, parameter in model.named_parameters():
        if is_index(name):
            assert not plain[name].any()
            assert found[name].any()
            torch.testing.assert_close(found[name], parameter.grad)
        elif name in plain:
            torch.testing.assert_close(found[name], plain[name])
    model.train()._set_gradient_checkpointing()
    again = run()
    assert torch.equal(again[0], loss)
    assert all(torch.equal(x, found[name]) for name, x in again[1].items())


def test_gradient_of_the_index_without_labels():
    """A loss computed elsewhere has the index's gradient too, of half the weight here."""
    model, x = with_index(index_heads=1), tokens(2, 100)
    found = []
    for weight in (1.0, 0.5, 0.0):
        model.config.index_weight = weight
        model.zero_grad()
        model(x).logits.square().mean().backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    whole, half, none = found
    for name, gradient in whole.items():
        if "_idx_proj" in name:
            assert gradient.any()
            assert not none[name].any()
            torch.testing.assert_close(half[name], 0.5 * gradient)
        else:
            assert torch.equal(gradient, none[name])
    model.config.index_weight = 1.0
    model.zero_grad()
    model(x, labels=x).loss.backward()
    for name, parameter in model.named_parameters():
        if "_idx_proj" in name:
            torch.testing.assert_close(parameter.grad, whole[name])


@pytest.mark.parametrize(("ignored", "items"), [(False, None), (True, 97)])
def test_loss_of_padded_and_packed_rows(ignored, items):
    """A row's loss is the same alone, padded left or right, and packed behind another row."""
    model, rows = tiny(), [tokens(n, seed=n) for n in (30, 7, 19)]
    options = {} if items is None else {"num_items_in_batch": items}
    losses = [model(row[None], labels=row[None], num_items_in_batch=1).loss for row in rows]
    expected = sum(losses) / (items or sum(len(row) - 1 for row in rows))

    def agrees(**given):
        found = model(**given, **options).loss
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)

    batch = left_padded(rows)
    lengths = batch["attention_mask"].sum(1)
    for name in ("left", "right"):
        ids, mask = batch["input_ids"], batch["attention_mask"]
        if name == "right":
            roll = (torch.arange(30) + 30 - lengths[:, None]) % 30
            ids, mask = ids.gather(1, roll), mask.gather(1, roll)
        labels = ids.masked_fill(mask == 0, -100) if ignored else ids
        agrees(input_ids=ids, attention_mask=mask, labels=labels)
        agrees(input_ids=ids, attention_mask=mask.bool(), labels=labels)
        moved = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        agrees(input_ids=ids, attention_mask=mask, labels=labels, shift_labels=moved)
    row = torch.cat(rows)[None]
    labels = row.clone()
    labels[0, [30, 37]] = -100 if ignored else labels[0, [30, 37]]
    agrees(input_ids=row, labels=labels, cu_seq_lens_q=torch.tensor([0, 30, 37, 56]))


def test_loss_of_some_columns():
    """With ``logits_to_keep``, and in a chunk behind a cache, of the labels that these predict."""
    model, x = tiny(), tokens(1, 40)
    logits, labels = model(x).logits[0], x.clone()
    expected = torch.nn.functional.cross_entropy(logits[-6:-1], x[0, -5:])
    kept = model(x, labels=labels, logits_to_keep=6).loss
    torch.testing.assert_close(kept.double(), expected, rtol=1e-5, atol=0)
    cached = {"past_key_values": model.new_cache(max_tokens=50)}
    ids, mask = torch.cat((x[:, :2], x), dim=1), torch.ones(1, 42)
    mask[0, :2] = 0
    model(ids[:, :36], attention_mask=mask[:, :36], **cached)
    chunk = model(ids[:, 36:], attention_mask=mask, labels=ids[:, 36:], **cached).loss
    torch.testing.assert_close(chunk.double(), expected, rtol=1e-5, atol=0)


def test_sequences_of_another_device():
    """For layers of a model that is spread over devices; what they hold goes along."""
    sequences = Sequences.packed(offsets([5, 9])).with_blocks(small())
    moved = sequences.to(torch.device("meta"))
    assert moved.cu_q.device == moved.device == torch.device("meta")
    assert moved.cu_cmp is not None
    assert moved.cu_cmp.device == moved.device
    expected = dataclasses.replace(
        sequences, offsets=moved.offsets, cu_cmp=moved.cu_cmp, device=moved.device
    )
    assert vars(moved) == vars(expected)


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_hooks_of_accelerate(attention):
    """As ``device_map`` adds them to every module; a model with hooks of its users works."""
    hooks = pytest.importorskip("accelerate.hooks")
    model, hooked = tiny(attention=attention), tiny(attention=attention)
    hooked.load_state_dict(model.state_dict())
    for module in hooked.modules():
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook("cpu", io_same_device=True))
    x = tokens(1, 20)
    torch.testing.assert_close(hooked(x).logits, model(x).logits)
    for cached in (False, True):
        texts = [m.generate(x, max_new_tokens=3, use_cache=cached) for m in (model, hooked)]
        assert torch.equal(*texts)


# --------------------------------------------------------------------------------------------------
# configurations and Auto classes


def test_config_round_trip(tmp_path):
    """Every field of the pattern comes back, tuples and nested values too."""
    pattern = small(
        num_selected_blocks_table=((-1, 40, 3),),
        rope_scaling=RopeScaling("linear", 2.0),
        branches=("slc", "cmp"),
    )
    lm = LMConfig(vocab_size=99, nsa=pattern, tie_head=True, attention="dense", mlp="swiglu")
    NSALMConfig.of(lm, eos_token_id=3, max_position_embeddings=77).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.lm == lm
    assert "layers" not in json.loads((tmp_path / "config.json").read_text())
    scaled: Any = {"3-4": {"rope_scaling": RopeScaling("linear", 2.0), "branches": ("slc",)}}
    mixed = dataclasses.replace(lm, layers={**scaled, 0: {"attention": "nsa"}})
    NSALMConfig.of(mixed).save_pretrained(tmp_path / "mixed")
    assert AutoConfig.from_pretrained(tmp_path / "mixed").lm == mixed
    assert (config.eos_token_id, config.max_position_embeddings) == (3, 77)
    assert config.hidden_size == lm.width
    assert config.num_attention_heads == pattern.num_heads
    assert NSALMConfig(hidden_size=32, tie_word_embeddings=True).lm == LMConfig(
        width=32, tie_head=True
    )
    assert NSALMConfig().lm.nsa == NSAConfig()


def test_auto_classes_in_a_new_process(tmp_path):
    """Without ``import nsa.hf``, by the file that lies beside the weights."""
    tiny().save_pretrained(tmp_path / "m")
    program = f"""
import transformers
for kind in ("", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification"):
    auto = getattr(transformers, "AutoModel" + kind)
    model = auto.from_pretrained({str(tmp_path / "m")!r}, trust_remote_code=True)
    print(type(model).__module__, type(model).__name__)
"""
    env = {"HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=120)
    kinds = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification")
    assert done.stdout.splitlines() == [f"nsa.hf.model NSA{kind}" for kind in kinds]


def test_missing_extra():
    program = "import sys\nsys.modules['transformers'] = None\nimport nsa.hf"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stderr.splitlines()[-1].startswith(
        "nsa.errors.UsageError: nsa.hf: not installed: transformers. Install with: pip install"
    )


# --------------------------------------------------------------------------------------------------
# mistakes


def test_weights_that_do_not_fit(tmp_path):
    tiny().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights, name = load_file(file), "model.layers.1.mlp.up_proj.weight"
    changes: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({name: None}, ValueError, rf"the folder must hold {name}, got 1 such weights in "),
        ({"model.bias": torch.ones(1)}, ValueError, "the folder must hold no model.bias, got 1 "),
        ({name: torch.ones(3, 3)}, RuntimeError, "ignore_mismatched_sizes|size mismatch"),
    ]
    for change, error, match in changes:
        changed = {key: x for key, x in {**weights, **change}.items() if x is not None}
        save_file(changed, file, {"format": "pt"})
        with pytest.raises(error, match=match):
            NSAForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"the folder must fit at .*{name}"):
        NSAForCausalLM.from_pretrained(tmp_path, ignore_mismatched_sizes=True)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (
            {"position_ids": torch.arange(1, 6)[None]},
            "position_ids must count from 0, in each row or in each of its documents, got others",
        ),
        ({"position_ids": torch.arange(4)[None]}, r"position_ids must have shape \[1, 5\]"),
        (
            {
                "position_ids": torch.tensor([[0, 1, 0, 1, 2]]),
                "attention_mask": torch.tensor([[0, 1, 1, 1, 1]]),
            },
            "position_ids must be the columns of the tokens, or count the tokens of each row",
        ),
        ({"inputs_embeds": torch.ones(1, 5, 24)}, "input_ids must be given, or inputs_embeds, not"),
        ({"output_attentions": True}, "output_attentions must be left out"),
        ({"use_cache": True}, "use_cache must come with past_key_values, got True. Give past_"),
        ({"past_key_values": ()}, "past_key_values must come from new_cache, got tuple"),
        (
            {"attention_mask": torch.tensor([[0, 1, 1, 1, 1]]), "cu_seq_lens_q": offsets([5])},
            "attention_mask must be without padding with cu_seq_lens_q",
        ),
        ({"attention_mask": torch.tensor([[0, 1]])}, r"must have the shape of input_ids \(1, 5\)"),
    ],
)
def test_refused_arguments(arguments, match):
    with pytest.raises(ValueError, match=match):
        tiny()(tokens(1, 5), **arguments)


def test_refused_changes():
    model = tiny()
    with pytest.raises(ValueError, match=f"the vocabulary must stay at the {VOCAB} tokens"):
        model.resize_token_embeddings(50)
    with pytest.raises(ValueError, match="does not support"):
        NSAForCausalLM._from_config(model.config, attn_implementation="flex_attention")
    with pytest.raises(ValueError, match="offload must be left out"):
        model._set_gradient_checkpointing(gradient_checkpointing_func=print)
