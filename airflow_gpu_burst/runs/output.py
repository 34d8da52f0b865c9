"""Reading a run's output back from the spool, as lines fit for a task log."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeGuard

from airflow_gpu_burst.errors import GpuBurstError, ObjectMissing
from airflow_gpu_burst.runtime.output import chunk_key, stream_prefix
from airflow_gpu_burst.store import Store

MAX_LINE = 8192
"""Longest line that goes into a task log, in bytes; the spool keeps the whole."""

STEP = 4
"""Objects of the spool that one `read` takes: 4 MiB at most."""

_GROUP = re.compile(r"::(?=(group|endgroup)::)")


class LineAssembler:
    """
    Bytes in pieces become lines.

    Cut after MAX_LINE bytes with a note; of a progress bar (`\\r`) only the last state of each piece is kept;
    bytes that are not UTF-8 are replaced; a line cannot open or close one of Airflow's log groups.
    """

    def __init__(self, pending: bytes = b"", dropped: int = 0) -> None:
        self.pending = pending
        self.dropped = dropped

    def feed(self, data: bytes) -> list[str]:
        """The lines that these bytes complete."""
        *complete, rest = data.split(b"\n")
        lines = []
        for piece in complete:
            self._add(piece)
            lines.append(self._take())
        self._add(rest)
        return lines

    def flush(self) -> list[str]:
        """The line that was begun, at the end of a stream."""
        return [self._take()] if self.pending or self.dropped else []

    def _add(self, piece: bytes) -> None:
        line = self.pending + piece
        if b"\r" in line:
            line = line.rstrip(b"\r").rpartition(b"\r")[2] + (b"\r" if line.endswith(b"\r") else b"")
        self.pending, cut = line[:MAX_LINE], line[MAX_LINE:]
        self.dropped += len(cut)

    def _take(self) -> str:
        text = self.pending.rstrip(b"\r").decode(errors="replace")
        if self.dropped:
            text += f" … [{self.dropped} more bytes of this line are in the store only]"
        self.pending, self.dropped = b"", 0
        return _GROUP.sub(": :", text)


class OutputReader:
    """
    Follows the streams of one generation, from a cursor that survives its reader.

    :param cursor: what `cursor` gave to an earlier reader; None: from the start.
    """

    def __init__(self, store: Store, prefix: str, generation: int, cursor: Mapping[str, Any] | None = None) -> None:
        self._store, self._prefix, self._generation = store, prefix, generation
        state = cursor if _sound(cursor) else {}
        self._stream: str | None = state.get("stream")
        self._offset = int(state.get("offset", 0))
        self._streams: list[str] = []
        self.exhausted = False
        """After `read(ended=True)`: whether that was all."""
        self._lines = LineAssembler(state.get("pending", "").encode("latin-1"), int(state.get("dropped", 0)))

    @property
    def cursor(self) -> dict[str, Any]:
        """Where this reader is, JSON-safe."""
        return {
            "stream": self._stream,
            "offset": self._offset,
            "pending": self._lines.pending.decode("latin-1"),
            "dropped": self._lines.dropped,
        }

    def read(self, *, ended: bool = False) -> list[str]:
        """
        What is new, at most STEP objects of it, so that a flood of output never sits in memory at once.

        :param ended: the run is over: go on to the last stream, and give out the line that no newline ends.
        """
        if self._stream is None or ended:
            self._streams = self._list()
            self._stream = self._stream or next(iter(self._streams), None)
        lines: list[str] = []
        self.exhausted = False
        for taken in range(STEP):
            try:
                data = self._next()
            except GpuBurstError:
                if not taken:
                    raise
                return lines  # what came before it is not lost; the next read meets the error again
            if data is not None:
                lines += self._lines.feed(data)
            elif not ended or not self._advance():
                self.exhausted = True
                return lines + (self._lines.flush() if ended else [])
            else:
                lines += self._lines.flush()
        return lines

    def _advance(self) -> bool:
        """Go on to the next stream; False when there is none."""
        later = [stream for stream in self._streams if self._stream is not None and stream > self._stream]
        if not later:
            return False
        self._stream, self._offset = later[0], 0
        return True

    def _next(self) -> bytes | None:
        if self._stream is None:
            return None
        stream = f"{stream_prefix(self._prefix, self._generation)}{self._stream}"
        try:
            data = self._store.get(chunk_key(stream, self._offset))
        except ObjectMissing:
            return None
        self._offset += len(data)
        return data

    def _list(self) -> list[str]:
        prefix = stream_prefix(self._prefix, self._generation)
        names = {entry.key.removeprefix(prefix).partition("/")[0] for entry in self._store.list(prefix)}
        return sorted(names)


def _sound(cursor: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether this is what a reader left: a cursor is a hint, and a damaged one no reason to stop."""
    return (
        isinstance(cursor, Mapping)
        and isinstance(cursor.get("stream"), str)
        and re.fullmatch(r"[0-9A-Za-z-]+", cursor["stream"]) is not None
        and isinstance(cursor.get("offset"), int)
        and isinstance(cursor.get("dropped"), int)
        and isinstance(cursor.get("pending"), str)
        and all(ord(character) < 256 for character in cursor["pending"])
    )


def last_lines(store: Store, prefix: str, generation: int, count: int = 15) -> list[str]:
    """The end of a run's output, for an error message; empty when the store does not give it."""
    try:
        keys = [entry.key for entry in store.list(stream_prefix(prefix, generation))]
        data = b"".join(store.get(key) for key in keys[-2:])
    except GpuBurstError:
        return []
    lines = LineAssembler()
    return [line[:400] for line in [*lines.feed(data), *lines.flush()][-count:]]
