"""What only a store in a directory has: hidden files, locks, a kernel that copies."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_gpu_burst.errors import StoreError, StoreFull
from airflow_gpu_burst.store import open_store
from airflow_gpu_burst.store.config import StoreConfig
from airflow_gpu_burst.store.interface import TEMPORARY
from airflow_gpu_burst.transfer import Settings
from airflow_gpu_burst.transfer.directory import DirectoryMover


@pytest.fixture
def mover(tmp_path: Path) -> Iterator[DirectoryMover]:
    mover = DirectoryMover(str(tmp_path / "store"))
    yield mover
    mover.close()


def hidden(root: Path) -> list[Path]:
    return list(root.rglob(f"{TEMPORARY}*"))


UPLOAD = """
import sys
from pathlib import Path
from airflow_gpu_burst.transfer import Settings
from airflow_gpu_burst.transfer.directory import DirectoryMover
DirectoryMover(sys.argv[1], Settings(cap=1e6)).upload("a/key", Path(sys.argv[2]))
"""


@pytest.fixture
def uploading(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process, in the middle of an upload of `a/key`."""
    (tmp_path / "file").write_bytes(bytes(20_000_000))
    process = subprocess.Popen([sys.executable, "-c", UPLOAD, str(tmp_path / "store"), str(tmp_path / "file")])
    deadline = time.monotonic() + 30
    while not any(path.stat().st_size for path in hidden(tmp_path / "store")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    yield process
    process.kill()
    process.wait()


def test_killed_again_and_again_it_leaves_one_file(
    mover: DirectoryMover, uploading: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    uploading.send_signal(signal.SIGKILL)
    uploading.wait()
    assert len(hidden(tmp_path / "store")) == 1
    assert list(open_store(StoreConfig(uri=mover.uri)).list("")) == []
    (tmp_path / "file").write_bytes(b"short")
    mover.upload("a/key", tmp_path / "file")
    assert (tmp_path / "store/a/key").read_bytes() == b"short"
    assert hidden(tmp_path / "store") == []


def test_abandon_removes_what_nobody_is_at(
    mover: DirectoryMover, uploading: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    mover.abandon("a/key")
    assert len(hidden(tmp_path / "store")) == 1
    uploading.send_signal(signal.SIGKILL)
    uploading.wait()
    mover.abandon("a/other")
    assert len(hidden(tmp_path / "store")) == 1
    mover.abandon("a/key")
    assert hidden(tmp_path / "store") == []


def test_two_at_the_same_key(mover: DirectoryMover, uploading: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """The later one does not write into the file of the first."""
    mover.put("a/key", b"mine")
    assert (tmp_path / "store/a/key").read_bytes() == b"mine"
    assert len(hidden(tmp_path / "store")) == 1 and uploading.poll() is None


def test_a_failure_leaves_nothing(mover: DirectoryMover, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreFull, match="free space there"):
        mover.put("a/key", b"x")
    assert hidden(tmp_path / "store") == []
    assert not (tmp_path / "store/a/key").exists()


def test_a_link_that_leads_out_is_not_followed(mover: DirectoryMover, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "store/link").symlink_to(tmp_path / "outside")
    with pytest.raises(StoreError, match="remove the link"):
        mover.put("link/key", b"x")
    assert list((tmp_path / "outside").iterdir()) == []


def test_a_file_where_a_folder_is_needed(mover: DirectoryMover) -> None:
    mover.put("a", b"x")
    with pytest.raises(StoreError, match="both as a file and as a folder"):
        mover.put("a/b", b"x")


@pytest.mark.parametrize("reason", [errno.EXDEV, errno.EOPNOTSUPP])
def test_a_kernel_that_cannot_copy(
    mover: DirectoryMover, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    def refused(*_: object) -> int:
        raise OSError(reason, "no")

    data = os.urandom(3_000_000)
    mover.put("a", data)
    monkeypatch.setattr(os, "copy_file_range", refused)
    mover.copy("a", "b", len(data))
    assert (tmp_path / "store/b").read_bytes() == data


def test_memory_is_the_connections_buffers(tmp_path: Path) -> None:
    """A file of 300 MiB."""
    import resource

    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(300 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    mover = DirectoryMover(str(tmp_path / "store"), Settings())
    mover.upload("key", tmp_path / "sparse")
    mover.close()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40 << 10
