"""Where a sequence begins to compute after a prefix hit: the three contracts, as ring arithmetic.

A snapshot at boundary P holds the ring entries of the last positions before P. Three things follow
from it, each with its price:

    full     all rings are stored: computing goes on at P
    exact    some rings are stored; the others are rebuilt by computing far enough before P again
    bounded  the same with one window of tokens, whatever the number of layers: not exact

With N stacked layers of window W the reach of `exact` is N * (W - 1). A key of layer l is right
from position start + l * (W - 1) on (layer 0 needs nothing before a token; each layer's output
needs W - 1 positions more of right keys), so the outputs of layer N - 1 are right from
start + N * (W - 1) on.
"""

from dataclasses import dataclass
from math import lcm
from typing import Literal

from ..layouts.config_types import Config
from ..layouts.sizes import align_down

Contract = Literal["full", "exact", "bounded"]


@dataclass(frozen=True)
class Resume:
    """How a sequence goes on after a hit.

    boundary         tokens of the cached prefix
    start            first position that is computed
    swa_valid_start  ring positions below it count as missing, until all windows are past it
    first_output     first position whose outputs are the sequence's; those before it only rebuild
                     rings
    restore_first    the snapshot is copied before the first step; otherwise stored rings are copied
                     over when the sequence stands at the boundary
    """

    boundary: int
    start: int
    swa_valid_start: int
    first_output: int
    restore_first: bool


@dataclass(frozen=True)
class ResumeRule:
    """What the contracts need to know of a model.

    ratio   boundaries and starts are multiples of it (compression state is not stored, and is
            empty between two groups)
    window  the largest window of any layer
    reach   sum of (window - 1) over the layers whose outputs count; draft layers come after them
    back    how far before its boundary a snapshot of all rings still allows to start
    """

    contract: Contract
    ratio: int
    window: int
    reach: int
    back: int

    def resume(self, boundary: int, num_tokens: int) -> Resume | None:
        """How to go on from a snapshot at `boundary` <= num_tokens, or None where that saves
        nothing, or the snapshot lacks what is needed. The last token is always computed, once, for
        its output: at a boundary at the very end it is the first token of `full` and the last of
        a replay."""
        assert 0 < boundary <= num_tokens
        last = num_tokens - 1
        if self.contract == "full":
            start = min(boundary, align_down(last, self.ratio))
            if start <= 0 or boundary - start > self.back:
                return None
            return Resume(boundary, start, 0, start, restore_first=True)
        first_output = min(boundary, last)
        before = first_output - self.reach if self.contract == "exact" else boundary - self.window
        start = align_down(max(before, 0), self.ratio)
        if start == 0:
            return None  # as much work as without a hit
        return Resume(boundary, start, start, first_output, restore_first=False)


def resume_rule(cfg: Config, contract: Contract) -> ResumeRule:
    """The rule of a model, of its layers with a window. A snapshot may have been taken after a
    decode step that stored up to tokens_per_step - 1 positions past the boundary, which cost the
    oldest entries of a ring: those from P + tokens_per_step - 1 - ring_len on are left (pinned
    first positions aside, which take room of their own and always are), and a start at s needs
    s - window + 1."""
    layers = [layer for layer in cfg.layers if layer.window is not None]
    return ResumeRule(
        contract=contract,
        ratio=lcm(*(layer.compression_ratio or 1 for layer in layers)),
        window=max(layer.window for layer in layers),
        reach=sum(layer.window - 1 for layer in layers if layer.id < cfg.num_layers),
        back=min(
            layer.ring_len - layer.sink_tokens - (layer.window - 1) - (cfg.tokens_per_step - 1)
            for layer in layers
        ),
    )
