"""Files that commands write: tried before, whole or not at all, streams as they are."""

import errno
import os
import subprocess
import sys
import threading

import pytest

from ringslab.engine import output_files
from ringslab.engine.output_files import check_output_path, write_whole
from ringslab.tools.main import main


def full(handle):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_new_file_takes_the_place_of_the_old(tmp_path):
    """Text and bytes; no other file is left beside it."""
    path = tmp_path / "a.txt"
    write_whole(path, "old")
    assert path.read_text() == "old"
    write_whole(str(path), "\u00b5 new".encode())
    assert path.read_text(encoding="utf-8") == "\u00b5 new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    """The message names the file, not the temporary one, which is gone again."""
    path = tmp_path / "a.txt"
    path.write_text("old")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*/a\.txt'"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_gone(tmp_path, monkeypatch):
    """Before and while a file is written: FileNotFoundError that names it."""
    path = tmp_path / "out" / "a.txt"
    for write in (check_output_path, lambda path: write_whole(path, "new")):
        with pytest.raises(FileNotFoundError) as raised:
            write(path)
        assert raised.value.filename == str(path)

    def remove(handle):
        for left in path.parent.iterdir():
            left.unlink()
        path.parent.rmdir()

    path.parent.mkdir()
    monkeypatch.setattr("os.fsync", remove)
    with pytest.raises(FileNotFoundError) as raised:
        write_whole(path, "new")
    assert raised.value.filename == str(path)


def test_trying_a_path_changes_nothing(tmp_path):
    """What is there stays as it is; a folder in its place is refused."""
    path = tmp_path / "a.txt"
    path.write_text("old")
    check_output_path(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(IsADirectoryError):
        check_output_path(tmp_path)


def test_a_pipe_is_written_to(tmp_path):
    """A named pipe stays one, and its reader gets the text; no file is put beside it."""
    path, found = tmp_path / "pipe", []
    os.mkfifo(path)
    check_output_path(path)
    reader = threading.Thread(target=lambda: found.append(path.read_text()))
    reader.start()
    write_whole(path, "text")
    reader.join(timeout=30)
    assert found == ["text"]
    assert path.is_fifo()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1"])
def test_an_open_file_is_written_to(name, tmp_path):
    """/dev/stdout is not replaced, even where stdout is a file."""
    code = f"import sys; sys.path[:] = {sys.path!r}\n" + (
        "from ringslab.engine.output_files import check_output_path, write_whole\n"
        f"check_output_path({name!r}); write_whole({name!r}, 'text')"
    )
    before = os.lstat(name)
    with open(tmp_path / "out", "w") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True)
    assert (tmp_path / "out").read_text() == "text"
    if name == "/dev/stdout":
        assert os.lstat(name).st_ino == before.st_ino


@pytest.mark.parametrize(
    "words",
    [
        ["header", "quickstart.yaml", "--out"],
        ["layout", "quickstart.yaml", "--svg"],
        ["budget", "quickstart.yaml", "--plot"],
    ],
    ids=lambda words: words[0],
)
def test_a_failed_write_of_a_command_leaves_the_old_file(words, tmp_path, monkeypatch, capsys):
    """Status 2, a message that names the file, and the picture or header of before."""
    path = tmp_path / "old.svg"
    assert main([*words, str(path)]) == 0
    old = path.read_bytes()
    assert len(old) > 1000
    path.write_bytes(old + b"mine")
    monkeypatch.setattr(output_files.os, "fsync", full)
    assert main([*words, str(path)]) == 2
    assert "No space left on device" in (error := capsys.readouterr().err)
    assert str(path) in error
    assert path.read_bytes() == old + b"mine"
    assert list(tmp_path.iterdir()) == [path]
