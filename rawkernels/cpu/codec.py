"""bf16, E4M3 and E8M0 on the CPU: bit arithmetic on float32, one element or one block at a time."""

import numpy as np

from ...layouts.formats import E4M3_NAN_BYTE, E8M0_BIAS, E8M0_MAX_CODE, E8M0_NAN_BYTE, MX_BLOCK
from .kernels import device_function

# Fields of a float32.
SIGN_BIT = np.uint32(0x80000000)
MAGNITUDE = np.uint32(0x7FFFFFFF)
MANTISSA = np.uint32(0x007FFFFF)
MANTISSA_BITS = np.uint32(23)
INFINITY = np.uint32(0x7F800000)
MANTISSA_OF_448 = np.uint32(0x600000)  # 448 = 1.75 * 2^8
E4M3_MAX_EXPONENT = 8
E4M3_MAX_BYTE = np.uint32(0x7E)
BITS_OF_448 = np.uint32(0x43E00000)
BITS_OF_E4M3_NORMAL = np.uint32(0x3C800000)  # 2^-6, the smallest normal E4M3
E4M3_STEPS_PER_ONE = np.float32(512.0)  # subnormal E4M3 values are multiples of 2^-9
ROUND_TO_INTEGER = np.float32(8388608.0)  # 2^23: adding it rounds to a whole number, ties to even
BF16_NAN = np.uint16(0x7FC0)
FP16_NAN = np.uint16(0x7E00)
FP16_INFINITY = np.uint32(0x7C00)
FP16_REBIAS = np.float32(2.0**112)  # exponent bias 127 less 15
BITS_OF_65520 = np.uint32(0x477FF000)  # halfway from 65,504 to 2^16: rounds to infinity
BITS_OF_FP16_NORMAL = np.uint32(0x38800000)  # 2^-14, the smallest normal fp16
FP16_STEPS_PER_ONE = np.float32(2.0**24)  # subnormal fp16 values are multiples of 2^-24


