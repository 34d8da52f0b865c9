"""
The trainer's output: to a local file, to our own stdout, and spooled to the store by byte offset.

The spool is what a task log is completed from when the live lines were missed. Its objects are
`<prefix>/output/g<generation>/<stream>/<offset>.log`: one stream per start of the runtime, named by its start
time for people and a nonce for uniqueness; the offset of the first byte names the object, so that a
reader that knows how far it came asks for exactly one key.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from airflow_gpu_burst.errors import GpuBurstError
from airflow_gpu_burst.store import Store

CHUNK = 1 << 20
"""Largest object of the spool, in bytes: a reader holds one in memory."""


def stream_prefix(prefix: str, generation: int) -> str:
    """Where the streams of a generation lie."""
    return f"{prefix}/output/g{generation:06d}/"


def chunk_key(stream: str, offset: int) -> str:
    """Key of the piece of a stream (`<stream prefix><name>`) that begins at a byte offset."""
    return f"{stream}/{offset:015d}.log"


class Output:
    """
    Takes bytes from any thread; keeps them in order in one file and on our stdout.

    A full local disk must not stop the trainer: what cannot be kept is counted and said once there is
    room, and the pipe goes on being drained.
    """

    def __init__(self, path: Path, mirror: BinaryIO | None = None) -> None:
        self._file = path.open("wb", buffering=0)
        self._mirror = mirror
        self._lock = threading.Lock()
        self._at_line_start = True
        self._lost = 0
        self._tail = b""
        self.path = path

    def write(self, data: bytes) -> None:
        """Append bytes as they come."""
        if not data:
            return
        with self._lock:
            self._keep(data)

    def say(self, text: str) -> None:
        """A line of our own, never in the middle of one of the trainer's."""
        line = f"gpu-burst: {text}\n".encode()
        with self._lock:
            self._keep(line if self._at_line_start else b"\n" + line)

    def tail(self) -> list[str]:
        """The last lines, for an error message."""
        with self._lock:
            text = self._tail.decode(errors="replace")
        return [line[-400:] for line in text.splitlines()[-20:]]

    def close(self) -> None:
        """No more bytes."""
        self._file.close()

    def _keep(self, data: bytes) -> None:
        self._at_line_start = data.endswith(b"\n")
        self._tail = (self._tail + data)[-16384:]
        try:
            if self._lost:
                self._file.write(f"\ngpu-burst: {self._lost} bytes of output lost, disk full\n".encode())
                self._lost = 0
            self._file.write(data)
        except OSError:
            self._lost += len(data)
        if self._mirror is not None:
            try:
                self._mirror.write(data)
                self._mirror.flush()
            except OSError:
                self._mirror = None  # nobody reads us any more


def send_rest(store: Store, path: Path, stream: str) -> None:
    """
    Spool what a killed runtime left unsent in its output file.

    :param stream: key prefix of its stream (see `chunk_key`), without the slash at the end.
    """
    sent = sum(entry.size for entry in store.list(f"{stream}/"))
    with path.open("rb") as file:
        file.seek(sent)
        while data := file.read(CHUNK):
            store.put(chunk_key(stream, sent), data)
            sent += len(data)


class Spooler(threading.Thread):
    """
    Sends what is new in the output file to the store while the run lasts.

    The pause between two objects grows with the run's age, from 1 to 10 s, so that the first lines show at
    once and a run of days does not make a hundred thousand objects. A store that is down only delays:
    the file keeps what has not been sent.
    """

    def __init__(
        self,
        store: Store,
        path: Path,
        key: Callable[[int], str],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name="gpu-burst-spooler", daemon=True)
        self._store, self._path, self._key, self._clock = store, path, key, clock
        self._sent = 0
        self._stop_event = threading.Event()

    def run(self) -> None:
        """Until `finish` is called."""
        began = self._clock()
        while not self._stop_event.wait(min(10.0, 1.0 + (self._clock() - began) / 60)):
            self._send_new()

    def finish(self, timeout_s: float = 30.0) -> bool:
        """Send the rest; False when the store did not take it within the time."""
        self._stop_event.set()
        if self.is_alive():
            self.join(timeout_s)
            if self.is_alive():
                return False  # in the middle of a piece: a second sender would skip it
        deadline = self._clock() + timeout_s
        while not self._send_new():
            if self._clock() > deadline:
                return False
            time.sleep(0.5)
        return True

    def _send_new(self) -> bool:
        """True when everything up to now is in the store."""
        with self._path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            while self._sent < size:
                file.seek(self._sent)
                data = file.read(min(CHUNK, size - self._sent))
                try:
                    self._store.put(self._key(self._sent), data)
                except GpuBurstError:
                    return False
                self._sent += len(data)
        return True
