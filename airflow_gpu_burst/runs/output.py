"""
The output of a run as lines of a task log: live where nothing is missing, else from the spool.

Every start of the runtime writes one *stream*: the same bytes to its container's log and, by byte offset, to the spool.
Its first line names the stream, so that whoever reads the container's log from there knows the offset of every byte.
A live source that breaks off is not resumed: the spool goes on from the very byte, some seconds behind.
Containers without the runtime (raw manifests) have no spool; their lines are printed as they come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_gpu_burst import contract
from airflow_gpu_burst.errors import GpuBurstError, ObjectMissing
from airflow_gpu_burst.routes import Piece
from airflow_gpu_burst.runs.lines import LineAssembler
from airflow_gpu_burst.runtime.output import chunk_key, end_key, stream_prefix
from airflow_gpu_burst.store import Store

STEP = 4
"""Objects of the spool that one `read` takes: 4 MiB at most."""
HEAD = 64 * 1024
"""Bytes of a container's log that may come before the line that names its stream; without it, its log was rotated."""

_STREAM = re.compile(r"[0-9A-Za-z]+-(\d{5})-[0-9A-Za-z]+")


@dataclass
class Stream:
    """
    One start of the runtime.

    :param offset: bytes of it that were given out.
    :param live: the source that delivers it now, if any.
    :param done: the run is over and all of it was given out.
    """

    name: str
    offset: int = 0
    lines: LineAssembler = field(default_factory=LineAssembler)
    live: str = ""
    done: bool = False
    aligned: bool = True
    """Whether an object of the spool begins at `offset`, once there is one: live pieces are cut elsewhere."""

    @property
    def rank(self) -> int:
        """From its name; 0 where it has none."""
        found = _STREAM.fullmatch(self.name)
        return int(found[1]) if found else 0

    def take(self, data: bytes) -> list[str]:
        """The lines that the next bytes complete, but for the line that names the stream."""
        begins = self.offset == 0
        self.offset += len(data)
        if begins:
            first, newline, rest = data.partition(b"\n")
            if newline and contract.parse_header(first):
                data = rest
        return self.lines.feed(data)


@dataclass
class _Source:
    """
    A container's log as it comes.

    :param position: offset in its stream of the next byte; meaningless before `stream` is known.
    :param head: what came before the line that names the stream.
    """

    pod: str
    stream: Stream | None = None
    position: int = 0
    head: bytes = b""
    lines: LineAssembler = field(default_factory=LineAssembler)
    time: str = ""
    ignored: bool = False


