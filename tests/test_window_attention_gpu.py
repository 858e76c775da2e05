"""window_attention on a GPU: every kernel that serves a shape, long sequences against float64 and
against PyTorch, lengths that only the device knows, tiles as the debug build counts them."""

import functools
import itertools

import numpy as np
import pytest
from attention_cases import (
    CASES,
    COUNTED,
    Case,
    assert_counts,
    case_inputs,
    check_attention,
    ends_of,
    run_attention,
)
from helpers import poisoned, to_backend, to_host

from ringslab.rawkernels.operations import operation
from ringslab.rawkernels.reference.bound import assert_within_bound, expected_attention

pytestmark = pytest.mark.gpu
LENGTHS, WINDOWS = (4096, 32768), (128, 1000, 4096)
HEADS, KV_HEADS, DIM = 32, 8, 128
VARIANTS = pytest.mark.parametrize("variant", [None, "portable"])


def kernel(**options):
    return functools.partial(operation("cuda", "window_attention"), **options)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_portable_kernel_within_the_bound(case):
    """Every shape of the table by the portable kernel, whatever the device would choose."""
    inputs = case_inputs(case)
    options = {"function": kernel(variant="portable"), "sink": inputs.sink, **case.options}
    check_attention("cuda", inputs.arrays, **options)


@pytest.mark.parametrize("case", COUNTED, ids=str)
def test_debug_build_counts_what_count_tiles_counts(case):
    """FULL, PARTIAL and EMPTY tiles and visible pairs, as the kernel finds them."""
    inputs = case_inputs(case)
    counts = to_backend(np.zeros(5, np.uint64), "cuda")
    function = kernel(variant="portable", counts=counts)
    run_attention("cuda", inputs.arrays, function=function, **case.options)
    assert_counts(to_host(counts), case)


def long_arrays(length, dtype=np.uint16):
    """q, k, v of one prompt on the GPU, bf16 bits, and its ends."""
    import cupy

    rng = cupy.random.default_rng(length)
    shapes = [(length, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (rng.standard_normal(shape, cupy.float32) for shape in shapes)
    # The upper halves of float32: bf16, rounded towards zero.
    q, k, v = ((x.view(cupy.uint32) >> 16).astype(dtype) for x in (2 * q, k, v))
    ends = to_backend(ends_of([length]), "cuda")
    return q, k, v, ends, ends


def run_long(arrays, window, variant):
    out = poisoned(arrays[0].shape, np.uint16, "cuda")
    lse = poisoned(arrays[0].shape[:2], np.float32, "cuda")
    options = {"softmax_scale": DIM**-0.5, "window": window, "variant": variant}
    kernel()(*arrays, out, lse, **options)
    return out, lse


@VARIANTS
@pytest.mark.parametrize("window", [*WINDOWS, None])
@pytest.mark.parametrize("length", LENGTHS)
def test_long_prompts_against_float64(length, window, variant):
    """N of 4,096 and 32,768, W of 128, 1,000, 4,096 and none, 32 and 8 heads of 128: rows at both
    ends, around the window's edge and between, within the bound; every row finite."""
    arrays = long_arrays(length)
    out, lse = (to_host(x) for x in run_long(arrays, window, variant))
    assert np.isfinite(lse).all()
    edge = min(window or length, length) - 1
    rows = np.unique([0, 63, 64, edge - 1, edge, min(edge + 1, length - 1), 2345, length - 1])
    host = [to_host(x) for x in arrays]
    options = {"softmax_scale": DIM**-0.5, "window": window}
    expected = expected_attention(*host, rows=rows, **options)
    assert_within_bound(out[rows], lse[rows], expected, f"{length} {window} {variant}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("length", LENGTHS)
def test_long_prompts_against_pytorch(length, window):
    """The same shapes, all rows, both kernels: FlexAttention, and SDPA with a boolean mask at 4,096
    (32,768 squared would not pay), differ by less than 1 % of the norm."""
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not torch.cuda.is_available():
        pytest.skip("needs PyTorch with CUDA")
    arrays = long_arrays(length)
    found = [run_long(arrays, window, variant)[0] for variant in (None, "portable")]

    def tensor(x):
        return torch.from_dlpack(x.view(np.int16)).view(torch.bfloat16)

    q, k, v = (tensor(x).transpose(0, 1)[None] for x in arrays[:3])
    ours = [tensor(x).transpose(0, 1)[None].float() for x in found]

    def sees(b, h, query, key):
        return (key <= query) & (query - key < window)

    block_mask = create_block_mask(sees, None, None, length, length, device=q.device)
    options = {"scale": DIM**-0.5, "enable_gqa": True}
    answers = [torch.compile(flex_attention)(q, k, v, block_mask=block_mask, **options)]
    if length == min(LENGTHS):
        position = torch.arange(length, device=q.device)
        mask = sees(0, 0, position[:, None], position)
        sdpa = torch.nn.functional.scaled_dot_product_attention
        answers.append(sdpa(q, k, v, attn_mask=mask, **options))
    for theirs, mine in itertools.product(answers, ours):
        assert float((mine - theirs.float()).norm() / mine.norm()) < 1e-2


@VARIANTS
def test_lengths_are_known_to_the_device_alone(variant):
    """A launch is captured once (a synchronisation would end the capture) and replayed after the
    sequence ends changed on the device: each replay gives the bits of a call with those ends."""
    import cupy

    case = Case("captured", ((70, 90), (30, 200)), window=40, heads=8, kv_heads=2, head_dim=128)
    inputs = case_inputs(case)
    arrays = [to_backend(x, "cuda") for x in inputs.arrays]
    out = poisoned(arrays[0].shape, np.uint16, "cuda")
    lse = poisoned(arrays[0].shape[:2], np.float32, "cuda")
    function = kernel(variant=variant)
    function(*arrays, out, lse, **case.options)  # builds the kernel
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        function(*arrays, out, lse, **case.options, stream=stream)
        graph = stream.end_capture()
    for lengths in (((70, 90), (30, 200)), ((1, 150), (99, 140)), ((100, 100), (0, 190))):
        ends = [ends_of(column) for column in zip(*lengths, strict=True)]
        for place, value in zip(arrays[3:], ends, strict=True):
            place.set(value)
        out.fill(0xFFFF)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        wanted, wanted_lse = run_attention(
            "cuda", (*inputs.arrays[:3], *ends), function=function, **case.options
        )
        np.testing.assert_array_equal(to_host(out), wanted)
        np.testing.assert_array_equal(to_host(lse), wanted_lse)
