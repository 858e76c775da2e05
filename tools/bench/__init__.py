"""Benchmarks: one file per operation, with the operation's stem.

Each file says what it measures and what bounds it, and has
    AXES       the shapes measured by default, as values of each axis
    SMOKE      one value of each axis, small enough for the test suite on a CPU
    prepare(place, cfg, shape, rng) -> Work
"""
