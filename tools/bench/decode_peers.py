"""window_decode's work over grouped-query rings by PyTorch's SDPA: cuDNN over contiguous K and V.

The window of each sequence is gathered, dequantized to bf16 and made contiguous outside of the
time, which is what a sliced cache would be; so for MXFP8 rings the peer reads twice our bytes. SDPA
knows no sinks: they are put into its result, by our log-sum-exp, before it is compared with ours.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from ...rawkernels.reference.attention import decode_records
from ...rawkernels.reference.bf16 import float_to_bf16
from .common import BenchError, Place, Shape, Work
from .inputs import upload
from .peers import RELATIVE_ERROR, torch_view

NAME = "SDPA, cuDNN"


def sdpa_calls(
    torch: Any, place: Place, work: Work, shape: Shape
) -> tuple[list[Callable[[], Any]], Callable[[], dict[str, Any]]]:
    """Calls of one query token a sequence, and the check of the first call's result."""
    if shape["queries"] != 1:
        raise BenchError(f"peer {NAME}: queries={shape['queries']} but SDPA is asked for 1")
    from torch.nn.attention import SDPBackend, sdpa_kernel

    parts = work.parts
    layers, results = parts["layers"], {}
    tensors = []
    for layer, q in zip(layers, parts["queries"], strict=True):
        k, v = (torch_view(torch, x).view(torch.bfloat16) for x in gather(place, parts, layer))
        tensors.append((torch_view(torch, q).view(torch.bfloat16)[:, :, None], k, v))

    def attend(i: int) -> None:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            results[i] = torch.nn.functional.scaled_dot_product_attention(
                *tensors[i], scale=layers[i].softmax_scale, enable_gqa=True
            )

    def check() -> dict[str, Any]:
        theirs = results[0][:, :, 0].float()
        if layers[0].sink:
            lse = torch_view(torch, parts["outputs"][0][1])
            theirs = theirs * torch.sigmoid(lse - torch_view(torch, parts["sink"]))[..., None]
        ours = torch_view(torch, parts["outputs"][0][0]).view(torch.bfloat16).float()
        error = float((ours - theirs).norm() / ours.norm())
        if not error < RELATIVE_ERROR:
            raise BenchError(f"peer {NAME}: relative error {error:.3e} against ours")
        return {"relative_error": error}

    return [lambda i=i: attend(i) for i in range(len(tensors))], check


def gather(place: Place, parts: Any, layer: Any) -> tuple[Any, Any]:
    """K and V of every window, bf16 bits [num_seqs, num_kv_heads, window, head_dim]."""
    sequences = parts["sequences"]
    view = parts["layout"].view(parts["slab"], layer.id)
    fmt = layer.record_format
    shape = (sequences.num_seqs, fmt.num_kv_heads, layer.window, fmt.head_dim)
    k, v = (np.empty(shape, np.uint16) for _ in range(2))
    for i, (state, last) in enumerate(zip(sequences.state_ids, sequences.first, strict=True)):
        where = np.arange(last - layer.window + 1, last + 1) % layer.ring_len
        records = place.memory.to_host(view[int(state), :, 0])[where]
        for part, held in zip((k, v), decode_records(records, fmt), strict=True):
            part[i] = float_to_bf16(held.astype(np.float32)).transpose(1, 0, 2)
    return upload(place, k), upload(place, v)
