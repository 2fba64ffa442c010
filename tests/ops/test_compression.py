"""nsa.compress and nsa.compressed_positions against the NumPy oracle."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from nsa import NSAConfig, PhiWeights, compress, compressed_positions
from tests import oracle
from tests.ops.cases import BATCHES, SHORT, array, make_batch, near, offsets, small
from tests.ops.whole import phi_parameters

PHIS = ("mean", "linear", "mlp")


def check(config: NSAConfig, lengths: Sequence[int], packed: bool = True) -> None:
    batch = make_batch(config, lengths)
    l, d = config.compress_block_size, config.compress_stride
    for x in (batch.k(), batch.v()):
        parameters = phi_parameters(batch, x.shape[-1])
        weights = PhiWeights(**parameters) if parameters else None
        y, cu = compress(x, weights, config, offsets(lengths) if packed else None)
        assert tuple(y.shape) == (x.shape[0] // d, *x.shape[1:])
        assert cu.dtype == torch.int32
        assert cu.tolist() == [0, *np.cumsum(batch.num_cmp)]
        given = {name: array(w) for name, w in parameters.items()}
        wanted = np.concatenate(
            [
                oracle.compress(array(x)[part], l, d, config.phi, given)
                for _, part, _ in batch.slices
            ]
        )
        near(y[: int(cu[-1])], wanted)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("phi", PHIS)
def test_matches_the_oracle(phi, name):
    check(small(phi=phi), BATCHES[name][0])


@pytest.mark.parametrize("phi", PHIS)
@pytest.mark.parametrize(
    ("l", "d", "l_sel"),
    [(32, 16, 64), (16, 16, 16), (16, 4, 32), (8, 8, 16), (4, 4, 16), (24, 8, 32)],
)
def test_other_block_sizes(phi, l, d, l_sel):
    config = small(phi=phi, compress_block_size=l, compress_stride=d, block_size=l_sel)
    check(config, (3 * l + d - 1, l - 1, l, l + d, 2 * d - 1))


@pytest.mark.parametrize("phi", PHIS)
def test_every_short_length_alone(phi):
    for length in SHORT:
        check(small(phi=phi, compress_hidden_size=5), (length,), packed=False)


@pytest.mark.parametrize("where", ["middle", "start"])
@pytest.mark.parametrize(("l", "d"), [(8, 4), (16, 4), (4, 4), (12, 4), (16, 16)])
def test_positions(where, l, d):
    config = small(compress_rope=where, compress_block_size=l, compress_stride=d)
    lengths = (130, 0, l, 257, l - 1)
    counts = [oracle.num_compressed(n, l, d) for n in lengths]
    expected = [
        oracle.compressed_position(i, l, d, where) for count in counts for i in range(count)
    ]
    actual = compressed_positions(config, offsets(lengths), sum(lengths) // d)
    assert actual.dtype == torch.int64
    assert actual.shape == (sum(lengths) // d,)
    assert actual[: len(expected)].tolist() == expected
