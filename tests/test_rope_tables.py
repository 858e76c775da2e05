"""Rotary embedding: frequencies with and without YaRN, and the tables of cosines and sines."""

import math

import numpy as np
import pytest

import ringslab as rs
from ringslab.errors import ArgumentError
from ringslab.layouts.rings import MAX_POSITION
from ringslab.layouts.rope import (
    COARSE_ROWS,
    FINE_BITS,
    FINE_ROWS,
    MIDDLE_BITS,
    MIDDLE_ROWS,
    TABLE_ROWS,
    rope_frequencies,
    rope_table,
)

PLAIN = rs.Rope(10_000.0, 64, "adjacent")
YARN = rs.Rope(160_000.0, 64, "adjacent", rs.Yarn(16.0, 65536, 32.0, 1.0))


def angle_pair(table: np.ndarray, position: int) -> np.ndarray:
    """cos + i sin of a position by the rule of `rope_table`, complex128 [dims / 2]."""
    coarse, middle = position >> (FINE_BITS + MIDDLE_BITS), (position >> FINE_BITS) % MIDDLE_ROWS
    rows = (coarse, COARSE_ROWS + middle, COARSE_ROWS + MIDDLE_ROWS + position % FINE_ROWS)
    a, b, c = (table[row, :, 0] + 1j * table[row, :, 1] for row in rows)
    return (a * b) * c


def test_p01_theta_belongs_to_the_layer():
    """P01: at position 1,000, pair 8 of 32, theta 10,000 gives the angle 100.0 (cos 0.862319),
    theta 160,000 gives 50.0 (cos 0.964966)."""
    assert 1000 * rope_frequencies(PLAIN)[8] == pytest.approx(100.0, rel=1e-12)
    other = rs.Rope(160_000.0, 64, "adjacent")
    assert 1000 * rope_frequencies(other)[8] == pytest.approx(50.0, rel=1e-12)
    assert angle_pair(rope_table(PLAIN), 1000)[8].real == pytest.approx(0.862319, abs=5e-7)
    assert angle_pair(rope_table(other), 1000)[8].real == pytest.approx(0.964966, abs=5e-7)


def test_yarn_of_v4():
    """theta 160,000, factor 16, length 65,536, betas 32 and 1: the ramp runs from pair
    floor(c(32)) = 15 to ceil(c(1)) = 25; pairs up to 15 keep their frequency, pairs from 25 on
    turn 16 times slower, and pair 20 lies halfway."""
    c = [64 * math.log(65536 / (2 * math.pi * r)) / (2 * math.log(160_000)) for r in (32, 1)]
    assert (math.floor(c[0]), math.ceil(c[1])) == (15, 25)
    plain = rope_frequencies(rs.Rope(160_000.0, 64, "adjacent"))
    ratio = rope_frequencies(YARN) / plain
    assert (ratio[:16] == 1.0).all()
    assert ratio[25:] == pytest.approx(1 / 16, rel=1e-15)
    assert ratio[20] == pytest.approx(0.5 / 16 + 0.5, rel=1e-15)
    assert (np.diff(ratio[15:26]) < 0).all()


def test_yarn_factor_of_one_changes_nothing():
    """With factor 1 every frequency is what it is without YaRN, to the last bit or two."""
    yarn = rs.Rope(160_000.0, 64, "adjacent", rs.Yarn(1.0, 65536, 32.0, 1.0))
    plain = rope_frequencies(rs.Rope(160_000.0, 64, "adjacent"))
    assert rope_frequencies(yarn) == pytest.approx(plain, rel=4e-16)


def test_yarn_ramp_of_no_width():
    """Where low = high the ramp is raised by 0.001: no division by zero, a clean step."""
    rope = rs.Rope(160_000.0, 4, "adjacent", rs.Yarn(16.0, 8, 32.0, 1.0))
    assert np.isfinite(rope_frequencies(rope)).all()


@pytest.mark.parametrize("rope", [PLAIN, YARN], ids=["plain", "yarn"])
def test_table_gives_every_position(rope):
    """The three digits multiply to cos and sin of position x frequency: within 1e-12 at small
    positions, within one rounding of the angle (1e-6 at 2^31) at large ones; P04: 15,962 at pair 0
    is cos -0.908016; position 0 does not rotate."""
    table = rope_table(rope)
    assert table.shape == (TABLE_ROWS, 32, 2)
    assert table.dtype == np.float64
    assert table.flags.c_contiguous
    frequencies = rope_frequencies(rope)
    for position in (0, 1, 1023, 1024, 4095, 15_962, 2**20 - 1, 2**20, 1_048_575, MAX_POSITION):
        found = angle_pair(table, position)
        for pair in (0, 1, 8, 31):
            angle = float(frequencies[pair]) * position
            exact = complex(math.cos(angle), math.sin(angle))
            assert abs(found[pair] - exact) <= 1e-12 + 4 * position * 2.0**-53
    assert angle_pair(table, 0).tolist() == [1 + 0j] * 32
    assert angle_pair(table, 15_962)[0].real == pytest.approx(-0.908016, abs=5e-7)


def test_table_rows_lie_on_the_unit_circle():
    """cos^2 + sin^2 is 1 within two roundings in every row, so products keep their length."""
    table = rope_table(YARN)
    assert np.abs((table**2).sum(-1) - 1.0).max() <= 4.5e-16


def test_table_is_the_same_each_time():
    """Two tables of one rope are equal to the bit: the rule that backends' bytes rest on."""
    assert rope_table(YARN).tobytes() == rope_table(YARN).tobytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 64, "adjacent"), "theta=0.0"),
        ((-1.0, 64, "adjacent"), "theta=-1.0"),
        ((math.nan, 64, "adjacent"), "theta=nan"),
        ((math.inf, 64, "adjacent"), "theta=inf"),
        ((1e4, 0, "adjacent"), "dims=0"),
        ((1e4, 63, "half"), "dims=63"),
        ((1e4, 64, "interleaved"), "pairing='interleaved'"),
        ((1.0, 64, "half", rs.Yarn(16.0, 65536, 32.0, 1.0)), "YaRN needs more than 1"),
        ((1e4, 64, "half", rs.Yarn(16.0, 1, 32.0, 1.0)), "does not fit"),
    ],
)
def test_ropes_that_are_refused(arguments, message):
    """Each wrong argument is an ArgumentError that shows it; P09: pairing has two names only."""
    with pytest.raises(ArgumentError, match=message):
        rs.Rope(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.5, 65536, 32.0, 1.0), "factor=0.5"),
        ((math.nan, 65536, 32.0, 1.0), "factor=nan"),
        ((16.0, 0, 32.0, 1.0), "original_length=0"),
        ((16.0, 65536, 1.0, 32.0), "beta_fast > beta_slow"),
        ((16.0, 65536, 32.0, 0.0), "beta_fast > beta_slow"),
    ],
)
def test_yarn_numbers_that_are_refused(arguments, message):
    """YaRN's numbers are checked when they are made, not where a table comes out wrong."""
    with pytest.raises(ArgumentError, match=message):
        rs.Yarn(*arguments)
