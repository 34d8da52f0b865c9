"""Folders to save and to compare, and movers that fail where a test wants them to."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from airflow_gpu_burst.checkpoint.packing import SMALL
from airflow_gpu_burst.transfer import Buffer, Mover, Span, Stored, Tally

MIB = 1 << 20
LARGE = SMALL + 4321


def content(seed: str, size: int) -> bytes:
    """Bytes that nothing else has."""
    block = (f"{seed}-" * 64).encode()
    return (block * (size // len(block) + 1))[:size]


def plant(folder: Path) -> Path:
    """A folder with one of everything."""
    (folder / "shards" / "deep").mkdir(parents=True)
    (folder / "nothing" / "inside").mkdir(parents=True)
    for name, size in {
        "config.json": 200,
        "shards/0.bin": LARGE,
        "shards/1.bin": 3 * MIB,
        "shards/deep/a..b": 1000,
        "shards/deep/ä ☃": SMALL - 1,
        "empty": 0,
        "exactly": SMALL,
    }.items():
        (folder / name).write_bytes(content(name, size))
    (folder / "config.json").chmod(0o600)
    (folder / "shards" / "0.bin").chmod(0o755)
    os.link(folder / "shards" / "0.bin", folder / "shards" / "zero.bin")
    (folder / "latest").symlink_to("shards/deep")
    (folder / "shards" / "up").symlink_to("../config.json")
    with (folder / "sparse").open("wb") as file:
        file.truncate(12 * MIB)
        file.seek(6 * MIB)
        file.write(content("sparse", 100_000))
    return folder


def seen(folder: Path) -> dict[str, object]:
    """All that must come back: names, contents, modes, links, and which names are one file."""
    found: dict[str, object] = {}
    names: dict[int, str] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            found[name] = ("link", os.readlink(path))
        elif stat.S_ISDIR(status.st_mode):
            found[name] = "folder"
        else:
            first = names.setdefault(status.st_ino, name)
            found[name] = (first, stat.S_IMODE(status.st_mode), path.read_bytes())
    return found


class Cut(Exception):
    """The process is gone."""


@dataclass
class Watched:
    """
    A mover that tells before it does something, and whom it tells may raise.

    :param before: told the verb and the key.
    """

    mover: Mover
    before: Callable[[str, str], None] = lambda _verb, _key: None
    done: list[tuple[str, str]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def uri(self) -> str:
        return self.mover.uri

    @property
    def tally(self) -> Tally:
        return self.mover.tally

    def _say(self, verb: str, key: str) -> None:
        self.before(verb, key)
        with self._lock:
            self.done.append((verb, key))

    def upload(self, key: str, path: Path, *, state: Path | None = None) -> Stored:
        self._say("upload", key)
        return self.mover.upload(key, path, state=state)

    def put(self, key: str, data: Buffer) -> Stored:
        self._say("put", key)
        return self.mover.put(key, data)

    def fetch(self, key: str, spans: Sequence[Span], *, etag: str = "") -> None:
        self._say("fetch", key)
        self.mover.fetch(key, spans, etag=etag)

    def copy(self, source: str, target: str, size: int, *, to: Mover | None = None) -> None:
        self._say("copy", target)
        self.mover.copy(source, target, size, to=to.mover if isinstance(to, Watched) else to)

    def delete(self, keys: Iterable[str]) -> None:
        some = list(keys)
        self._say("delete", " ".join(some))
        self.mover.delete(some)

    def abandon(self, key: str) -> None:
        self._say("abandon", key)
        self.mover.abandon(key)

    def close(self) -> None:
        self.mover.close()

    def keys(self, verb: str) -> list[str]:
        """What was done with `verb`, in order."""
        return [key for done, key in self.done if done == verb]


def dies_after(operations: int) -> Callable[[str, str], None]:
    """For `Watched.before`: so many operations go well, and no more."""
    left = [operations]
    lock = threading.Lock()

    def before(_verb: str, _key: str) -> None:
        with lock:
            if left[0] <= 0:
                raise Cut
            left[0] -= 1

    return before
