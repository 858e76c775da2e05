"""What window_attention is timed beside: each library's attention on our arrays, on the CPU where
PyTorch is installed, against ours."""

import numpy as np
import pytest

from ringslab.tools.bench import common
from ringslab.tools.bench.window_attention import prepare

torch = pytest.importorskip("torch", reason="needs PyTorch")
SHAPES = (
    {"layer": "mistral", "window": 100, "sequences": 2, "tokens": 256},
    {"layer": "mistral", "window": "none", "sequences": 1, "tokens": 150},
    {"layer": "gpt_oss", "window": 64, "sequences": 1, "tokens": 150},
    {"layer": "gemma2", "window": 64, "sequences": 1, "tokens": 150},
)
ON_THE_CPU = ("FlexAttention", "SDPA, FlashAttention", "SDPA with a mask")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape['layer']}_{shape['window']}")
def test_peers_do_the_same_work(monkeypatch, shape):
    """Masks, caps, sinks, groups and batches: a relative error below 1 %, uncompiled."""
    from ringslab.tools.bench import attention_peers

    monkeypatch.setattr(torch, "compile", lambda f=None, **_: f or (lambda g: g))
    with common.open_place("cpu", 0) as place:
        work = prepare(place, None, shape, np.random.default_rng(0))
        work.calls[0]()
        bits = attention_peers.torch_view(torch, work.parts["outputs"][0][0])
        ours = bits.view(torch.bfloat16).float()
        names = []
        for name, make in attention_peers.makers(work):
            if name in ON_THE_CPU:
                peer = make(torch, place, work, shape["sequences"])
                peer.calls[0]()
                error = (peer.result().float() - ours).norm() / ours.norm()
                assert error < 1e-2, name
                names.append(name)
    assert "FlexAttention" in names
