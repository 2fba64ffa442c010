"""Muon's update by kernels, compared with the algorithm in fp64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from nsa.ops import muon
from nsa.ops._backend import as_on_gpu
from nsa.train.distributed.processes import own_part
from nsa.train.optim import Muon
from tests.train.cases import all_equal

LR, DECAY = 0.5, 0.1


@pytest.fixture(autouse=True, params=["one part", "parts"])
def _sizes(request, monkeypatch):
    """Matrices of one part, or of several parts of several steps in launches of two matrices."""
    if request.param == "parts":
        for name, size in {"BLOCK": 64, "MAX_PARTS": 4, "MATRICES": 2}.items():
            monkeypatch.setattr(muon, name, size)
        monkeypatch.setitem(muon.OPTIONS, "BLOCK", 64)


def matrices(*shapes: tuple[int, int]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_gradients(parameters: list[nn.Parameter], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    gradients = [1e-3 * torch.randn(x.shape, generator=generator) for x in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return gradients


def fp64_steps(weight: Tensor, gradients: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Weight and momentum after steps, from the definition of Muon."""
    weight, momentum = weight.detach().double(), torch.zeros_like(weight).double()
    for gradient in gradients:
        momentum = 0.95 * momentum + 0.05 * gradient
        x = 0.95 * momentum + 0.05 * gradient
        x = x / x.norm()
        for _ in range(5):
            square = x @ x.T
            x = 3.4445 * x - 4.775 * square @ x + 2.0315 * square @ square @ x
        rate = LR * math.sqrt(max(1, weight.shape[0] / weight.shape[1]))
        weight = weight * (1 - LR * DECAY) - rate * x
    return weight, momentum


def test_steps_are_those_of_muon_in_fp64():
    """Relative errors: 1e-6 of momenta, 1e-5 of weights, whose products are in fp32 here."""
    parameters = matrices((24, 12), (24, 12), (12, 40), (24, 12), (12, 40), (9, 7))
    optimizer, started = Muon(parameters, LR, DECAY), [x.detach().clone() for x in parameters]
    gradients = []
    for seed in range(3):
        gradients.append(set_gradients(parameters, seed))
        with as_on_gpu():
            optimizer.step(torch.zeros(()))
    for i, parameter in enumerate(parameters):
        weight, momentum = fp64_steps(started[i], [some[i] for some in gradients])
        found = optimizer.state[parameter]["momentum_buffer"]
        assert (found - momentum).norm() < 1e-6 * momentum.norm()
        assert (parameter - weight).norm() < 1e-5 * weight.norm()


def test_a_cancelled_update_keeps_every_bit():
    parameters = matrices((24, 12), (12, 40), (24, 12))
    optimizer = Muon(parameters, LR, DECAY)
    for cancel in (1.0, 0.0, 1.0):
        first, second, _ = set_gradients(parameters, 0)
        momenta = [optimizer.state[x]["momentum_buffer"] for x in parameters]
        before = [x.detach().clone() for x in (*parameters, *momenta)]
        if cancel:
            first[0, 0], second[2, 3] = math.nan, math.inf
        with as_on_gpu():
            optimizer.step(torch.tensor(cancel))
        assert all_equal(before, (*parameters, *momenta)) == bool(cancel)


def test_a_matrix_of_zeros_stays():
    (parameter,) = matrices((24, 12))
    before, parameter.grad = parameter.detach().clone(), torch.zeros(24, 12)
    with as_on_gpu():
        Muon([parameter], LR, 0.0).step(torch.zeros(()))
    assert torch.equal(parameter, before)


def test_shards_are_updated_by_their_rows_of_the_update():
    """A process may have the last rows, or none."""
    for begin, end in ((0, 24), (15, 24), (24, 24)):
        weights = [x.detach()[begin:end].clone() for x in matrices(*[(24, 12)] * 3)]
        updates = torch.stack([x.detach() for x in matrices(*[(24, 12)] * 3)]) ** 2
        wanted = [w * 0.95 - LR * 2 * u[begin:end] for w, u in zip(weights, updates, strict=True)]
        lr = torch.tensor(LR, dtype=torch.float64)
        with as_on_gpu():
            some = updates[:, begin:end]
            muon.update_weights(weights, some, lr, DECAY, 2.0, torch.zeros(()))
            muon.update_momenta(weights, weights, torch.ones(()), torch.float32)
        torch.testing.assert_close(weights, wanted, atol=1e-6, rtol=1e-6)


def test_sharded_matrices_become_those_of_one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    whole, mesh = matrices((24, 12), (24, 12), (12, 40)), init_device_mesh("cpu", (1,))

    def shard(x: Tensor) -> Tensor:
        return distribute_tensor(x.detach().clone(), mesh, [Shard(0)])

    sharded = [nn.Parameter(shard(x)) for x in whole]
    optimizers = [Muon(some, LR, DECAY) for some in (whole, sharded)]
    for seed in range(2):
        for x, gradient in zip(sharded, set_gradients(whole, seed), strict=True):
            x.grad = shard(gradient)
        for optimizer in optimizers:
            with as_on_gpu():
                optimizer.step(torch.zeros(()))
    dist.destroy_process_group()
    found = [own_part(x.detach()) for x in sharded]
    torch.testing.assert_close(found, [x.detach() for x in whole], atol=2e-5, rtol=1e-5)