@device_function
def bf16_value(bits):
    """float32 of bf16 bits."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@device_function
def bf16_round(x):
    """bf16 bits of a float32, to nearest even; NaN becomes 0x7FC0."""
    u = np.float32(x).view(np.uint32)
    if (u & MAGNITUDE) > INFINITY:
        return BF16_NAN
    odd = (u >> np.uint32(16)) & np.uint32(1)
    return np.uint16((u + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@device_function
def fp16_value(bits):
    """float32 of fp16 bits, exact."""
    magnitude = np.uint32(bits) & np.uint32(0x7FFF)
    sign = (np.uint32(bits) & np.uint32(0x8000)) << np.uint32(16)
    if magnitude >= FP16_INFINITY:
        return np.uint32(sign | INFINITY | ((magnitude & np.uint32(0x3FF)) << np.uint32(13))).view(
            np.float32
        )
    # Read as a float32, exponent and mantissa are 2^(15 - 127) too small; the product is exact.
    small = np.uint32(magnitude << np.uint32(13)).view(np.float32)
    return np.uint32(np.float32(small * FP16_REBIAS).view(np.uint32) | sign).view(np.float32)


@device_function
def fp16_round(x):
    """fp16 bits of a float32, to nearest even; NaN becomes 0x7E00."""
    u = np.float32(x).view(np.uint32)
    a = u & MAGNITUDE
    if a > INFINITY:
        return FP16_NAN
    sign = (u & SIGN_BIT) >> np.uint32(16)
    if a >= BITS_OF_65520:
        return np.uint16(sign | FP16_INFINITY)
    if a < BITS_OF_FP16_NORMAL:
        steps = np.float32(np.uint32(a).view(np.float32) * FP16_STEPS_PER_ONE) + ROUND_TO_INTEGER
        return np.uint16(sign | (np.float32(steps).view(np.uint32) & np.uint32(0x7FF)))
    odd = (a >> np.uint32(13)) & np.uint32(1)
    rounded = a + np.uint32(0xFFF) + odd  # keep 10 of 23 mantissa bits
    return np.uint16(sign | ((rounded >> np.uint32(13)) - np.uint32((E8M0_BIAS - 15) << 10)))


@device_function
def e4m3_byte(x):
    """E4M3 byte of a float32, to nearest even, saturated at +-448. Never called with a NaN."""
    u = np.float32(x).view(np.uint32)
    sign = (u & SIGN_BIT) >> np.uint32(24)
    a = u & MAGNITUDE
    if a >= BITS_OF_448:
        return np.uint8(sign | E4M3_MAX_BYTE)
    if a < BITS_OF_E4M3_NORMAL:
        steps = np.float32(np.uint32(a).view(np.float32) * E4M3_STEPS_PER_ONE) + ROUND_TO_INTEGER
        return np.uint8(sign | (np.float32(steps).view(np.uint32) & np.uint32(0xFF)))
    odd = (a >> np.uint32(20)) & np.uint32(1)
    rounded = a + np.uint32(0x7FFFF) + odd  # keep 3 of 23 mantissa bits
    byte = (rounded >> np.uint32(20)) - np.uint32((E8M0_BIAS - 7) << 3)  # exponent bias 127 to 7
    return np.uint8(sign | min(byte, E4M3_MAX_BYTE))


@device_function
def scale_code(amax_bits, ceil):
    """E8M0 code for a block maximum given as float32 bits without sign; not a NaN.

    ceil: the smallest power of two with amax <= 448 * 2^e; floor: 2^(floor(log2(amax)) - 8).
    """
    if amax_bits == INFINITY:
        return np.int64(E8M0_MAX_CODE)
    code = np.int64(amax_bits >> MANTISSA_BITS) - np.int64(E4M3_MAX_EXPONENT)
    if ceil and (amax_bits & MANTISSA) > MANTISSA_OF_448:
        code += np.int64(1)
    return max(code, np.int64(0))


@device_function
def power_of_two(code):
    """float32 2^(code - 127) for codes 0..254, exact; code 0 is subnormal. 255 is NaN."""
    if code == E8M0_NAN_BYTE:
        return np.float32(np.nan)
    if code == 0:
        return np.uint32(0x00400000).view(np.float32)
    return np.uint32(np.uint32(code) << MANTISSA_BITS).view(np.float32)


@device_function
def quantize_block(x, first, count, ceil, floor_bits, values, values_at):
    """Quantize x[first : first + count], count <= 32; returns the scale byte."""
    amax = np.uint32(floor_bits)
    nan = False
    for i in range(first, first + count):
        a = np.float32(x[i]).view(np.uint32) & MAGNITUDE
        nan = nan or a > INFINITY
        amax = max(amax, a)
    if nan:
        for i in range(count):
            values[values_at + i] = np.uint8(E4M3_NAN_BYTE)
        return np.uint8(E8M0_NAN_BYTE)
    code = scale_code(amax, ceil)
    reciprocal = power_of_two(np.int64(2 * E8M0_BIAS) - code)
    for i in range(count):
        values[values_at + i] = e4m3_byte(np.float32(x[first + i] * reciprocal))
    return np.uint8(code)


@device_function
def quantize_vector(x, ceil, floor_bits, values, values_at, scales, scales_at):
    """Quantize all of x, float32 [D]; the last block may be short."""
    width = x.shape[0]
    for block in range((width + MX_BLOCK - 1) // MX_BLOCK):
        first = block * MX_BLOCK
        count = min(MX_BLOCK, width - first)
        byte = quantize_block(x, first, count, ceil, floor_bits, values, values_at + first)
        scales[scales_at + block] = byte


def rule_arguments(scale_rounding: str | None, amax_floor: float | None) -> tuple[bool, np.uint32]:
    """(ceil, bits of amax_floor as float32) for kernels; any rule where there is none."""
    floor = np.float32(amax_floor or 0.0)
    return scale_rounding == "ceil", floor.view(np.uint32)
