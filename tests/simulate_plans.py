"""Run by test_plan_device.py in a process of its own: the Numba CUDA plan kernels in Numba's
simulator against the reference. Prints how many batches were compared."""

import sys
import warnings

from plan_cases import (
    assert_same_decode,
    assert_same_prefill,
    fill_decode,
    fill_prefill,
    random_decode,
    random_prefill,
)

from ringslab.rawkernels.cuda import plan_decode as cuda_decode
from ringslab.rawkernels.cuda import plan_prefill as cuda_prefill
from ringslab.rawkernels.reference.plan_decode import plan_decode
from ringslab.rawkernels.reference.plan_prefill import plan_prefill


def main(num_batches: int) -> None:
    # The simulator computes with NumPy scalars; where one wraps, the card would not (or otherwise).
    warnings.simplefilter("error", RuntimeWarning)
    for seed in range(num_batches):
        # Few threads: the simulator runs about 4,000 a second. 2 and 3 cut sequences unevenly.
        decode = random_decode(seed)
        extra = seed % 3
        assert_same_decode(
            fill_decode(cuda_decode.plan_decode, decode, threads=2, extra=extra),
            fill_decode(plan_decode, decode, extra=extra),
            f"seed={seed} {decode}",
        )
        prefill = random_prefill(seed)
        assert_same_prefill(
            fill_prefill(
                cuda_prefill.plan_prefill,
                prefill,
                extra=extra,
                sequence_threads=1 + seed % 4,
                token_threads=8,
            ),
            fill_prefill(plan_prefill, prefill, extra=extra),
            f"seed={seed} {prefill}",
        )
    print(f"compared {num_batches} decode and {num_batches} prefill plans")


if __name__ == "__main__":
    main(int(sys.argv[1]))
