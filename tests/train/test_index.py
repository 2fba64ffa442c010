"""Training of an index: where its gradient goes, its phases, settings and metrics."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from nsa import NativeSparseAttention, Sequences, index_loss
from nsa.lm.model import LanguageModel
from nsa.ops.index_loss import IndexLoss
from nsa.train.config import CheckpointingConfig, TrainConfig
from nsa.train.loss import NextTokenLoss
from nsa.train.state import Window
from tests.ops.cases import offsets, small
from tests.train.cases import (
    PATTERN,
    make_trainer,
    new_trainer,
    reproducible_rows,
    resumed,
    rows_of,
    tiny_config,
)
from tests.train.test_resume import signal_in_step

# Three of seven blocks are forced; the loss ranks the others.
INDEX: dict[str, Any] = {
    **{"scores": "index", "index_dim": 16, "num_selected_blocks": 7},
    "branches": ("slc", "win"),
}
NAMES = {"q_idx_proj.weight", "k_idx_proj.weight"}


def settings(**optim: Any) -> dict[str, Any]:
    """A run of a model with an index, with other settings of the optimizer."""
    model = {"nsa": dataclasses.replace(PATTERN, **INDEX), "num_layers": 2}
    return {"model": model, "optim": optim, "log_every": 1, "seq_len": 256, "micro_batch": 1}


@pytest.mark.parametrize("ranked", ["selected", "all"])
@pytest.mark.parametrize("changes", [{}, {"qk_norm": True}, {"index_keys": "shared"}], ids=str)
@pytest.mark.parametrize("attached", [False, True])
def test_its_gradient_reaches_the_index_alone(ranked, changes, attached):
    torch.manual_seed(0)
    config = small(**INDEX, **changes)
    layer, cu = NativeSparseAttention(24, config).double(), offsets((170, 3, 150))
    if attached:
        layer.q_proj.register_forward_hook(lambda *_: None)
    x = torch.randn(323, 24, dtype=torch.float64, requires_grad=True)
    out, loss = layer(x, cu_seqlens=cu, index_loss=ranked)
    assert torch.equal(out, layer(x, cu_seqlens=cu))
    blocks = layer.choose_blocks(x, cu_seqlens=cu) if ranked == "selected" else None
    found = layer.attention_inputs(layer._project(x, Sequences.packed(cu)), x)
    given: Any = (found.q_idx, found.k_idx, found.q, found.k_slc, blocks, config)
    assert torch.equal(loss.total, index_loss(*given, cu_seqlens_q=cu).total)
    assert loss.num_terms > 0
    loss.total.backward()
    reached = {name for name, p in layer.named_parameters() if p.grad is not None and p.grad.any()}
    norms = {name.replace("proj", "norm") for name in NAMES if config.qk_norm}
    assert reached == NAMES | norms
    assert x.grad is None or not x.grad.any()


def test_of_a_layer_without_an_index(tmp_path):
    layer, x = NativeSparseAttention(24, small()), torch.randn(5, 24)
    with pytest.raises(ValueError, match="index_loss must be None without scores index, or with"):
        layer(x, index_loss="all")
    layer = NativeSparseAttention(24, small(**INDEX))
    with pytest.raises(
        ValueError, match=r"index_loss must be one of \('selected', 'all'\), got '?s"
    ):
        layer(x, index_loss="some")
    for changes in ({"index_weight": 0.5}, {"index_lr": 1e-3}, {"trained": "index"}):
        with pytest.raises(ValueError, match="no layer with scores index"):
            tiny_config(tmp_path, optim=changes)


def test_phases(tmp_path):
    config = tiny_config(tmp_path, **settings(index_warmup_steps=3))
    assert [config.ranked(step) for step in (0, 2, 3, 9)] == ["all", "all", "selected", "selected"]
    assert tiny_config(tmp_path, **settings(index_weight=0)).ranked(0) is None
    assert tiny_config(tmp_path).ranked(0) is None


def test_training_teaches_the_index(tmp_path):
    """The loss falls if attention is far from even; without it the first step computes the same."""
    rows = {}
    for weight in (1.0, 0.0):
        name = f"weight-{weight:g}"
        changes = settings(index_weight=weight, index_lr=0.03, lr=1e-5)
        steps = 25 if weight else 1
        trainer = new_trainer(tmp_path, name, steps=steps, eval_every=0, **changes)
        for layer in trainer.model.decoder_layers():
            for key in ("q_proj.weight", "k_slc_proj.weight"):
                layer.attention.get_parameter(key).data.mul_(20)
        trainer.run()
        rows[weight] = rows_of(tmp_path, name)
    losses = [row["index_loss_nats"] for row in rows[1.0]]
    assert losses[0] > 0.1
    assert losses[-1] < 0.93 * losses[0]
    layers = [rows[1.0][0][f"index_loss_nats_layer_{layer}"] for layer in range(2)]
    assert sum(layers) / 2 == pytest.approx(losses[0])
    assert not any("index" in key for row in rows[0.0] for key in row)
    *others, last = rows[1.0]  # the last row has an evaluation
    assert not any("selected_recall" in row for row in others)
    recalls = [last[f"selected_recall_layer_{layer}"] for layer in range(2)]
    assert all(0.3 < recall < 1 for recall in recalls)
    assert last["selected_recall"] == sum(recalls) / 2
    assert all(layer.attention.observer is None for layer in trainer.model.decoder_layers())
    assert rows[0.0][0]["loss_nats"] == rows[1.0][0]["loss_nats"]


def gradients(config: TrainConfig, path: Any) -> dict[str, torch.Tensor]:
    """Gradients of the first step by parameter."""
    trainer, found = make_trainer(config, path), dict[str, torch.Tensor]()
    update = trainer._update

    def kept(loss: Any, grads: Any) -> Any:
        found.update(zip(trainer.state.optimizer.named, (g.clone() for g in grads), strict=True))
        return update(loss, grads)

    trainer._update = kept  # type: ignore[method-assign, assignment]
    trainer.train_step(trainer.next_batches())
    return found


def test_gradient_of_a_step(tmp_path):
    """Mean over the tokens times the weight; equal under recomputation, absent elsewhere."""
    config = tiny_config(tmp_path, **settings(index_weight=0.5))
    found = gradients(config, tmp_path / "run")
    recomputed = dataclasses.replace(config, checkpointing=CheckpointingConfig("full"))
    again = gradients(recomputed, tmp_path / "again")
    optim = dataclasses.replace(config.optim, index_weight=1.0)
    twice = gradients(dataclasses.replace(config, optim=optim), tmp_path / "twice")
    trainer = new_trainer(tmp_path, "by-hand", **settings(index_weight=0.5))
    tokens = 0
    batches = trainer.next_batches()
    for batch in batches:
        tokens += batch.num_targets
        losses: list[Any] = []
        given = (batch.tokens, batch.cu_seqlens, batch.max_seqlen)
        trainer.model.hidden_states(*given, ranked="selected", losses=losses)
        sum(loss.total for loss in losses).backward()
    heads = config.model.nsa.num_kv_heads
    for name, parameter in trainer.model.named_parameters():
        is_index = name.partition("attention.")[2] in NAMES
        assert torch.equal(found[name], again[name])
        if is_index:
            assert parameter.grad is not None
            torch.testing.assert_close(found[name], 0.5 * parameter.grad / heads / tokens)
            torch.testing.assert_close(2 * found[name], twice[name])
        else:
            assert parameter.grad is None or not parameter.grad.any()
            assert torch.equal(found[name], twice[name])


def test_the_base_is_frozen(tmp_path):
    """The index gets the gradient that it has if all is trained, and nothing else gets memory."""
    config = tiny_config(tmp_path, **settings(weight_decay=0.5))
    wanted = gradients(config, tmp_path / "all")
    frozen = dataclasses.replace(config.optim, trained="index")
    found = gradients(dataclasses.replace(config, optim=frozen), tmp_path / "index")
    assert {name.partition("attention.")[2] for name in found} == NAMES
    assert len(found) == 2 * len(NAMES)
    assert all(torch.equal(x, wanted[name]) for name, x in found.items())
    trainer = new_trainer(tmp_path, "run", **settings(weight_decay=0.5, trained="index"))
    parameters = dict(trainer.model.named_parameters())
    before = {name: p.detach().clone() for name, p in parameters.items()}
    trainer.train_step(trainer.next_batches())
    changed = {name for name, p in parameters.items() if not torch.equal(p, before[name])}
    assert changed == found.keys()
    assert len(trainer.state.optimizer.adamw.state) == len(found)
    batch = trainer.next_batches()[0]
    losses: list[Any] = []
    hidden = trainer.model.hidden_states(
        batch.tokens, batch.cu_seqlens, ranked="selected", losses=losses
    )
    assert not hidden.requires_grad
    assert all(loss.total.requires_grad for loss in losses)
    x = torch.randn(64, 32, requires_grad=True)  # of a trained part before the layer
    out, _ = trainer.model.decoder_layers()[0].attention(x, index_loss="selected")
    assert torch.autograd.grad(out.sum(), x)[0].any()
    with pytest.raises(ValueError, match="index_weight must be positive with trained index, got 0"):
        tiny_config(tmp_path, **settings(trained="index", index_weight=0.0))


def test_a_run_resumes_exactly_around_the_end_of_the_warm_up(tmp_path, caplog):
    caplog.set_level("INFO", logger="nsa")
    changes = settings(index_warmup_steps=5, index_lr=1e-3)
    changes |= {"checkpoint_every": 0, "steps": 8}
    new_trainer(tmp_path, "whole", **changes).run()
    assert caplog.text.count("the loss of the index ranks selected blocks from here on") == 1
    whole = reproducible_rows(tmp_path / "whole")
    for step in (5, 6):
        name = f"run-{step}"
        trainer = new_trainer(tmp_path, name, **changes)
        signal_in_step(trainer, step)
        trainer.run()
        assert resumed(tmp_path, name, **changes).run().finished
        assert reproducible_rows(tmp_path / name) == whole


def test_its_own_learning_rate(tmp_path):
    trainer = new_trainer(tmp_path, **settings(index_lr=0.25, name="muon", warmup_steps=0))
    groups = trainer.state.optimizer.adamw.param_groups
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    for name, parameter in trainer.model.named_parameters():
        is_index = name.partition("attention.")[2] in NAMES
        assert (rates.get(id(parameter)) == 0.25) == is_index
    trainer = new_trainer(tmp_path, "muon", **settings(name="muon"))
    assert trainer.state.optimizer.muon is not None
    muon = {id(p) for p in trainer.state.optimizer.muon.param_groups[0]["params"]}
    names = {n for n, p in trainer.model.named_parameters() if id(p) in muon}
    assert {name.partition("attention.")[2] for name in names} >= NAMES


def test_layers_with_other_heads(tmp_path):
    """Losses are the means over the heads of their layer, under its number."""
    config = tiny_config(tmp_path, **settings())
    layers: Any = {"0": {"attention": "dense"}, "1": {"num_heads": 4, "num_kv_heads": 2}}
    model = dataclasses.replace(config.model, layers=layers)
    assert model.index_layers == {1: 2}
    torch.manual_seed(0)
    loss = NextTokenLoss(LanguageModel(model)).double()
    loss.ranked = "selected"
    x, losses = torch.randint(model.vocab_size, (257,)), list[IndexLoss]()
    found = loss(x[:-1], x[1:], None, None)
    loss.model.hidden_states(x[:-1], None, None, ranked="selected", losses=losses)
    assert found.tolist()[1:] == [losses[0].total.item() / 2]
    row = Window(index=[3.0], targets=2).index_row(model.index_layers)
    assert row == {"index_loss_nats": 1.5, "index_loss_nats_layer_1": 1.5}
