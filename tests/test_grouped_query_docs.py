"""The example of docs/grouped-query.md runs, and its two ways to a result agree."""

import re
from pathlib import Path

import numpy as np
from helpers import from_bf16

import ringslab as rs

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "grouped-query.md").read_text()


def test_example():
    """The decode step's output is that of a prefill of the same 21st token after 20 cached ones,
    and ring_load with window_attention gives the same, within bf16."""
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    names: dict = {}
    exec(code, names)
    q, k, v, fmt = (names[name] for name in ("q", "k", "v", "fmt"))
    assert names["out"].shape == (1, 8, 64)
    assert np.isfinite(names["lse"]).all()
    plan = rs.plan_prefill([3], [1], [21], window=16, ring_len=names["ring_len"])
    record = rs.encode_records((k[:1], v[:1]), fmt, plan.positions, names["rope"])
    rows = (plan.most_keys, 2, 64)
    ends, keys, values = np.empty(2, np.int32), np.empty(rows, "u2"), np.empty(rows, "u2")
    rs.ring_load(names["slab"], names["layout"], 0, plan, record, ends, keys, values)
    assert ends.tolist() == [0, 16]
    out, lse = rs.window_attention(
        q[:1],
        keys,
        values,
        cu_seqlens_q=plan.cu_seqlens_q,
        cu_seqlens_k=ends,
        window=16,
        softmax_scale=0.125,
        softcap=50.0,
    )
    found, wanted = (from_bf16(x) for x in (out, names["out"]))
    np.testing.assert_allclose(found, wanted, rtol=2**-6, atol=2**-6 * np.abs(wanted).max())
    np.testing.assert_allclose(lse, names["lse"], rtol=1e-5)
