"""What the tests of the stores share: the layouts, and a Redis server of their own."""

LAYOUT_A, LAYOUT_B = b"A" * 16, b"B" * 16
