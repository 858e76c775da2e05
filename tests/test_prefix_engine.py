"""Prefix hits in an engine with stacked layers: what the contracts promise, bit by bit."""

import numpy as np
import pytest
from prefix_story import Run, block, cached, continued, errors


def prompt_of(*names, tail=0):
    whole = np.concatenate([block(name) for name in names])
    return np.concatenate([whole, block(99)[:tail]]).astype(np.int32)


@pytest.mark.parametrize(("contract", "start"), [("full", 40), ("exact", 18), ("bounded", 32)])
def test_a_hit_computes_what_its_contract_says(backend, contract, start):
    """5 blocks of 8 shared, 3 layers of window 8: `full` goes on at 40, `exact` at 40 - 3 x 7 = 19
    (18, a whole group), `bounded` at 32."""
    with cached(contract, backend=backend) as engine:
        run = Run(engine)
        run.submit("a", prompt_of(1, 2, 3, 4, 5, tail=3), 4)
        run.run()
        run.submit("b", prompt_of(1, 2, 3, 4, 5, tail=6), 4)
        run.run()
        assert run.first_outputs["b"] == (start, 40)
        assert run.computed["b"] == list(range(start, 46 + 3))
        found = errors(run, "b")
        assert len(found) == 3 * (46 + 3 - 40)
        if contract != "bounded":
            assert max(found.values()) <= 1
        assert engine.prefix.counters.restores == 1
