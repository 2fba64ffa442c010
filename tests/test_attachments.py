"""What people attach to attention layers works: training, prefill and decode call each module.

Public threads in which a layer read a weight and did not call the module, and this was found out:
LoRA on a projection that is multiplied elsewhere (vllm-project/vllm#48974, sgl-project/sglang#22268
and #25001), hooks on a projection (pytorch/pytorch#78109, pytorch/executorch#16456), backward hooks
(pytorch/pytorch#139191), quantized weights (bitsandbytes-foundation/bitsandbytes#963,
pytorch/pytorch#32764 and #118165), pruning (pytorch/pytorch#69353), models whose layers are on
several devices by hooks (huggingface/transformers#43019).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.utils import parametrizations, prune

from nsa import NativeSparseAttention, native_sparse_attention
from nsa.lm.decoder import Decoder
from nsa.lm.model import LanguageModel
from nsa.ops._sequences import Sequences
from nsa.ops.projection import project
from tests.lm.test_decoder import make
from tests.ops.cases import small

WIDTH = 32


class Adapter(nn.Module):
    """LoRA (arXiv:2106.09685) by hand: ``linear(x) + x A B``."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.base = linear
        self.a = nn.Parameter(torch.randn(linear.in_features, 3, dtype=linear.weight.dtype) / 6)
        self.b = nn.Parameter(torch.randn(3, linear.out_features, dtype=linear.weight.dtype) / 6)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a @ self.b


class Tagged(Tensor):
    """A weight of another class, which changes its product, as those of torchao do."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = super().__torch_function__(function, types, args, kwargs)
        return found * 2 if function is nn.functional.linear else found


def replaced(layer: nn.Module, name: str, make: Callable[[nn.Linear], nn.Module]) -> None:
    setattr(layer, name, make(getattr(layer, name)))


def with_bias(linear: nn.Linear) -> nn.Module:
    linear.bias = nn.Parameter(torch.randn(linear.out_features, dtype=linear.weight.dtype))
    return linear


def exchanged_forward(linear: nn.Linear) -> nn.Module:
    product = lambda x: nn.functional.linear(x, linear.weight) * 1.5  # noqa: E731
    linear.forward = product  # type: ignore[method-assign]
    return linear


class Int8(nn.Module):
    """Weight-only int8, with one scale per row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.scale = weight.abs().amax(1, keepdim=True) / 127
        self.weight = (weight / self.scale).round().to(torch.int8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)


def tagged(linear: nn.Linear) -> nn.Module:
    linear.weight = nn.Parameter((linear.weight * 2).detach().as_subclass(Tagged))
    return linear


def hooked(register: str, hook: Callable[..., Any]) -> Callable[[nn.Linear], nn.Module]:
    def attach(linear: nn.Linear) -> nn.Module:
        getattr(linear, register)(hook)
        return linear

    return attach


def changed(function: Callable[..., Any], *arguments: Any) -> Callable[[nn.Linear], nn.Module]:
    def attach(linear: nn.Linear) -> nn.Module:
        found = function(linear, *arguments)
        return found if isinstance(found, nn.Module) else linear

    return attach


ATTACHED: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "adapter": Adapter,
    "weight norm": changed(parametrizations.weight_norm),
    "pruned": changed(prune.l1_unstructured, "weight", 0.5),
    "bias": with_bias,
    "forward": exchanged_forward,
    "int8": Int8,
    "tensor subclass": tagged,
    "forward hook": hooked("register_forward_hook", lambda _, __, out: out * 2),
    "forward pre-hook": hooked("register_forward_pre_hook", lambda _, x: (x[0] + 1,)),
    "backward hook": hooked("register_full_backward_hook", lambda _, grads, __: (grads[0] * 3,)),
}


def layer(**changes: Any) -> NativeSparseAttention:
    torch.manual_seed(0)
    module = NativeSparseAttention(WIDTH, small(**changes)).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    return module


def by_hand(module: NativeSparseAttention, x: Tensor) -> Tensor:
    """The layer written plainly: one call of each module, and the public function."""
    products = []
    for projection_name, projection in module.projections.items():
        product = projection(x)
        if module.config.qk_norm and projection_name[0] in "qk":
            norm = module.get_submodule(f"{projection_name}_norm")
            product = norm(product.unflatten(-1, (-1, module.config.head_dim))).flatten(-2)
        products.append(product)
    sequences = Sequences(None, 1, len(x), len(x), x.device)
    given = torch.cat(products, -1), (), None, module._without_gates, sequences, module.rope
    found = project(*given, backend="reference")
    inputs = module.attention_inputs([*found, module.gate(x)], x)
    options: dict[str, Any] = {"q_cmp": inputs.q_cmp, "rope": module.rope, "backend": "reference"}
    options["config"] = module.config
    tensors: list[Any] = list(inputs[:-3])
    return module.o_proj(native_sparse_attention(*tensors, **options).flatten(-2))


