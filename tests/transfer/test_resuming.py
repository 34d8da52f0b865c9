"""Uploads that go on: after SIGKILL, with a state that is old, torn or lost, and in a store that has forgotten."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu_burst.errors import CheckpointError, StoreError, StoreUnavailable
from airflow_gpu_burst.transfer import crc
from airflow_gpu_burst.transfer.multipart import abandon
from airflow_gpu_burst.transfer.resuming import Progress, StateFile
from airflow_gpu_burst.transfer.uploading import Sender
from tests.faulty_s3 import FaultyS3
from tests.transfer.wire import PART, file_of, sender

PARTS = 10
SIZE = PARTS * PART - 1
ROOT = Path(__file__).parents[2]


@pytest.fixture
def server() -> Iterator[FaultyS3]:
    with FaultyS3() as server:
        yield server


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file_of(tmp_path / "file", SIZE)
    return tmp_path / "file"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "states" / "file.json"


@pytest.fixture
def sending(server: FaultyS3) -> Iterator[Sender]:
    with sender(server.config()) as made:
        yield made


def interrupted(server: FaultyS3, file: Path, state: Path, *, done: int = 6) -> None:
    """An upload that stops with `done` parts in the store."""
    server.fault("UploadPart", status=403, code="AccessDenied", skip=done, times=None)
    with sender(server.config(), width=1) as sending, pytest.raises(StoreError):
        sending.file("key", file, state)
    server.clear()
    assert len(next(iter(server.bucket.uploads.values())).parts) == done
    server.calls.clear()


def stored(server: FaultyS3, file: Path) -> None:
    assert server.data("key") == file.read_bytes()
    assert set(server.bucket.objects) == {"key"}
    assert not server.bucket.uploads


def test_sigkill_at_a_part(server: FaultyS3, sending: Sender, file: Path, state: Path) -> None:
    """The process is killed at part 7 of 10; what is sent again is that part, and those after it."""
    server.fault("UploadPart", stall_after=100_000, skip=6, times=None)
    program = textwrap.dedent("""
        import sys
        from pathlib import Path
        from airflow_gpu_burst.store import StoreConfig
        from tests.transfer.wire import sender
        _, url, file, state = sys.argv
        config = StoreConfig(uri="s3://bucket", endpoint_url=url, access_key_id="a", secret_access_key="b")
        with sender(config, width=1) as sending:
            sending.file("key", Path(file), Path(state))
    """)
    process = subprocess.Popen([sys.executable, "-c", program, server.url, str(file), str(state)], cwd=ROOT)
    deadline = time.monotonic() + 20
    while server.count("UploadPart") < 6 or not state.exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    server.clear()
    server.calls.clear()
    # The state was written at the beginning, and not more than once a second since.
    assert len(json.loads(state.read_text())["parts"]) < 6

    sending.file("key", file, state)
    stored(server, file)
    assert server.count("UploadPart") == PARTS - 6
    assert server.count("CreateMultipartUpload") == 0
    assert sending.client.flow.tally.resumed_bytes == 6 * PART
    assert not state.exists()


def test_parts_that_the_state_knows_are_not_even_read(
    server: FaultyS3, sending: Sender, file: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(server, file, state)
    read: list[int] = []
    original = crc.of_range
    monkeypatch.setattr(
        crc, "of_range", lambda fd, start, *a, **k: (read.append(start), original(fd, start, *a, **k))[1]
    )
    sending.file("key", file, state)
    stored(server, file)
    assert sorted(set(read)) == [number * PART for number in range(6, PARTS)]


def test_pages_of_parts(server: FaultyS3, sending: Sender, file: Path, state: Path) -> None:
    interrupted(server, file, state, done=7)
    server.bucket.page = 2
    sending.file("key", file, state)
    stored(server, file)
    assert (server.count("ListParts"), server.count("UploadPart")) == (4, 3)


@pytest.mark.parametrize("damage", ["etag", "size", "gone"])
def test_a_part_that_is_another_is_sent_again(
    server: FaultyS3, sending: Sender, file: Path, state: Path, damage: str
) -> None:
    interrupted(server, file, state)
    parts = next(iter(server.bucket.uploads.values())).parts
    if damage == "gone":
        del parts[3]
    elif damage == "etag":
        parts[3].etag, parts[3].sum = '"other"', 1
    else:
        parts[3].body.size -= 1
    sending.file("key", file, state)
    stored(server, file)
    assert server.count("UploadPart") == PARTS - 5


@pytest.mark.parametrize("told", ["full", "none"])
def test_parts_that_the_state_does_not_know(
    server: FaultyS3, sending: Sender, file: Path, state: Path, told: str
) -> None:
    """Compared by their CRC where the store tells one, else sent again."""
    interrupted(server, file, state)
    content = json.loads(state.read_text())
    content["parts"] = content["parts"][:2]
    state.write_text(json.dumps(content))
    server.bucket.checksums = told
    sending.file("key", file, state)
    stored(server, file)
    assert server.count("UploadPart") == (PARTS - 6 if told == "full" else PARTS - 2)


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"version": 1}', '{"parts": [[1, 2]]}'])
def test_a_state_that_is_lost_or_torn(
    server: FaultyS3, sending: Sender, file: Path, state: Path, text: str | None
) -> None:
    interrupted(server, file, state)
    state.unlink() if text is None else state.write_text(text)
    sending.file("key", file, state)
    stored(server, file)  # and the old upload is aborted: its note named it
    assert server.count("UploadPart") == PARTS
    assert server.count("AbortMultipartUpload") == 1


@pytest.mark.parametrize("other", ["key", "store"])
def test_a_state_of_something_else(server: FaultyS3, sending: Sender, file: Path, state: Path, other: str) -> None:
    interrupted(server, file, state)
    if other == "key":
        sending.file("key2", file, state)
        assert server.data("key2") == file.read_bytes()
    else:
        with FaultyS3(bucket="other") as elsewhere, sender(elsewhere.config()) as there:
            there.file("key", file, state)
            stored(elsewhere, file)
    assert len(server.bucket.uploads) == 1


def test_a_file_that_is_another_by_now(server: FaultyS3, sending: Sender, file: Path, state: Path) -> None:
    interrupted(server, file, state)
    os.utime(file)
    with pytest.raises(CheckpointError, match="changed"):
        sending.file("key", file, state)
    assert not server.bucket.uploads and not server.bucket.objects
    assert not state.exists()


def test_a_store_that_has_forgotten(server: FaultyS3, sending: Sender, file: Path, state: Path) -> None:
    interrupted(server, file, state)
    server.bucket.uploads.clear()
    sending.file("key", file, state)
    stored(server, file)
    assert server.count("UploadPart") == PARTS


@pytest.mark.parametrize("kind", ["UploadPart", "CompleteMultipartUpload"])
@pytest.mark.parametrize("always", [False, True])
def test_a_store_that_forgets_meanwhile(
    server: FaultyS3, sending: Sender, file: Path, state: Path, kind: str, always: bool
) -> None:
    server.fault(kind, forget=True, skip=0 if kind.startswith("Complete") else 4, times=None if always else 1)
    if always:
        with pytest.raises(StoreUnavailable, match="2 times"):
            sending.file("key", file, state)
        assert not server.bucket.objects
        assert not state.exists()
        return
    sending.file("key", file, state)
    stored(server, file)


def test_a_store_that_has_lost_a_part(server: FaultyS3, sending: Sender, file: Path) -> None:
    def lose(_call: object, reply: Any) -> Any:
        next(iter(server.bucket.uploads.values())).parts.pop(2)
        return reply

    server.fault("UploadPart", skip=PARTS - 1, change=lose)
    sending.file("key", file, None)
    stored(server, file)


def test_complete_whose_answer_was_lost(server: FaultyS3, sending: Sender, file: Path, state: Path) -> None:
    server.fault("CompleteMultipartUpload", lost=True)
    sending.file("key", file, state)
    stored(server, file)
    assert (server.count("UploadPart"), server.count("CompleteMultipartUpload")) == (PARTS, 2)


def test_killed_between_complete_and_the_end(server: FaultyS3, sending: Sender, file: Path, state: Path) -> None:
    server.fault("HeadObject", status=403, code="AccessDenied", times=None)
    with pytest.raises(StoreError):
        sending.file("key", file, state)
    server.clear()
    server.calls.clear()
    assert state.exists()
    sending.file("key", file, state)
    stored(server, file)
    assert server.count("UploadPart") == 0


def test_an_object_of_that_name_is_no_completion(server: FaultyS3, sending: Sender, file: Path, state: Path) -> None:
    """As above, but what lies there is something else."""
    server.fault("HeadObject", status=403, code="AccessDenied", times=None)
    with pytest.raises(StoreError):
        sending.file("key", file, state)
    server.clear()
    found = server.bucket.objects["key"]
    found.sum = (found.sum or 0) ^ 1
    sending.file("key", file, state)
    stored(server, file)


def test_without_a_state_nothing_is_left(server: FaultyS3, sending: Sender, file: Path) -> None:
    server.fault("UploadPart", status=403, code="AccessDenied", skip=4, times=None)
    with pytest.raises(StoreError):
        sending.file("key", file, None)
    assert not server.bucket.uploads and not server.bucket.objects


@pytest.mark.parametrize("note", [True, False])
def test_abandon(server: FaultyS3, sending: Sender, file: Path, state: Path, note: bool) -> None:
    interrupted(server, file, state)
    if not note:
        del server.bucket.objects["key.upload"]
    abandon(sending.client, "key")
    assert not server.bucket.uploads and not server.bucket.objects
    abandon(sending.client, "key")


def test_abandon_where_uploads_cannot_be_listed(server: FaultyS3, sending: Sender, file: Path, state: Path) -> None:
    interrupted(server, file, state)
    server.fault("ListMultipartUploads", status=403, code="AccessDenied", times=None)
    abandon(sending.client, "key")
    assert not server.bucket.uploads and not server.bucket.objects


def test_a_disk_that_takes_no_state(server: FaultyS3, sending: Sender, file: Path) -> None:
    sending.file("key", file, file / "below" / "state")
    stored(server, file)


def test_a_state_is_written_once_a_second(tmp_path: Path) -> None:
    path = tmp_path / "state"
    kept = StateFile(path)
    progress = Progress(uri="u", key="k", upload_id="i", part_size=5, identity=(1, 2, 3, 4))
    kept.save(progress, now=True)
    progress.parts[7] = ('"e"', 0xFF)
    kept.save(progress)
    assert StateFile(path).load("u", "k") == Progress(
        uri="u", key="k", upload_id="i", part_size=5, identity=(1, 2, 3, 4)
    )
    kept.save(progress, now=True)
    assert StateFile(path).load("u", "k") == progress
    assert StateFile(path).load("u", "other") is None
    kept.drop()
    kept.drop()
    assert StateFile(None).load("u", "k") is None
