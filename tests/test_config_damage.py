"""Damaged configurations: whatever a file holds, loading gives a configuration or a ConfigError."""

import random

import pytest
from config_edits import QUICKSTART, message_of

FILES = ("quickstart.yaml", "quickstart_hybrid.yaml")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("value", ["0", "-1", "2.5", ".nan", "null", "[]", "{a: 1}", "text"])
def test_any_key_with_any_value(tmp_path, value, file):
    """Each key's value replaced by an odd one gives a configuration or a ConfigError that names
    the file in every line, never another exception."""
    lines = QUICKSTART.with_name(file).read_text().splitlines(keepends=True)
    path = tmp_path / "odd.yaml"
    for i, line in enumerate(lines):
        if ": " not in line or line.startswith("#"):
            continue
        key = line.split(": ", 1)[0]
        path.write_text("".join([*lines[:i], f"{key}: {value}\n", *lines[i + 1 :]]))
        for text in message_of(path).splitlines():
            assert text.startswith(str(path)), (line, text)


def test_damaged_files(tmp_path):
    """300 files with random bytes changed, cut or moved (seed 20): a configuration or a ConfigError
    that names the file, never another exception."""
    rng = random.Random(20)
    path = tmp_path / "damaged.yaml"
    for _ in range(300):
        data = bytearray(QUICKSTART.read_bytes())
        for _ in range(rng.randint(1, 3)):
            at, other = rng.randrange(len(data)), rng.randrange(len(data))
            if rng.random() < 0.5:
                data[at] = rng.choice(b"[]{}:,&*!|>%@#-? \n\t0\x00\xff")
            else:
                data[at : at + rng.randint(0, 20)] = data[other : other + rng.randint(0, 30)]
        path.write_bytes(data)
        assert message_of(path).startswith(str(path))
