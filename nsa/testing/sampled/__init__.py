"""Sampled fp64 values: the correctness gate at lengths where the reference does not fit.

The same code is oracle and baseline of the error budget. With ``dtype`` fp64 everything is fp64;
with another one the same mathematics is rounded as a plain kernel rounds it: products are added in
fp32, attention weights, their gradients and all results are rounded to ``dtype``. Temporaries stay
below about 4 GiB. For example::

    sampled = sampled_window(q, k, v, config, cu_seqlens_q=cu_seqlens)
    rows = sample_rows(cu_seqlens, 128)
    results = {"out": out, "lse": lse, "dq": dq}
    check_sampled(lambda d: sampled.at_queries(rows, d, dout), results, rows, q.dtype, "window")
    gradients = {"dk": dk, "dv": dv}
    check_sampled(lambda d: sampled.at_keys(rows, d, dout), gradients, rows, q.dtype, "window")
"""

from nsa.testing.sampled.attention import (
    SampledAttention,
    sampled_compressed,
    sampled_selected,
    sampled_window,
)
from nsa.testing.sampled.compression import SampledCompression
from nsa.testing.sampled.gate import check_sampled, sample_rows
from nsa.testing.sampled.selection import (
    Agreement,
    SampledSelection,
    assert_legal,
    sampled_selection,
)
from nsa.testing.sampled.whole import SampledWhole

__all__ = [
    "Agreement",
    "SampledAttention",
    "SampledCompression",
    "SampledSelection",
    "SampledWhole",
    "assert_legal",
    "check_sampled",
    "sample_rows",
    "sampled_compressed",
    "sampled_selected",
    "sampled_selection",
    "sampled_window",
]
