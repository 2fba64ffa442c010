"""A second, naive implementation of docs/semantics.md in NumPy fp64, with plain loops.

It shares no code with the library and is slow on purpose: each function should be checkable against
the page by reading. Everything is for one sequence of S key tokens and T <= S query tokens; row r
of the queries has position t = S - T + r. A packed batch is a loop over its sequences. Letters are
those of the page.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np

Array = np.ndarray
# (query row, KV head) -> indices of the keys that this row sees
Visible = Callable[[int, int], Sequence[int]]


# ------------------------------------------------------------------------------
# compression


def num_compressed(num_tokens: int, l: int, d: int) -> int:
    """C: how many compression blocks [i*d, i*d + l) lie wholly inside the sequence."""
    return sum(1 for i in range(num_tokens) if i * d + l <= num_tokens)


def silu(x: Array) -> Array:
    return x / (1.0 + np.exp(-x))


def compress(
    x: Array, l: int, d: int, phi: str = "mean", weights: dict[str, Array] | None = None
) -> Array:
    """[S, Hkv, D] raw keys or values -> [C, Hkv, D]."""
    num_tokens, num_heads, dim = x.shape
    out = np.zeros((num_compressed(num_tokens, l, d), num_heads, dim))
    for i in range(out.shape[0]):
        for h in range(num_heads):
            block = x[i * d : i * d + l, h]  # [l, D]
            if phi == "mean":
                out[i, h] = sum(block) / l
            elif phi == "linear":
                assert weights is not None
                out[i, h] = sum(weights["weight"][h, m] * block[m] for m in range(l))
            elif phi == "mlp":
                assert weights is not None
                flat = (block + weights["position"][h]).reshape(l * dim)
                hidden = silu(flat @ weights["w1"][h])
                out[i, h] = sum(block) / l + hidden @ weights["w2"][h]
            else:
                raise ValueError(phi)
    return out


# ------------------------------------------------------------------------------
# RoPE


def frequency(m: int, dim: int, theta: float, scaling: Any = None) -> float:
    """Radians a position of pair m: theta^(-2m / dim), divided as ``scaling`` says."""
    plain = theta ** (-2.0 * m / dim)
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        wavelength, original = 2 * math.pi / plain, scaling.original_max_position
        if wavelength < original / scaling.beta_fast:
            return plain
        if wavelength > original / scaling.beta_slow:
            return plain / scaling.factor
        kept = (original / wavelength - scaling.beta_slow) / (scaling.beta_fast - scaling.beta_slow)
        return (1 - kept) * plain / scaling.factor + kept * plain

    def pair(turns: float) -> float:
        """The pair, not rounded, that turns so often within the original length."""
        return (
            dim
            * math.log(scaling.original_max_position / (turns * 2 * math.pi))
            / (2 * math.log(theta))
        )

    first, last = max(math.floor(pair(scaling.beta_fast)), 0), math.ceil(pair(scaling.beta_slow))
    interpolated = min(max((m - first) / max(last - first, 1), 0.0), 1.0)
    return plain * (1 - interpolated) + plain / scaling.factor * interpolated


def rotate(
    x: Array,
    positions: Iterable[int],
    rotary_dim: int | None = None,
    theta: float = 10_000.0,
    scaling: Any = None,
) -> Array:
    """[T, H, D] -> [T, H, D]: pairs (m, m + rotary_dim / 2) turn by position * frequency.

    The angle is rounded to fp32, as the page asks. YaRN multiplies cosine and sine by 0.1
    ln(factor) + 1.
    """
    dim = x.shape[-1] if rotary_dim is None else rotary_dim
    half = dim // 2
    size = (
        0.1 * math.log(scaling.factor) + 1.0
        if scaling is not None and scaling.kind == "yarn"
        else 1.0
    )
    out = np.array(x, dtype=np.float64)
    for r, position in enumerate(positions):
        for h in range(x.shape[1]):
            for m in range(half):
                angle = float(np.float32(position) * np.float32(frequency(m, dim, theta, scaling)))
                first, second = x[r, h, m] * size, x[r, h, m + half] * size
                out[r, h, m] = first * math.cos(angle) - second * math.sin(angle)
                out[r, h, m + half] = second * math.cos(angle) + first * math.sin(angle)
    return out


def compressed_position(i: int, l: int, d: int, where: str) -> int:
    """Position at which compressed key i is rotated."""
    return {"middle": i * d + (l - 1) // 2, "start": i * d}[where]


# ------------------------------------------------------------------------------
# attention


def attention(
    q: Array, k: Array, v: Array, visible: Visible, scale: float | None = None
) -> tuple[Array, Array]:
    """Softmax attention of every row over its visible keys: out [T, Hq, Dv], lse [T, Hq].

    Where nothing is visible: 0 and -inf.
    """
    num_rows, num_heads, dim = q.shape
    group = num_heads // k.shape[1]
    scale = dim**-0.5 if scale is None else scale
    out, lse = (
        np.zeros((num_rows, num_heads, v.shape[-1])),
        np.full((num_rows, num_heads), -math.inf),
    )
    for r in range(num_rows):
        for h in range(num_heads):
            keys = list(visible(r, h // group))
            if keys:
                logits = k[keys, h // group] @ q[r, h] * scale
                top = logits.max()
                lse[r, h] = top + math.log(np.exp(logits - top).sum())
                out[r, h] = np.exp(logits - lse[r, h]) @ v[keys, h // group]
    return out, lse


def visible_cmp(num_queries: int, num_keys: int, l: int, d: int) -> Visible:
    """Compressed blocks that lie wholly in the past of the row."""

    def visible(r: int, g: int) -> list[int]:
        t = num_keys - num_queries + r
        return [i for i in range(num_compressed(num_keys, l, d)) if i * d + l - 1 <= t]

    return visible


def visible_slc(num_queries: int, num_keys: int, block_indices: Array, l_sel: int) -> Visible:
    """Tokens <= t of the listed blocks; ids below 0 or above t // l' count as absent."""

    def visible(r: int, g: int) -> list[int]:
        t = num_keys - num_queries + r
        chosen = {int(b) for b in block_indices[r, g] if 0 <= b <= t // l_sel}
        return [s for b in sorted(chosen) for s in range(b * l_sel, (b + 1) * l_sel) if s <= t]

    return visible


def visible_win(num_queries: int, num_keys: int, w: int) -> Visible:
    """Tokens max(0, t - w + 1) .. t."""

    def visible(r: int, g: int) -> range:
        t = num_keys - num_queries + r
        return range(max(0, t - w + 1), t + 1)

    return visible


# ------------------------------------------------------------------------------
# selection


@cache
def overlap(i: int, j: int, l: int, d: int, l_sel: int) -> int:
    """Tokens that compression block i and selection block j share."""
    return len(set(range(i * d, i * d + l)) & set(range(j * l_sel, (j + 1) * l_sel)))


def block_scores(
    q: Array, k_cmp: Array, num_keys: int, l: int, d: int, l_sel: int, scale: float | None = None
) -> Array:
    """Eqs. 8 to 10: [T, Hkv, M], importance of each block for each group, 0 if invisible."""
    num_rows, num_heads, dim = q.shape
    num_kv_heads = k_cmp.shape[1]
    group = num_heads // num_kv_heads
    scale = dim**-0.5 if scale is None else scale
    num_blocks = math.ceil(num_keys / l_sel)
    visible = visible_cmp(num_rows, num_keys, l, d)
    scores = np.zeros((num_rows, num_kv_heads, num_blocks))
    for r in range(num_rows):
        for h in range(num_heads):
            blocks = visible(r, h // group)
            if not blocks:
                continue
            logits = k_cmp[blocks, h // group] @ q[r, h] * scale
            lse = logits.max() + math.log(np.exp(logits - logits.max()).sum())
            p_cmp = np.exp(logits - lse)
            for j in range(num_blocks):
                # Only blocks near j can share a token with it; the others would add 0.
                near = range(
                    max(0, (j * l_sel - l) // d), min(len(blocks), ((j + 1) * l_sel) // d + 1)
                )
                scores[r, h // group, j] += sum(
                    p_cmp[i] * overlap(i, j, l, d, l_sel) / d for i in near
                )
    return scores


def e4m3(x: Array) -> Array:
    """Nearest numbers with 4 bits of exponent and 3 of mantissa, ties to even, for |x| <= 448."""
    step = np.exp2(np.maximum(np.floor(np.log2(np.maximum(np.abs(x), 2.0**-20))), -6) - 3)
    return np.round(x / step) * step


def rounded(x: Array) -> Array:
    """fp8: the numbers of x, of which the largest becomes 448, in e4m3, times their fp32 scale."""
    scale = np.float32(np.abs(x).max()) / np.float32(448)
    return e4m3((x.astype(np.float32) / scale).astype(np.float64)) * float(scale) if scale else x


def random_scores(positions: range, num_heads: int, num_blocks: int) -> np.ndarray:
    """Scores ``[T, Hkv, M]`` of ``random``, by Python's integers modulo 2**64."""

    def mixed(position: int, head: int, block: int) -> float:
        number = (((position * num_heads + head) << 24) + block) % 2**64
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            number = (number ^ (number >> 33)) * factor % 2**64
        return (number >> 40) / 2**24

    places = itertools.product(positions, range(num_heads), range(num_blocks))
    return np.array([mixed(*place) for place in places]).reshape(-1, num_heads, num_blocks)


def token_max_scores(
    q: Array,
    k: Array,
    num_init: int,
    num_local: int,
    l_sel: int,
    scale: float | None = None,
    fp8: bool = False,
) -> Array:
    """Scores [T, Hkv, M] by the largest product of a token of the block, 0 for later blocks."""
    num_rows, num_heads, dim = q.shape
    num_keys, num_kv_heads, _ = k.shape
    scale = dim**-0.5 if scale is None else scale
    scores = np.zeros((num_rows, num_kv_heads, math.ceil(num_keys / l_sel)))
    blocks = [slice(start, start + l_sel) for start in range(0, num_keys, l_sel)]
    for g in range(num_kv_heads):
        keys = [rounded(k[block, g]) if fp8 else k[block, g] for block in blocks]
        for r in range(num_rows):
            t = num_keys - num_rows + r
            last = t // l_sel
            forced = {
                *range(min(num_init, last + 1)),
                *range(max(last + 1 - num_local, 0), last + 1),
            }
            for h in range(g * num_heads // num_kv_heads, (g + 1) * num_heads // num_kv_heads):
                visible = [s for s in range(t + 1) if s // l_sel in forced]
                logits = k[visible, g] @ q[r, h] * scale
                lse = logits.max() + math.log(np.exp(logits - logits.max()).sum())
                row = rounded(q[r, h]) if fp8 else q[r, h]
                for j in range(last + 1):
                    m = (keys[j][: t + 1 - j * l_sel] @ row).max() * scale
                    scores[r, g, j] += math.exp(min(m - lse, 80.0))
    return scores


def token_scores(q: Array, k: Array, num_kv_heads: int, *rest: Any) -> Array:
    """Scores [T, Hkv, M] by tokens; a single key serves all KV heads."""
    scores = token_max_scores(q, k, *rest)
    return np.repeat(scores, num_kv_heads // k.shape[1], axis=1)


def choose_row(
    scores: Array, t: int, n: int, num_init: int, num_local: int, l_sel: int
) -> list[int]:
    """Blocks of a query and group by scores [M]: n ids, ascending, padded with -1 at the end."""
    candidates = list(range(t // l_sel + 1))
    if len(candidates) <= n:
        chosen = set(candidates)
    else:
        chosen = set(candidates[:num_init]) | set(candidates[-num_local:])
        ranking = sorted((j for j in candidates if j not in chosen), key=lambda j: (-scores[j], j))
        chosen |= set(ranking[: n - len(chosen)])
    return sorted(chosen) + [-1] * (n - len(chosen))


def choose(
    scores: Array,
    num_keys: int,
    n: int,
    num_init: int,
    num_local: int,
    l_sel: int,
    table: Iterable[tuple[int, int]] = (),
) -> Array:
    """[T, Hkv, M] scores -> block_indices [T, Hkv, n].

    Rows (length, m) of ``table`` give queries below a length m blocks.
    """
    num_rows, num_kv_heads, _ = scores.shape
    out = np.full((num_rows, num_kv_heads, n), -1, dtype=np.int64)
    for r in range(num_rows):
        t = num_keys - num_rows + r
        m = next((m for length, m in table if t < length), n)
        for g in range(num_kv_heads):
            out[r, g, :m] = choose_row(scores[r, g], t, m, num_init, num_local, l_sel)
    return out


def token_ranges(
    block_indices: Array, num_keys: int, l_sel: int
) -> list[list[list[tuple[int, int]]]]:
    """For each row and group the visible tokens of its blocks as merged, ascending [start, end)."""
    num_rows, num_kv_heads, _ = block_indices.shape
    visible = visible_slc(num_rows, num_keys, block_indices, l_sel)
    out = []
    for r in range(num_rows):
        row = []
        for g in range(num_kv_heads):
            tokens = set(visible(r, g))
            starts = sorted(s for s in tokens if s - 1 not in tokens)
            ends = sorted(s + 1 for s in tokens if s + 1 not in tokens)
            row.append(list(zip(starts, ends, strict=True)))
        out.append(row)
    return out


# ------------------------------------------------------------------------------
# the whole


def combine(outputs: Sequence[Array | None], gates: Array) -> Array:
    """Eq. 5: the gated sum over (cmp, slc, win); None is a branch that is off."""
    total: Array | None = None
    for c, out in enumerate(outputs):
        if out is not None:
            part = gates[:, :, c, None] * out
            total = part if total is None else total + part
    assert total is not None
    return total


def native_sparse_attention(
    q: Array,
    k_cmp_raw: Array,
    v_cmp_raw: Array,
    k_slc: Array,
    v_slc: Array,
    k_win: Array,
    v_win: Array,
    gates: Array,
    config: Any,
    *,
    phi_k: dict[str, Array] | None = None,
    phi_v: dict[str, Array] | None = None,
    q_cmp: Array | None = None,
    q_idx: Array | None = None,
    k_idx: Array | None = None,
    rotate_keys: Callable[[Array, list[int]], Array] | None = None,
    scale: float | None = None,
) -> tuple[Array, Array]:
    """The three branches and their sum: out [T, Hq, Dv] and block_indices [T, Hkv, n].

    ``config`` is read for its sizes alone. ``rotate_keys(keys, positions)`` rotates compressed
    keys; None: no RoPE.
    """
    num_rows, num_keys = q.shape[0], k_cmp_raw.shape[0]
    l, d, l_sel = config.compress_block_size, config.compress_stride, config.block_size
    n, num_init = config.num_selected_blocks, config.num_init_blocks
    num_local = config.num_local_blocks
    outputs: list[Array | None] = [None, None, None]
    indices = np.full((num_rows, k_cmp_raw.shape[1], n), -1, dtype=np.int64)
    by_token = config.scores in ("token_max", "index")
    if "cmp" in config.branches or ("slc" in config.branches and not by_token):
        k_cmp = compress(k_cmp_raw, l, d, config.phi, phi_k)
        scoring_q = q if q_cmp is None else q_cmp
        if config.compress_rope != "none" and rotate_keys is not None:
            positions = [
                compressed_position(i, l, d, config.compress_rope) for i in range(k_cmp.shape[0])
            ]
            k_cmp = rotate_keys(k_cmp, positions)
    if "cmp" in config.branches:
        v_cmp = compress(v_cmp_raw, l, d, config.phi, phi_v)
        outputs[0], _ = attention(
            scoring_q, k_cmp, v_cmp, visible_cmp(num_rows, num_keys, l, d), scale
        )
    if "slc" in config.branches:
        if by_token:
            fp8 = config.score_precision == "fp8"
            scored = (q, k_slc) if q_idx is None or k_idx is None else (q_idx, k_idx)
            rest = (num_init, num_local, l_sel, scale if q_idx is None else None, fp8)
            scores = token_scores(*scored, k_slc.shape[1], *rest)
        else:
            scores = block_scores(scoring_q, k_cmp, num_keys, l, d, l_sel, scale)
        table = [(length, m) for _, length, m in config.num_selected_blocks_table]
        indices = choose(scores, num_keys, n, num_init, num_local, l_sel, table)
        outputs[1], _ = attention(
            q, k_slc, v_slc, visible_slc(num_rows, num_keys, indices, l_sel), scale
        )
    if "win" in config.branches:
        outputs[2], _ = attention(
            q, k_win, v_win, visible_win(num_rows, num_keys, config.window_size), scale
        )
    return combine(outputs, gates), indices


def layer(weights: dict[str, Array], x: Array, config: Any) -> Array:
    """An attention layer over one sequence x [T, width], with the module's parameters by name."""
    num_tokens = x.shape[0]

    def project(name: str, num_heads: int) -> Array:
        weight = weights[f"{name}_proj.weight"]
        heads = (x @ weight.T).reshape(num_tokens, num_heads, weight.shape[0] // num_heads)
        if config.qk_norm and name[0] in "qk":
            size = np.sqrt((heads**2).mean(-1, keepdims=True) + 1e-6)
            return heads / size * weights[f"{name}_norm.weight"]
        return heads

    def rotated(heads: Array, positions: Iterable[int]) -> Array:
        return rotate(heads, positions, config.rotary_dim, config.rope_theta, config.rope_scaling)

    def phi(name: str) -> dict[str, Array]:
        return {
            key.removeprefix(f"{name}."): value
            for key, value in weights.items()
            if key.startswith(f"{name}.")
        }

    def project_kv(kind: str, branch: str) -> Array:
        name = kind if config.share_kv else f"{kind}_{branch}"
        if f"{name}_proj.weight" not in weights:  # the branch is off and will not be read
            return np.full((num_tokens, config.num_kv_heads, 1), math.nan)
        return project(name, config.num_kv_heads)

    def index(name: str) -> Array | None:
        """Index queries or keys; their frequencies are those of their own rotated part."""
        if f"{name}_proj.weight" not in weights:
            return None
        heads = project(name, weights[f"{name}_proj.weight"].shape[0] // config.index_dim)
        rotary = config.index_rotary_dim
        if rotary is None:
            rotary = min(config.rotary_dim or config.head_dim, config.index_dim)
        return rotate(heads, tokens, rotary, config.rope_theta, config.rope_scaling)

    q = project("q", config.num_heads)
    k_cmp, k_slc, k_win = (project_kv("k", branch) for branch in ("cmp", "slc", "win"))
    v_cmp, v_slc, v_win = (project_kv("v", branch) for branch in ("cmp", "slc", "win"))
    tokens = range(num_tokens)
    out, _ = native_sparse_attention(
        rotated(q, tokens),
        k_cmp,
        v_cmp,
        rotated(k_slc, tokens) if "slc" in config.branches else k_slc,
        v_slc,
        rotated(k_win, tokens) if "win" in config.branches else k_win,
        v_win,
        layer_gates(weights, x, config),
        config,
        phi_k=phi("phi_k"),
        phi_v=phi("phi_v"),
        q_cmp=q if config.compress_rope == "none" else None,
        q_idx=index("q_idx"),
        k_idx=index("k_idx"),
        rotate_keys=rotated,
    )
    return out.reshape(num_tokens, config.num_heads * config.value_dim) @ weights["o_proj.weight"].T


def layer_gates(weights: dict[str, Array], x: Array, config: Any) -> Array:
    """Gates [T, Hq, 3] from the layer's input; 0 for a branch that is off."""
    on = [c for c, branch in enumerate(("cmp", "slc", "win")) if branch in config.branches]
    gates = np.zeros((x.shape[0], config.num_heads, 3))
    if config.gate == "fixed":
        gates[:, :, on] = 1.0 / len(on)
        return gates
    if config.gate_hidden_size:
        hidden = silu(x @ weights["gate.net.0.weight"].T + weights["gate.net.0.bias"])
        logits = hidden @ weights["gate.net.2.weight"].T + weights["gate.net.2.bias"]
    else:
        logits = x @ weights["gate.net.weight"].T + weights["gate.net.bias"]
    logits = logits.reshape(x.shape[0], config.num_heads, len(on))
    if config.gate == "sigmoid":
        gates[:, :, on] = 1.0 / (1.0 + np.exp(-logits))
    else:
        logits = logits / config.gate_temperature
        gates[:, :, on] = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return gates
