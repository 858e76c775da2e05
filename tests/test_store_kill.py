"""SIGKILL of the writing process: 20 times, or as often as RINGSLAB_STORE_KILLS says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = int(os.environ.get("RINGSLAB_STORE_KILLS", "20"))


def run_kills(url: str) -> dict:
    script = Path(__file__).with_name("store_kills.py")
    done = subprocess.run(
        [sys.executable, str(script), url, str(KILLS), "11"],
        capture_output=True,
        text=True,
        timeout=60 + 3 * KILLS,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_kills(url: str) -> None:
    seen = run_kills(url)
    print(seen)
    assert seen["faults"] == []
    assert seen["runs"] == KILLS
    assert seen["puts"] > KILLS  # they did write, and many died while they did
    assert seen["mid_put"] > KILLS // 4


def test_kill_while_writing_lmdb(tmp_path):
    """After each kill every key holds its last reported version or the one under way, whole; no
    value is damaged, and the directory opens again."""
    pytest.importorskip("lmdb")
    check_kills(f"lmdb:{tmp_path / 'store'}")


def test_kill_while_writing_redis(redis_server):
    """The same, the server living on."""
    check_kills(redis_server.url)
