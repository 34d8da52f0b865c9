"""A process that is killed (SIGKILL) at each request of a save and of a restore, before the store acts or after."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from airflow_gpu_burst.checkpoint import Manifest, read_manifest, restore, save
from airflow_gpu_burst.store import open_store
from airflow_gpu_burst.transfer import Settings, open_mover
from tests.checkpoint.trees import LARGE, MIB, content, seen
from tests.faulty_s3 import FaultyS3
from tests.s3_bucket import Call, Reply

SAVE = """
import os, sys
from pathlib import Path
from airflow_gpu_burst.checkpoint import restore, save
from airflow_gpu_burst.store import StoreConfig
from airflow_gpu_burst.transfer import Settings, open_mover
mover = open_mover(StoreConfig.from_env(os.environ), Settings(part_size=5 << 20, connections=2))
verb, folder, *rest = sys.argv[1:]
if verb == "save":
    save(mover, Path(folder), "p", state=Path(rest[0]))
else:
    restore(mover, [tuple(rest)], Path(folder))
mover.close()
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "sub").mkdir(parents=True)
    (folder / "parts").write_bytes(content("parts", 11 * MIB))
    (folder / "sub" / "one").write_bytes(content("one", LARGE))
    for name in ("a", "b", "sub/c"):
        (folder / name).write_bytes(content(name, 1000))
    (folder / "empty").touch()
    return folder


class Doomed:
    """Processes that are killed at their n-th request to a server."""

    def __init__(self, server: FaultyS3, prefix: str, after: bool) -> None:
        self.server, self.after = server, after
        self.config = server.config(prefix)

    def run(self, n: int, *arguments: str) -> bool:
        """Whether it came to its end before the n-th request (from 0)."""
        process: list[subprocess.Popen[bytes]] = []
        requests = count()

        def kill() -> None:
            os.kill(process[0].pid, signal.SIGKILL)
            process[0].wait()  # nothing of it can arrive any more

        def before(_call: Call) -> bool:
            if next(requests) == n:
                if not self.after:
                    kill()
                return self.after
            return False

        def acted(_call: Call, reply: Reply) -> Reply:
            kill()
            return reply

        self.server.fault("*", times=None, when=before, change=acted)
        command = [sys.executable, "-c", SAVE, *arguments]
        process.append(subprocess.Popen(command, env={**os.environ, **self.config.to_env()}))
        code = process[0].wait(60)
        self.server.clear()
        assert code in (0, -signal.SIGKILL)
        return code == 0


@pytest.mark.parametrize("after", [False, True], ids=["before it acts", "after it acted"])
def test_at_each_request_of_a_save(source: Path, tmp_path: Path, after: bool) -> None:
    with FaultyS3() as server:
        for n in count():
            doomed = Doomed(server, f"round-{n}", after)
            store, state = open_store(doomed.config), tmp_path / f"state-{n}"
            ended = doomed.run(n, "save", str(source), str(state))
            sent = server.count("UploadPart", "PutObject")
            mover = open_mover(doomed.config, Settings(part_size=5 * MIB))
            manifest = save(mover, source, "p", state=state)
            if ended:  # and the manifest alone was put again
                assert server.count("UploadPart", "PutObject") == sent + 1
            restore(mover, [(manifest.key, manifest.sha256)], tmp_path / f"target-{n}")
            assert seen(tmp_path / f"target-{n}") == seen(source)
            named = {manifest.key, *read_manifest(store, manifest.key, manifest.sha256).keys}
            assert {entry.key for entry in store.list("p/")} == named
            mover.close()
            if ended:
                break
    assert n > 8
    # Killed before it could write down the upload's id, it leaves an upload: an empty one, which takes no room.
    assert not [upload for upload in server.bucket.uploads.values() if upload.parts]


@pytest.mark.parametrize("after", [False, True], ids=["before it acts", "after it acted"])
def test_at_each_request_of_a_restore(source: Path, tmp_path: Path, after: bool) -> None:
    with FaultyS3() as server:
        mover = open_mover(server.config())
        manifest: Manifest = save(mover, source, "p")
        for n in count():
            target = tmp_path / f"{n}" / "target"
            ended = Doomed(server, "", after).run(n, "restore", str(target), manifest.key, manifest.sha256)
            assert target.exists() is ended
            if ended:
                assert seen(target) == seen(source)
                break
            restore(mover, [(manifest.key, manifest.sha256)], target)
            assert seen(target) == seen(source)
            assert [path.name for path in target.parent.iterdir()] == ["target"]
        mover.close()
    assert n >= 4


def test_what_was_sent_before_a_kill_is_not_sent_again(tmp_path: Path) -> None:
    source, state = tmp_path / "source", tmp_path / "state"
    source.mkdir()
    (source / "large").write_bytes(content("large", 50 * MIB))
    with FaultyS3() as server:
        doomed = Doomed(server, "", True)
        assert not doomed.run(8, "save", str(source), str(state))  # the upload, its note, then parts
        sent = server.count("UploadPart")
        assert 5 <= sent <= 8
        mover = open_mover(doomed.config, Settings(part_size=5 * MIB))
        manifest = save(mover, source, "p", state=state)
        assert server.count("UploadPart") <= 10 + 2  # what was under way when it was killed
        assert mover.tally.resumed_bytes >= 3 * 5 * MIB
        restore(mover, [(manifest.key, manifest.sha256)], tmp_path / "target")
        assert seen(tmp_path / "target") == seen(source)
        mover.close()
