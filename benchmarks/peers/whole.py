"""Whole attention with one K and V for all branches and without RoPE, as most packages compute it.

Each package selects blocks itself. Its block indices are checked, compared with the fp64 selection
(``recall``) and passed to the fp64 oracle, which its output and gradients must match.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.peers.adapters import Peer
from nsa.bench.cases import CASES, Point, Problem, Tensors
from nsa.bench.gate import Gate
from nsa.ops.compression import compress
from nsa.testing.sampled import Values, assert_legal

SHARED = replace(CASES["attention"], inputs=("q", "k", "v", "gates"))
_BRANCHES = ("cmp_raw", "slc", "win")
# Gates are clamped, so that a package that takes logits gets finite ones.
_GATES = 1 / 64, 63 / 64


def shared_problem(base: Tensors, point: Point) -> Problem:
    """Make the inputs: those of whole attention with k_slc and v_slc in every branch."""
    point = replace(point, config=replace(point.config, compress_rope="none"))
    tensors = {name: base[name] for name in ("q", "dout")}
    tensors["gates"] = base["gates"].clamp(*_GATES)
    for kind in "kv":
        shared = base[f"{kind}_slc"]
        tensors |= {kind: shared} | {f"{kind}_{branch}": shared for branch in _BRANCHES}
    tensors["k_cmp"] = compress(tensors["k"], None, point.config)[0]
    return Problem(SHARED, point, tensors)


class SharedGate(Gate):
    """Gate of whole attention with one K and V.

    Attributes:
        peer: the package whose selection the oracle uses.
        selected_recall: recall of the fp64 selection in that of the package.
    """

    peer: Peer
    selected_recall: float

    def _select(self, backend: str) -> None:
        """Check the block indices of the package, in any order, and pass them to the oracle."""
        assert self.peer.select is not None
        point, x = self.problem.point, self.problem.tensors
        with torch.no_grad():
            chosen = self.peer.select(x["q"], x["k"], x["v"], point.config).int()
        absent = point.seq_len  # sorts last
        chosen = torch.where(chosen < 0, absent, chosen).sort(-1).values
        chosen = torch.where(chosen == absent, -1, chosen)
        positions = torch.arange(point.seq_len, device=chosen.device)
        assert_legal(chosen, positions, point.config)
        if self._block_indices is None or not torch.equal(chosen, self._block_indices):
            self._block_indices = chosen
            self._known.clear()
        self.selected_recall = self.recall(chosen)

    def _sampled(self, case: str, dtype: torch.dtype) -> Values:
        values = super()._sampled(case, dtype)
        for kind in "kv":
            parts = [values.pop(f"d{kind}_{branch}") for branch in _BRANCHES]
            values[f"d{kind}"] = parts[0][0], torch.stack([x for _, x in parts]).sum(0)
        return values
