"""nsa.NativeSparseAttention: parameters, forward against the oracle, gradients."""

from __future__ import annotations

import copy
import logging
import pickle
from shutil import which
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nsa import NativeSparseAttention, NSACache, NSAConfig, RopeScaling, selected_attention
from nsa.config import BRANCHES
from tests import oracle
from tests.ops.cases import SUBSETS, array, grad, make_batch, near, offsets, small, stack

WIDTH = 48
# Branches, and the scores of their blocks.
SCORED = [(branches, "compressed") for branches in SUBSETS]
SCORED += [(b, s) for b in SUBSETS if "slc" in b for s in ("token_max", "index")]
PHIS = ("mean", "linear", "mlp")


def layer(
    config: NSAConfig, seed: int = 0, dtype: torch.dtype = torch.float64
) -> NativeSparseAttention:
    """A layer whose parameters are all random and large enough to matter."""
    torch.manual_seed(seed)
    module = NativeSparseAttention(WIDTH, config).to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=parameter[0].numel() ** -0.5)
    return module


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((*shape, WIDTH)))


def expected(module: NativeSparseAttention, x: Tensor, lengths: tuple[int, ...]) -> np.ndarray:
    weights = {name: array(value) for name, value in module.state_dict().items()}
    batch = make_batch(module.config, lengths)
    return stack(
        batch, lambda rows, _, __: (oracle.layer(weights, array(x)[rows], module.config),)
    )[0]


def matches(config: NSAConfig, lengths: tuple[int, ...] = (90, 7, 0)) -> None:
    module, x = layer(config), tokens(sum(lengths))
    near(module(x, cu_seqlens=offsets(lengths)), expected(module, x, lengths))


# ------------------------------------------------------------------------------
# forward


@pytest.mark.parametrize("lengths", [(257,), (130, 0, 1, 140, 8), (0, 1, 7, 8, 9, 15, 16, 17)])
def test_matches_the_oracle(lengths):
    matches(small(), lengths)


CONFIGS: list[dict[str, Any]] = [
    {"phi": "mean", "compress_rope": "start"},
    {"phi": "linear", "compress_rope": "none"},
    {"phi": "mlp", "compress_rope": "middle"},
    {"gate": "sigmoid", "gate_hidden_size": 11},
    {"gate": "fixed"},
    {"gate": "softmax", "gate_temperature": 0.25},
    {"gate": "softmax", "gate_temperature": 3.0, "gate_hidden_size": 11},
    *(
        {"branches": branches, "share_kv": i % 2 == 0, "phi": "linear", "gate": "softmax"}
        for i, branches in enumerate(SUBSETS)
    ),
    {"num_heads": 3, "num_kv_heads": 3},
    {"num_heads": 6, "num_kv_heads": 1},
    {"rotary_dim": 8, "rope_theta": 10_000.0},
    {"head_dim": 32, "value_dim": 16},
    {"compress_block_size": 16, "compress_stride": 8, "block_size": 32, "num_selected_blocks": 3},
    {"phi": "mlp", "compress_hidden_size": 5},
    {"rope_scaling": RopeScaling("yarn", 4.0, 64)},
    {"qk_norm": True, "compress_rope": "none", "phi": "mlp"},
    {"scores": "token_max", "compress_rope": "none", "qk_norm": True},
    {"scores": "token_max", "score_precision": "fp8", "share_kv": True},
    {"scores": "token_max", "branches": ("slc", "win"), "compress_rope": "none"},
    {"scores": "token_max", "branches": ("slc",), "share_kv": True},
    {"scores": "index", "index_dim": 48, "index_heads": 3, "qk_norm": True},
    {"scores": "index", "index_dim": 32, "index_rotary_dim": 8, "index_keys": "shared"},
    {"scores": "index", "index_dim": 16, "rotary_dim": 8, "score_precision": "fp8"},
    {"qk_norm": True, "share_kv": True, "rotary_dim": 8, "gate_hidden_size": 11},
]


@pytest.mark.parametrize("changes", CONFIGS, ids=str)
def test_other_configs(changes):
    matches(small(**changes))


@pytest.mark.parametrize("shape", [(257,), (2, 140)], ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {"compress_rope": "none"},
        *(
            {"scores": "token_max", "branches": branches, "share_kv": share_kv}
            for branches, share_kv in ((BRANCHES, False), (("slc", "win"), True))
        ),
        {"scores": "index"},
    ],
    ids=str,
)
def test_the_blocks_of_the_forward(changes, shape):
    module, x, seen = layer(small(**changes)), tokens(*shape), list[Tensor]()
    module.observer = lambda _, blocks: None if blocks is None else seen.append(blocks)
    module(x)
    found = module.choose_blocks(x)
    assert torch.equal(found, seen[0])
    assert not torch.equal(found[:, 0], found[:, 1])


