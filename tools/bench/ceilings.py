"""The rates of this run that floors are made of: a large copy and a large matrix product."""

from dataclasses import asdict
from statistics import median
from typing import Any

import numpy as np

from ...layouts.sizes import div_exact
from .common import SUSTAIN_SECONDS, Ceilings, Place
from .inputs import random_bf16

COPY_BYTES = {"cuda": 4 << 30, "cpu": 64 << 20}
MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
SMOKE_COPY_BYTES, SMOKE_MATMUL_SIZE = 1 << 20, 64
ROUNDS = 9
FREE_SHARE = 4  # a copy's two arrays take at most half of what is free


def measure_ceilings(place: Place, rng: Any, *, smoke: bool, sustained: bool) -> Ceilings:
    """Copy and matrix rates, from medians of ROUNDS rounds; after some seconds under load too,
    where `sustained`. The matrix product is cuBLAS's through CuPy, or PyTorch's where only that has
    one, and None without both; on the host it is NumPy's, of float32."""
    size = min(COPY_BYTES[place.backend], place.memory.free_bytes()[0] // FREE_SHARE)
    size = SMOKE_COPY_BYTES if smoke else size - size % (1 << 20)
    copy, steady_copy = _copy_rate(place, rng, size, sustained)
    place.watch.release()
    n = SMOKE_MATMUL_SIZE if smoke else MATMUL_SIZE[place.backend]
    product, steady_product, dtype = _matmul_rate(place, rng, n, sustained)
    place.watch.release()
    return Ceilings(copy, product, dtype, size, n, steady_copy, steady_product)


def report_of(ceilings: Ceilings) -> dict[str, Any]:
    """Keys of the report, rates rounded."""
    return {
        key: round(value, 2) if isinstance(value, float) else value
        for key, value in asdict(ceilings).items()
    }


def _copy_rate(place: Place, rng: Any, size: int, sustained: bool) -> tuple[float, float | None]:
    """GB/s, bytes read plus bytes written."""
    width = 1 << 15
    source = random_bf16(place, (div_exact(size, 2 * width), width), rng)
    target = place.memory.empty(source.shape, np.uint16)
    gbps = 2 * source.nbytes / 1e3  # per microsecond
    return _rates(place, lambda: place.watch.copy(target, source), gbps, sustained)


def _matmul_rate(
    place: Place, rng: Any, n: int, sustained: bool
) -> tuple[float | None, float | None, str]:
    """TFLOP/s, a multiplication and an addition an element of the product."""
    tflops = 2 * n**3 / 1e6  # per microsecond
    if place.backend != "cuda":
        a, b = rng.standard_normal((2, n, n), np.float32)
        out = np.empty_like(a)
        rates = _rates(place, lambda: place.watch.matmul(a, b, out), tflops, sustained)
        return *rates, place.watch.matmul_dtype
    a, b = (random_bf16(place, (n, n), rng) for _ in range(2))
    out = place.memory.empty((n, n), np.uint16)
    for matmul in (place.watch.matmul, _torch_matmul(place)):
        if matmul is None:
            continue
        try:
            matmul(a, b, out)
            place.watch.sync()
        except (RuntimeError, TypeError, AttributeError):  # a library of another version
            continue
        rates = _rates(place, lambda product=matmul: product(a, b, out), tflops, sustained)
        return *rates, place.watch.matmul_dtype
    return None, None, place.watch.matmul_dtype


def _torch_matmul(place: Place) -> Any:
    from .peers import load_torch, on_stream, torch_view

    torch = load_torch()
    if torch is None:
        return None

    def matmul(a: Any, b: Any, out: Any) -> None:
        left, right, result = (torch_view(torch, x).view(torch.bfloat16) for x in (a, b, out))
        with on_stream(torch, place):
            torch.matmul(left, right, out=result)

    return matmul


def _rates(
    place: Place, run: Any, work_per_us: float, sustained: bool
) -> tuple[float, float | None]:
    burst = work_per_us / median(place.watch.time_us(run, ROUNDS, True))
    if not sustained:
        return burst, None
    return burst, work_per_us / median(place.watch.sustain_us(run, SUSTAIN_SECONDS, False))
