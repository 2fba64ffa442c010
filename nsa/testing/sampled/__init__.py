"""Reference values of sampled rows: the correctness gate at lengths where the reference does not fit.

One code serves as oracle and as baseline of the error budget. With ``dtype`` fp64 everything is
fp64; with another one the same mathematics is rounded as a plain kernel rounds it: products are
added in fp32, attention weights, their gradients and all results are rounded to ``dtype``.
Temporaries stay below about 4 GiB.

    sampled = sampled_window(q, k, v, config, cu_seqlens_q=cu_seqlens) rows =
    sample_rows(cu_seqlens, 128) check_sampled(lambda dtype: sampled.at_queries(rows, dtype, dout),
    {"out": out, "lse": lse, "dq": dq}, rows, q.dtype, "win") check_sampled(lambda dtype:
    sampled.at_keys(rows, dtype, dout), {"dk": dk, "dv": dv}, rows, q.dtype, "win")
"""

from nsa.testing.sampled.attention import (
    SampledAttention,
    sampled_compressed,
    sampled_selected,
    sampled_window,
)
from nsa.testing.sampled.choice import Agreement, SampledChoice, sampled_choice
from nsa.testing.sampled.compression import SampledCompression
from nsa.testing.sampled.gate import check_sampled, sample_rows
from nsa.testing.sampled.whole import SampledWhole

__all__ = [
    "Agreement",
    "SampledAttention",
    "SampledChoice",
    "SampledCompression",
    "SampledWhole",
    "check_sampled",
    "sample_rows",
    "sampled_choice",
    "sampled_compressed",
    "sampled_selected",
    "sampled_window",
]