class OutputReader:
    """
    Gives out the lines of one generation, each once, from a cursor that survives its reader.

    :param cursor: what `cursor` gave to an earlier reader; None: from the start.
    :param wanted: which ranks are printed.
    :param labelled: lines begin with `[rank]` (or the pod's name, without ranks).
    :param spooled: False: a raw manifest, whose containers are not known to have the runtime.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        generation: int,
        cursor: Mapping[str, Any] | None = None,
        *,
        wanted: Callable[[int], bool] = lambda rank: True,
        labelled: bool = False,
        spooled: bool = True,
    ) -> None:
        self._store, self._prefix, self._generation = store, prefix, generation
        self._wanted, self._labelled, self._spooled = wanted, labelled, spooled
        self._streams: dict[str, Stream] = {}
        self._sources: dict[str, _Source] = {}
        self._times: dict[str, str] = {}
        self.exhausted = False
        """After `read(ended=True)`: whether that was all."""
        self._resume(cursor)

    @property
    def cursor(self) -> dict[str, Any]:
        """Where this reader is, JSON-safe."""
        return {
            "streams": {
                stream.name: {
                    "offset": stream.offset,
                    "pending": stream.lines.pending.decode("latin-1"),
                    "dropped": stream.lines.dropped,
                    "aligned": stream.aligned,
                }
                for stream in self._streams.values()
            },
            "times": self.times,
        }

    @property
    def times(self) -> dict[str, str]:
        """Source → stamp up to which its lines were given out; only of those without a stream."""
        known = {name: source.time for name, source in self._sources.items() if source.time and not source.stream}
        return {**self._times, **known}

    def feed(self, piece: Piece) -> list[str]:
        """The lines that a live piece completes, and that were not given out before."""
        source = self._sources.setdefault(piece.source, _Source(pod=piece.pod))
        source.time = piece.time or source.time
        lines = [] if source.ignored else self._place(piece.source, source, piece.data)
        if piece.ended:
            lines += self._leave(source)
            del self._sources[piece.source]
            if source.time and not source.stream:
                self._times[piece.source] = source.time
        return lines

    def live(self) -> bool:
        """Whether every stream that is known comes live, and at least one does: then the spool can wait."""
        going = [stream for stream in self._streams.values() if not stream.done and self._wanted(stream.rank)]
        return bool(going) and all(stream.live for stream in going)

    def end_word(self) -> dict[str, Any] | None:
        """
        What the runtime left as its last word, code, reason and message, if the newest stream has failed.

        :raises StoreError: cannot tell.
        """
        name = max(self._streams, default="")
        try:
            return _word(self._store.get(end_key(f"{stream_prefix(self._prefix, self._generation)}{name}")))
        except ObjectMissing:
            return None

    def read(self, *, ended: bool = False, find: bool = False) -> list[str]:
        """
        What the spool has beyond what was given out, at most STEP objects of it, so that a flood of output never
        sits in memory at once.

        :param ended: the run is over: go on to the last stream, and give out the lines that no newline ends.
        :param find: look for streams that were begun since, too; otherwise only while none is known.
        """
        self.exhausted = False
        if ended or find or not self._streams:
            self._find()
        lines: list[str] = []
        left = STEP
        for stream in sorted(self._streams.values(), key=lambda stream: stream.name):
            if stream.done or (stream.live and not ended) or not self._wanted(stream.rank):
                continue
            left = self._drain(stream, left, lines, ended)
            if not left:
                return lines
        self.exhausted = True
        return lines

    def _drain(self, stream: Stream, left: int, lines: list[str], ended: bool) -> int:
        """Take up to `left` objects of one stream; how many more may be taken."""
        while left:
            try:
                data = self._next(stream)
            except GpuBurstError:
                if left == STEP and not lines:
                    raise
                return 0  # what came before it is not lost; the next read meets the error again
            if data is None:
                if ended:
                    stream.done = True
                    lines += self._label(stream, stream.lines.flush())
                return left
            lines += self._label(stream, stream.take(data))
            stream.aligned = True
            left -= 1
        return left

    def _next(self, stream: Stream) -> bytes | None:
        key = chunk_key(f"{stream_prefix(self._prefix, self._generation)}{stream.name}", stream.offset)
        try:
            return self._store.get(key)
        except ObjectMissing:
            return None if stream.aligned else self._within(stream)

    def _within(self, stream: Stream) -> bytes | None:
        """The rest of the object that holds the next byte."""
        prefix = f"{stream_prefix(self._prefix, self._generation)}{stream.name}/"
        for entry in self._store.list(prefix):
            begins = _offset(entry.key)
            if begins <= stream.offset < begins + entry.size:
                return self._store.get(entry.key)[stream.offset - begins :]
        return None

    def _find(self) -> None:
        prefix = stream_prefix(self._prefix, self._generation)
        for name in {entry.key.removeprefix(prefix).partition("/")[0] for entry in self._store.list(prefix)}:
            self._streams.setdefault(name, Stream(name))

    def _place(self, name: str, source: _Source, data: bytes) -> list[str]:
        if source.stream is None:
            lines, data = self._attach(name, source, data)
            if source.stream is None:
                return lines
        else:
            lines = []
        stream = source.stream
        known = max(0, stream.offset - source.position)
        source.position += len(data)
        if known < len(data) and not stream.done:
            lines += self._label(stream, stream.take(data[known:]))
            stream.aligned = False
        return lines

    def _attach(self, name: str, source: _Source, data: bytes) -> tuple[list[str], bytes]:
        """Look for the line that names the stream; the lines to print, and the bytes from that line on."""
        head = source.head + data
        begins = 0
        while (ends := head.find(b"\n", begins)) >= 0:
            if found := contract.parse_header(head[begins:ends]):
                stream = self._streams.setdefault(found[0], Stream(found[0]))
                if not self._wanted(stream.rank):
                    source.ignored = True
                    return [], b""
                source.stream, source.head, stream.live = stream, b"", name
                return self._plain(source, head[:begins]), head[begins:]
            begins = ends + 1
        if not self._spooled:
            source.head = head[begins:]
            return self._plain(source, head[:begins]), b""
        source.head = head
        if len(head) > HEAD:
            source.ignored, source.head = True, b""
        return [], b""

    def _leave(self, source: _Source) -> list[str]:
        """A source has ended: its stream goes on from the spool. One that never named a stream says what it had."""
        if source.stream is not None:
            source.stream.live = ""
            return []
        return self._plain(source, source.head) + self._name(source.pod, source.lines.flush())

    def _plain(self, source: _Source, data: bytes) -> list[str]:
        return self._name(source.pod, source.lines.feed(data)) if data else []

    def _label(self, stream: Stream, lines: list[str]) -> list[str]:
        return self._name(str(stream.rank), lines)

    def _name(self, name: str, lines: list[str]) -> list[str]:
        return [f"[{name}] {line}" for line in lines] if self._labelled else lines

    def _resume(self, cursor: Mapping[str, Any] | None) -> None:
        """A cursor is a hint, and a damaged one no reason to stop."""
        if not isinstance(cursor, Mapping):
            return
        streams, times = cursor.get("streams"), cursor.get("times")
        for name, state in streams.items() if isinstance(streams, Mapping) else ():
            if _sound(name, state):
                lines = LineAssembler(state["pending"].encode("latin-1"), state["dropped"])
                aligned = bool(state.get("aligned"))
                self._streams[name] = Stream(name, offset=state["offset"], lines=lines, aligned=aligned)
        if isinstance(times, Mapping):
            self._times = {str(name): str(time) for name, time in times.items()}


def _word(data: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(data)
        return {"code": int(found["code"]), "reason": str(found["reason"]), "message": str(found["message"])}
    except (ValueError, KeyError, TypeError):
        return None


def _sound(name: Any, state: Any) -> bool:
    return (
        isinstance(name, str)
        and _STREAM.fullmatch(name) is not None
        and isinstance(state, Mapping)
        and isinstance(state.get("offset"), int)
        and isinstance(state.get("dropped"), int)
        and isinstance(state.get("pending"), str)
        and all(ord(character) < 256 for character in state["pending"])
    )


def _offset(key: str) -> int:
    digits = key.rpartition("/")[2].removesuffix(".log")
    return int(digits) if digits.isdigit() else -1


def ranks_wanted(logs: str) -> Callable[[int], bool]:
    """
    Which ranks a `logs` setting names: `all`, `rank0`, `none`, or numbers and ranges such as `0,4-7`.

    :raises SpecError: it is none of these.
    """
    from airflow_gpu_burst.errors import SpecError

    if logs in ("all", "none"):
        return lambda rank: logs == "all"
    chosen: set[int] = set()
    for part in logs.removeprefix("rank").split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise SpecError(f"logs={logs!r}: use 'all', 'rank0', 'none', or ranks such as '0,4-7'")
        chosen |= set(range(int(first), int(last or first) + 1))
    return lambda rank: rank in chosen


def last_lines(store: Store, prefix: str, generation: int, count: int = 15) -> list[str]:
    """The end of a run's output, of each of the last starts, for an error message; empty when the store has none."""
    streams: dict[str, list[str]] = {}
    lines: list[str] = []
    try:
        for entry in store.list(stream_prefix(prefix, generation)):
            streams.setdefault(entry.key.rpartition("/")[0], []).append(entry.key)
        latest = list(streams.items())[-4:]
        for name, keys in latest:
            assembler = LineAssembler()
            found = assembler.feed(b"".join(store.get(key) for key in keys[-2:])) + assembler.flush()
            found = [line for line in found if not contract.parse_header(line.encode())]
            label = f"[{Stream(name.rpartition('/')[2]).rank}] " if len(latest) > 1 else ""
            lines += [f"{label}{line[:400]}" for line in found[-max(5, count // len(latest)) :]]
    except GpuBurstError:
        return []
    return lines