def gradients(module: nn.Module, out: Tensor, x: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    (dx,) = torch.autograd.grad(out.sin().sum(), x, retain_graph=True)
    out.sin().sum().backward(inputs=list(module.parameters()))
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {"dx": dx} | {name: grad.clone() for name, grad in grads.items()}


@pytest.mark.parametrize("name", ["q_proj", "k_cmp_proj", "v_win_proj", "o_proj", "gate.net"])
@pytest.mark.parametrize("attached", ATTACHED)
def test_a_module_with_something_attached_is_called(name, attached):
    """Output and gradients equal those of the layer written plainly, and differ from before."""
    if name == "gate.net" and attached in ("adapter", "bias", "int8"):
        pytest.skip("for an nn.Linear without bias")
    module, x = layer(qk_norm=name == "v_win_proj"), torch.randn(70, WIDTH).double()
    x.requires_grad_()
    before = module(x)
    parent, _, last = name.rpartition(".")
    owner = module.get_submodule(parent)
    setattr(owner, last, ATTACHED[attached](getattr(owner, last)))
    out = module(x)
    expected = by_hand(module, x)
    torch.testing.assert_close(out, expected)
    found, wanted = gradients(module, out, x), gradients(module, expected, x)
    assert found.keys() == wanted.keys()
    torch.testing.assert_close(found, wanted)
    keeps = attached in ("weight norm", "backward hook")  # the output, until the next update
    assert torch.allclose(out, before) == keeps


@pytest.mark.parametrize("share_kv", [False, True])
def test_hooks_see_inputs_and_outputs(share_kv):
    """As activation debuggers and torchinfo's summary use them; removed hooks leave nothing."""
    module, x = layer(share_kv=share_kv), torch.randn(2, 40, WIDTH, dtype=torch.float64)
    plain, seen = module(x), dict[str, Tensor]()
    names = [name for name, part in module.named_modules() if name.endswith(("_proj", "gate"))]
    handles = [
        module.get_submodule(name).register_forward_hook(
            lambda _, __, out, name=name: seen.update({name: out})
        )
        for name in names
    ]
    torch.testing.assert_close(module(x), plain)
    assert set(seen) == set(names)
    for handle in handles:
        handle.remove()
    assert torch.equal(module(x), plain)
    with torch.nn.modules.module.register_module_forward_hook(lambda m, _, __: seen.clear()):
        module(x)
    assert not seen


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # PyTorch's own
def test_function_transforms() -> None:
    """Gradients as autograd's, directional derivatives as differences, a batch as its rows."""
    module, x = layer(phi="mlp"), torch.randn(2, 40, WIDTH, dtype=torch.float64)
    given = {name: value.detach() for name, value in module.named_parameters()}

    def loss(parameters, x):
        return functional_call(module, parameters, (x,)).sin().sum()

    found = vmap(grad(loss), in_dims=(None, 0))(given, x)
    for row in range(2):
        wanted = torch.autograd.grad(
            loss(dict(module.named_parameters()), x[row]), [*module.parameters()]
        )
        torch.testing.assert_close([value[row] for value in found.values()], [*wanted])
    along, step = torch.randn_like(x), 1e-6
    slope = jvp(module, (x,), (along,))[1]
    difference = (module(x + step * along) - module(x - step * along)) / (2 * step)
    torch.testing.assert_close(slope, difference, rtol=1e-5, atol=1e-6)


def test_attached_modules_compile():
    """Before and after: the plain layer's code is not used for the changed one."""
    module = layer(branches=("win",))
    x = torch.randn(40, WIDTH, dtype=torch.float64)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), module(x))
    replaced(module, "q_proj", ATTACHED["forward hook"])
    torch.testing.assert_close(compiled(x), by_hand(module, x))


# Each part of a model to which an adapter for all linear layers goes.
PARTS = (
    "layers.0.attention.q_proj",
    "layers.1.attention.o_proj",
    "layers.0.mlp.up_proj",
    "layers.1.mlp.down_proj",
    "head",
)


def check_decoder(model: LanguageModel, decoder: Decoder) -> None:
    """Logits of prompts of unequal length and of steps equal those without a cache."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 40, (n + 6,), generator=generator) for n in (70, 9)]
    decoder.reset()
    logits = decoder.prefill([row[:-6].tolist() for row in rows])
    with torch.no_grad():
        whole = [model(row) for row in rows]
    for b, expected in enumerate(whole):
        torch.testing.assert_close(logits[b], expected[-7])
    for start, stop in ((-6, -5), (-5, -2), (-2, None)):
        logits = decoder.step(torch.stack([row[start:stop] for row in rows]))
        for b, expected in enumerate(whole):
            torch.testing.assert_close(logits[b], expected[start:stop])


@pytest.mark.parametrize("attached", ["adapter", "forward hook", "pruned"])
def test_decoding_calls_attached_modules(attached):
    """A decoder that has used the plain parts calls a changed one."""
    model = make()
    decoder = Decoder(model, 2, max_tokens=80)
    check_decoder(model, decoder)
    for name in (*PARTS, "embedding", "norm", "layers.0.mlp_norm"):
        parent, _, last = name.rpartition(".")
        owner = model.get_submodule(parent)
        part = getattr(owner, last)
        if attached == "adapter" and not isinstance(part, nn.Linear):
            other: nn.Module = nn.Sequential(part, nn.Linear(24, 24).double())
            other.weight = part.weight
        else:
            other = ATTACHED[attached](copy.deepcopy(part))
        setattr(owner, last, other)
        check_decoder(model, decoder)
        setattr(owner, last, part)
