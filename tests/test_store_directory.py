"""The directory of an LMDB store is this user's alone, or it is refused."""

import os

import pytest

import ringslab as rs
from ringslab.errors import StoreError

pytest.importorskip("lmdb")


def test_the_directory_is_private(tmp_path):
    """A directory that the store makes has mode 0700 and files of 0600, with umask 0 too; so are
    parents."""
    old = os.umask(0)
    try:
        with rs.open_store(f"lmdb:{tmp_path / 'new' / 's'}") as store:
            store.put(b"k", b"v")
    finally:
        os.umask(old)
    path = tmp_path / "new" / "s"
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o700
    assert {f.name: f.stat().st_mode & 0o777 for f in path.iterdir()} == {
        "data.mdb": 0o600,
        "lock.mdb": 0o600,
    }


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o770, 0o1777])
def test_a_directory_others_can_write_is_refused(tmp_path, mode):
    """Group or others may write the directory, or a file in it: StoreError with the mode, and
    nothing is made. 0755 and 0750 are taken."""
    path = tmp_path / "s"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(StoreError, match=f"{mode:04o}"):
        rs.open_store(f"lmdb:{path}")
    assert list(path.iterdir()) == []
    path.chmod(0o755)
    rs.open_store(f"lmdb:{path}").close()
    (path / "data.mdb").chmod(0o600 | mode & 0o022)
    with pytest.raises(StoreError, match="data"):
        rs.open_store(f"lmdb:{path}")
    (path / "data.mdb").chmod(0o600)
    rs.open_store(f"lmdb:{path}").close()


def test_a_parent_anyone_can_write_is_refused(tmp_path):
    """A parent of mode 0777 lets anyone put another directory in this one's place; with the sticky
    bit (as /tmp has it) it does not."""
    parent = tmp_path / "open"
    parent.mkdir()
    parent.chmod(0o777)
    with pytest.raises(StoreError, match="anyone may replace"):
        rs.open_store(f"lmdb:{parent / 's'}")
    parent.chmod(0o1777)
    rs.open_store(f"lmdb:{parent / 's'}").close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_another_users_directory_is_refused(tmp_path):
    """A directory, or a file in it, that belongs to another user: StoreError."""
    path = tmp_path / "s"
    rs.open_store(f"lmdb:{path}").close()
    os.chown(path / "data.mdb", 12345, -1)
    with pytest.raises(StoreError, match="belongs to user 12345"):
        rs.open_store(f"lmdb:{path}")
    os.chown(path / "data.mdb", 0, -1)
    os.chown(path, 12345, -1)
    with pytest.raises(StoreError, match="belongs to user 12345"):
        rs.open_store(f"lmdb:{path}")


def test_links_and_other_files_are_refused(tmp_path):
    """A data file that is a symbolic or a hard link, and a path that is a file: StoreError."""
    path, other = tmp_path / "s", tmp_path / "other"
    rs.open_store(f"lmdb:{path}").close()
    (path / "data.mdb").rename(other)
    (path / "data.mdb").symlink_to(other)
    with pytest.raises(StoreError, match="link"):
        rs.open_store(f"lmdb:{path}")
    (path / "data.mdb").unlink()
    (path / "data.mdb").hardlink_to(other)
    with pytest.raises(StoreError, match="link"):
        rs.open_store(f"lmdb:{path}")
    with pytest.raises(StoreError, match="no directory"):
        rs.open_store(f"lmdb:{other}")
