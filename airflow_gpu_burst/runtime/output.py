"""
The trainer's output: to a local file, to our own stdout, and spooled to the store by byte offset.

The spool is what a task log is completed from when the live lines were missed. Its objects are
`<prefix>/output/g<generation>/<stream>/<offset>.log`: one stream per start of the runtime, named by its start
time for people and a nonce for uniqueness; the offset of the first byte names the object, so that a
reader that knows how far it came asks for exactly one key.

Both our stdout and the spool begin with the same line, `contract.header`, and are the same bytes from there on: whoever
follows the container's log knows which offset of the spool he has reached. So nothing else may write there meanwhile,
neither our own warnings nor tracebacks: `Output.capture_stderr`.
"""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from airflow_gpu_burst.errors import GpuBurstError
from airflow_gpu_burst.store import Store

CHUNK = 1 << 20
"""Largest object of the spool, in bytes: a reader holds one in memory."""


def stream_prefix(prefix: str, generation: int) -> str:
    """Where the streams of a generation lie."""
    return f"{prefix}/output/g{generation:06d}/"


def stream_name(rank: int, nonce: str) -> str:
    """A new stream's name: sorted by time, told apart by rank and nonce."""
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{rank:05d}-{nonce[:8]}"


def chunk_key(stream: str, offset: int) -> str:
    """Key of the piece of a stream (`<stream prefix><name>`) that begins at a byte offset."""
    return f"{stream}/{offset:015d}.log"


def end_key(stream: str) -> str:
    """Key of a failed stream's last word, JSON: code, reason, message. Its log only says that it is there."""
    folder, _, name = stream.rpartition("/")
    prefix, _, generation = folder.rpartition("/output/")
    return f"{prefix}/ends/{generation}/{name}.json"


ENDED = "ended with exit code"
"""How the last line of a failed run begins, after `gpu-burst: `."""


class Output:
    """
    Takes bytes from any thread; keeps them in order in one file and on our stdout.

    A full local disk must not stop the trainer: the pipe goes on being drained. What cannot be kept leaves a hole in
    the file (zero bytes, as long as what is lost), so that offsets remain the same as on stdout; how much it is is said
    in the hole once there is room.

    :param mirror: our stdout; None: the file only.
    :param header: the first bytes, see `contract.header`.
    """

    def __init__(self, path: Path, mirror: BinaryIO | None = None, header: bytes = b"") -> None:
        self._file = path.open("wb", buffering=0)
        self._mirror = mirror
        self._lock = threading.Lock()
        self._at_line_start = True
        self._size = 0
        self._hole: int | None = None
        self._tail = b""
        self.path = path
        self.write(header)
        self._tail = b""  # the header is no line of the trainer's

    def write(self, data: bytes) -> None:
        """Append bytes as they come."""
        if not data:
            return
        with self._lock:
            self._keep(data)

    def say(self, text: str) -> None:
        """A line of our own, never in the middle of one of the trainer's."""
        self.insert(f"gpu-burst: {text}\n")

    def insert(self, lines: str) -> None:
        """Whole lines, never in the middle of another."""
        data = lines.encode(errors="backslashreplace")
        with self._lock:
            self._keep(data if self._at_line_start else b"\n" + data)

    @contextmanager
    def capture_stderr(self) -> Iterator[None]:
        """Our own log lines, warnings and tracebacks come here instead of the container's log, while this lasts."""
        before, sys.stderr = sys.stderr, _Stderr(self)
        try:
            yield
        finally:
            mine, sys.stderr = sys.stderr, before
            mine.close()

    def tail(self) -> list[str]:
        """The last lines, for an error message."""
        with self._lock:
            text = self._tail.decode(errors="replace")
        return [line[-400:] for line in text.splitlines()[-20:]]

    def close(self) -> None:
        """No more bytes: what a thread still has to say is dropped."""
        with self._lock:
            self._file.close()

    def _keep(self, data: bytes) -> None:
        if self._file.closed:
            return
        self._at_line_start = data.endswith(b"\n")
        self._tail = (self._tail + data)[-16384:]
        self._store(data)
        if self._mirror is not None:
            try:
                self._mirror.write(data)
                self._mirror.flush()
            except OSError:
                self._mirror = None  # nobody reads us any more

    def _store(self, data: bytes) -> None:
        begin = self._size
        self._size += len(data)
        try:
            if self._hole is not None:
                note = f"\ngpu-burst: {begin - self._hole} bytes of output lost, disk full\n".encode()
                self._write_at(note[: begin - self._hole], self._hole)
                self._hole = None
            self._write_at(data, begin)
        except OSError:
            if self._hole is None:
                self._hole = max(begin, os.fstat(self._file.fileno()).st_size)

    def _write_at(self, data: bytes, offset: int) -> None:
        while data:
            written = os.pwrite(self._file.fileno(), data, offset)
            data, offset = data[written:], offset + written


class _Stderr(io.TextIOBase):
    """Text in pieces becomes whole lines of an output."""

    def __init__(self, output: Output) -> None:
        self._output, self._text = output, ""
        self._pieces = threading.Lock()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._pieces:
            lines, newline, self._text = (self._text + text).rpartition("\n")
        if newline:
            self._output.insert(lines + newline)
        return len(text)

    def close(self) -> None:
        if not self.closed and self._text:
            self.write("\n")
        super().close()


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