@pytest.mark.parametrize("shape", [(140,), (3, 130), (2, 7), (1, 1), (4, 0)])
def test_without_offsets(shape):
    """One sequence, or a dense batch."""
    module, x = layer(small()), tokens(*shape)
    out = module(x)
    assert out.shape == x.shape
    lengths = (shape[-1],) * (x.numel() // WIDTH // max(shape[-1], 1))
    near(out.flatten(0, -2), expected(module, x.flatten(0, -2), lengths or (0,)))


class NoLists(TorchDispatchMode):
    """Refuses tensors made from Python's numbers: a GPU waits for them, no graph captures them."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten.lift_fresh.default, "a tensor is made from a list"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(70,), (2, 35), (0, 35)], ids=str)
def test_offsets_are_made_on_the_device(shape):
    module, x = layer(small()), tokens(*shape).requires_grad_()
    with NoLists():
        torch.autograd.grad(module(x).sum(), [x, *module.parameters()])
    with NoLists(), pytest.raises(AssertionError, match="from a list"):
        torch.tensor([0, 70])


# ------------------------------------------------------------------------------
# parameters


def shapes(config: NSAConfig) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(p.shape) for name, p in NativeSparseAttention(WIDTH, config).named_parameters()
    }


def test_parameters_of_the_default_form():
    """Each branch has its own K and V projection; no biases; phi mean has no parameters."""
    assert shapes(small()) == {
        "q_proj.weight": (64, 48),
        "k_cmp_proj.weight": (32, 48),
        "v_cmp_proj.weight": (64, 48),
        "k_slc_proj.weight": (32, 48),
        "v_slc_proj.weight": (64, 48),
        "k_win_proj.weight": (32, 48),
        "v_win_proj.weight": (64, 48),
        "gate.net.weight": (12, 48),
        "gate.net.bias": (12,),
        "o_proj.weight": (48, 128),
    }


@pytest.mark.parametrize(("branches", "scores"), SCORED)
def test_branch_that_is_off_has_no_parameters(branches, scores):
    found = shapes(small(branches=branches, scores=scores, phi="mlp"))
    shared = shapes(small(branches=branches, scores=scores, share_kv=True))
    index = {"q_idx", "k_idx"} if scores == "index" else set()
    names = {*"qkvo"} | index
    assert {name for name in shared if "proj" in name} == {f"{n}_proj.weight" for n in names}
    projections = {
        name.removesuffix("_proj.weight") for name in found if name.endswith("_proj.weight")
    } - {"q", "o"}
    wanted = {f"{kind}_{branch}" for kind in "kv" for branch in branches}
    scoring = "slc" in branches and "cmp" not in branches and scores == "compressed"
    assert projections == wanted | index | ({"k_cmp"} if scoring else set())
    assert {name.split(".")[0] for name in found if name.startswith("phi")} == (
        {"phi_k", "phi_v"} if "cmp" in branches else {"phi_k"} if scoring else set()
    )
    assert found["gate.net.weight"] == (4 * len(branches), 48)


@pytest.mark.parametrize("phi", ["linear", "mlp"])
def test_every_phi_starts_as_the_mean(phi):
    torch.manual_seed(0)
    mean = NativeSparseAttention(WIDTH, small()).double()
    other = NativeSparseAttention(WIDTH, small(phi=phi)).double()
    other.load_state_dict(mean.state_dict(), strict=False)
    x = tokens(140)
    near(other(x), array(mean(x)), 1e-6 if phi == "linear" else 1e-12)


@pytest.mark.parametrize(("bias", "middle"), [(2.0, 0.8808), (-1.0, 0.2689)])
@pytest.mark.parametrize("hidden", [0, 5])
def test_gates_that_start_open_or_closed(bias, middle, hidden):
    torch.manual_seed(0)
    module = NativeSparseAttention(WIDTH, small(gate_bias=bias, gate_hidden_size=hidden))

    def initialize(part):  # as nanoGPT does
        if isinstance(part, torch.nn.Linear):
            torch.nn.init.normal_(part.weight, std=0.02)
            if part.bias is not None:
                torch.nn.init.zeros_(part.bias)

    def reset(part):
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()

    for loop in (lambda part: None, initialize, reset):
        gates = module.apply(loop).gate(tokens(100).float()).detach()
        assert abs(float(gates.mean()) - middle) < 0.02


# ------------------------------------------------------------------------------
# gradients


# Forms of phi and of the keys in turn.
FORMS = [(*one, i % 2 == 1, PHIS[i % 3]) for i, one in enumerate(SCORED)]


@pytest.mark.parametrize(("branches", "scores", "share_kv", "phi"), FORMS)
def test_every_parameter_learns(branches, scores, share_kv, phi):
    """All parameters get a gradient, except those that only the selection depends on.

    Of these the compressed ones are frozen, and those of an index get a gradient of zero.
    """
    options = {"share_kv": share_kv, "phi": phi, "gate_hidden_size": 3}
    module = layer(small(branches=branches, scores=scores, **options))
    module(tokens(90)).square().sum().backward()
    scoring = "slc" in branches and "cmp" not in branches and scores == "compressed"
    for name, parameter in module.named_parameters():
        frozen = scoring and (name.startswith("phi_k") or name == "k_cmp_proj.weight")
        assert parameter.requires_grad != frozen, name
        if not frozen:
            assert bool(grad(parameter).isfinite().all()), name
            assert bool(grad(parameter).any()) != ("idx" in name), name


@pytest.mark.parametrize(("branches", "scores", "share_kv", "phi"), FORMS)
def test_no_gradient_is_missing_when_nothing_is_compressed(branches, scores, share_kv, phi):
    """All sequences are shorter than l: zero for what only the compressed branch uses, not None."""
    module = layer(small(branches=branches, scores=scores, phi=phi, share_kv=share_kv))
    module(tokens(8), cu_seqlens=offsets((7, 0, 1))).square().sum().backward()
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        assert bool(grad(parameter).isfinite().all()), name
        if name.startswith("phi") or "cmp" in name:
            assert not bool(grad(parameter).any()), name


@pytest.mark.parametrize("phi", ["linear", "mlp"])
@pytest.mark.parametrize("where", ["middle", "none"])
def test_gradcheck(phi, where):
    sizes = {"num_heads": 2, "num_kv_heads": 1, "compress_hidden_size": 2, "gate_hidden_size": 2}
    module = layer(small(**sizes, value_dim=16, phi=phi, compress_rope=where))
    names = [name for name, _ in module.named_parameters()]
    x = tokens(90)

    def run(x, *parameters):
        given = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(module, given, (x,), {"cu_seqlens": offsets((85, 5))})

    leaves = [
        x.requires_grad_(),
        *(p.detach().clone().requires_grad_() for p in module.parameters()),
    ]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("share_kv", [False, True])
def test_the_log_says_what_is_frozen(caplog, share_kv):
    with caplog.at_level(logging.INFO, logger="nsa"):
        NativeSparseAttention(
            WIDTH, small(branches=("slc", "win"), phi="linear", share_kv=share_kv)
        )
    assert "frozen" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="nsa"):
        NativeSparseAttention(WIDTH, small())
        NativeSparseAttention(WIDTH, small(branches=("slc",), scores="token_max"))
    assert "frozen" not in caplog.text


# ------------------------------------------------------------------------------
# mistakes


@pytest.mark.parametrize("width", [0, -3])
def test_bad_width(width):
    with pytest.raises(ValueError, match=rf"^width must .*, got {width}\.$"):
        NativeSparseAttention(width, small())


# --- weights that the layer reads itself ---------------------------------------------------------
@pytest.mark.parametrize(
    ("argument", "value", "rule"),
    [
        ("x", np.zeros((5, WIDTH)), "be a tensor, got ndarray"),
        ("cu_seqlens", [0, 5], "be a tensor or None, got list"),
        ("attention_mask", [[1] * 5], "be a tensor or None, got list"),
        ("sequences", "packed", "be nsa.Sequences or None, got str"),
        (
            "cache",
            NSACache(small(), num_layers=1, max_tokens=9),
            r"be a layer's cache, such as NSACache\(...\).layers\[0\], or None, got NSACache",
        ),
    ],
    ids=["x", "cu_seqlens", "attention_mask", "sequences", "cache"],
)
def test_arguments_of_another_type(argument, value, rule):
    arguments = {"x": tokens(5), argument: value}
    with pytest.raises(ValueError, match=f"{argument} must {rule}"):
        layer(small())(arguments.pop("x"), **arguments)


@pytest.mark.skipif(not (which("g++") or which("clang++")), reason="needs a C++ compiler")
def test_compiled_by_inductor_on_a_cpu():
    """The mask of selected blocks, of which Inductor once left out the last tokens; gradients, too.

    70 tokens are no multiple of a vector or a block.
    """
    config = small(num_heads=2, num_kv_heads=1, value_dim=16, block_size=32)
    q, k, v = (tokens(1, 70, n)[..., i : i + 16].requires_grad_() for i, n in enumerate((2, 1, 1)))
    ids = torch.arange(4, dtype=torch.int32).expand(1, 70, 1, 4).contiguous()
    torch.compiler.reset()
    results = []
    for run in (selected_attention, torch.compile(selected_attention)):
        out = run(q, k, v, ids, config)[0]
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))])
    torch.compiler.reset()
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


@pytest.mark.parametrize("how", ["copied", "pickled", "assigned", "loaded", "converted", "shared"])
def test_the_product_uses_the_current_weights(how):
    module, other = (layer(small(), seed, torch.float32) for seed in (0, 1))
    state = {name: x.clone() for name, x in module.state_dict().items()}
    if how == "copied":
        other = copy.deepcopy(module)
    elif how == "pickled":
        other = pickle.loads(pickle.dumps(module))
    elif how == "converted":
        other = copy.deepcopy(module).double().float()
    elif how == "shared":
        other = copy.deepcopy(module).share_memory()
    else:
        other.load_state_dict(state, assign=how == "assigned")
    x = tokens(30).float()
    torch.testing.assert_close(other(x), module(x))
    other(x).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    module.load_state_dict(other.state_dict())
    torch.testing.assert_close(other(x), module(x))
