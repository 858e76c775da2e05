"""How far the host of a run may be ahead of the device."""

import numpy as np
import pytest

from ringslab.engine.run_stats import open_stats


class Device:
    """Events in the order in which they were recorded, and those that were waited for."""

    def __init__(self):
        self.recorded, self.waited = 0, []

    def record(self):
        self.recorded += 1
        return self.recorded

    def wait(self, event):
        self.waited.append(event)


class Step:
    """One decode step of one request."""

    kind, num_tokens, num_seqs, block_tables = "decode", 1, 1, None


@pytest.mark.parametrize(
    ("on_gpu", "live", "ahead"), [(True, False, 2), (True, True, 1), (False, False, 0)]
)
def test_the_host_waits_for_the_step_before_those_ahead(on_gpu, live, ahead):
    """Of 6 steps all but the last two are waited for, in order; all but one where requests arrive
    meanwhile, and every one on the host. The times of a step are those of its own end."""
    device, none = Device(), np.zeros(0, np.int64)
    stats = open_stats(6, device, on_gpu=on_gpu, live=live)
    stats.begin()
    for step in range(6):
        stats.end_step(Step(), np.array([step]), none)
        done = max(step + 1 - ahead, 0)
        assert device.waited == list(range(1, done + 1))
        assert (stats.first_token_s >= 0).tolist() == [row < done for row in range(6)]
    stats.settle()
    assert device.waited == [1, 2, 3, 4, 5, 6]
    assert np.all(np.diff(stats.first_token_s) >= 0)
    assert len(stats.kinds["decode"].step_s) == 6
