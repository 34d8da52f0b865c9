"""
Containers' logs of one run as they are written: one thread and one request for each container that runs.

A container's log is read from its beginning, with the kubelet's time stamps, which are taken off again. Where the pod
has a spool, a stream that breaks off is not resumed: the spool has every byte. Without one (raw manifests) it is
resumed at the stamp of the last line, and the lines of that very moment are counted, since a second holds many
(kubernetes-client/python#1351 is why the stamp goes as a query parameter).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from airflow_gpu_burst.errors import ClusterForbidden, GpuBurstError
from airflow_gpu_burst.routes import Piece

if TYPE_CHECKING:
    from airflow_gpu_burst.routes.kube import Kube
    from airflow_gpu_burst.workloads import PodFacts

BUFFER = 1 << 20
"""Bytes of one run that wait to be taken; then its containers' streams are not read further, and TCP holds them up."""
MAX_STREAMS = 256
"""Streams of one process. Beyond it, lines come from the spool."""
PARTIAL = 16384
"""Bytes of an unfinished line that are held back."""
RESUME_S = 2.0
"""Pause before a stream without a spool is taken up again."""

_streams = threading.BoundedSemaphore(MAX_STREAMS)


def _joined(pieces: list[Piece]) -> Piece:
    """A kubelet sends each line by itself: what lies together is handled together."""
    return replace(pieces[-1], data=b"".join(piece.data for piece in pieces))


class Stamps:
    """
    Takes the time stamps off pieces of a log, wherever they are cut.

    :param since: stamp and count: lines up to this stamp are left out, of those with this very stamp `count`.
    """

    def __init__(self, since: str = "", count: int = 0) -> None:
        self._skip, self._skip_count = since, count
        self._carry = b""
        self._within = False
        self._dropping = False
        self.last, self.count = since, count

    def strip(self, data: bytes) -> bytes:
        """The bytes that the container wrote."""
        data = self._carry + data
        self._carry = b""
        *whole, rest = data.split(b"\n")
        parts: list[bytes] = []
        for line in whole:
            kept = self._more(line) if self._within else self._line(line)
            self._within = False
            if kept is not None:
                parts += (kept, b"\n")
        if self._within:
            parts.append(self._more(rest) or b"")
        elif len(rest) > PARTIAL:
            # A line that has no end yet: what is there goes on, its stamp has been seen.
            kept = self._line(rest)
            self._within, self._dropping = True, kept is None
            parts.append(kept or b"")
        else:
            self._carry = rest
        return b"".join(parts)

    def rest(self) -> bytes:
        """What no newline ended."""
        carry, self._carry = self._carry, b""
        return b"" if self._within or not carry else self._line(carry) or b""

    def _more(self, data: bytes) -> bytes | None:
        return None if self._dropping else data

    def _line(self, line: bytes) -> bytes | None:
        stamp, _, text = line.partition(b" ")
        time = stamp.decode(errors="replace")
        if self._skip:
            if time < self._skip or (time == self._skip and self._skip_count > 0):
                self._skip_count -= time == self._skip
                return None
            self._skip = ""
        if time == self.last:
            self.count += 1
        else:
            self.last, self.count = time, 1
        return text


class PodLogs:
    """
    The logs of one run.

    :param wake: called when there is something to take.
    :param resume: streams that break off are taken up again (there is no spool).
    :param since: source → `Piece.time` up to which lines are known.
    """

    def __init__(
        self, kube: Kube, namespace: str, wake: Callable[[], None], *, resume: bool, since: Mapping[str, str]
    ) -> None:
        self._kube, self._namespace, self._wake = kube, namespace, wake
        self._resume, self._since = resume, since
        self._room = threading.Condition()
        self._pieces: list[Piece] = []
        self._size = 0
        self._notes: list[str] = []
        self._known: set[str] = set()
        self._over: set[str] = set()
        self._reading = 0
        self._open: dict[str, Callable[[], None]] = {}
        self._closed = False
        self._refused = False

    def want(self, pods: Iterable[PodFacts]) -> None:
        """Read the logs of these as well, from when they have started."""
        wanted = {f"{pod.uid}/{pod.container}/{pod.restarts}": pod for pod in pods}
        self._over |= self._known - wanted.keys()  # of a pod that is gone nothing more comes
        for source, pod in wanted.items():
            if pod.terminated:
                self._over.add(source)
            if not pod.started or source in self._known or self._closed or self._refused:
                continue
            if not _streams.acquire(blocking=False):
                self._say(f"more than {MAX_STREAMS} logs are followed in this process; the rest come from the spool")
                return
            self._known.add(source)
            with self._room:
                self._reading += 1
            threading.Thread(
                target=self._read, args=(source, pod), name=f"gpu-burst-log-{pod.name}", daemon=True
            ).start()

    def take(self) -> list[Piece]:
        """What came since the last call."""
        with self._room:
            pieces, self._pieces, self._size = self._pieces, [], 0
            self._room.notify_all()
        return [_joined(list(run)) for _, run in groupby(pieces, key=lambda piece: (piece.source, piece.ended))]

    def reading(self) -> bool:
        """Whether more may come."""
        with self._room:
            return bool(self._reading or self._pieces)

    def notes(self) -> list[str]:
        """Things to say, each once."""
        with self._room:
            notes, self._notes = self._notes, []
        return notes

    def close(self) -> None:
        """End all streams."""
        with self._room:
            self._closed = True
            closers = list(self._open.values())
            self._room.notify_all()
        for closer in closers:
            closer()

    def _read(self, source: str, pod: PodFacts) -> None:
        time, _, count = self._since.get(source, "").partition(" ")
        stamps = Stamps(time, int(count or 0))
        try:
            while not self._closed:
                self._stream(source, pod, stamps)
                if not self._resume or source in self._over or self._closed or self._refused:
                    break
                with self._room:
                    self._room.wait(RESUME_S)
                stamps = Stamps(stamps.last, stamps.count)
        finally:
            _streams.release()
            with self._room:
                self._reading -= 1
            self._put(Piece(source=source, pod=pod.name, rank=pod.rank, ended=True))

    def _stream(self, source: str, pod: PodFacts, stamps: Stamps) -> None:
        """One request, to its end or until it breaks off."""
        try:
            with self._kube.log(
                self._namespace, pod.name, pod.container, follow=True, timestamps=True, since_time=stamps.last
            ) as log:
                with self._room:
                    if self._closed:
                        return
                    self._open[source] = log.close
                for data in log:
                    if text := stamps.strip(data):
                        self._put(self._piece(source, pod, stamps, text))
                    if self._closed:
                        return
        except ClusterForbidden as error:
            self._refused = True  # asking again, or for another pod, does not help
            behind = "are missing here" if self._resume else "come from the spool, some seconds later"
            self._say(f"lines {behind}: {error}")
        except GpuBurstError:
            return  # broken off: the spool, or the next request, has the rest
        finally:
            with self._room:
                self._open.pop(source, None)
        if text := stamps.rest():
            self._put(self._piece(source, pod, stamps, text))

    def _piece(self, source: str, pod: PodFacts, stamps: Stamps, data: bytes) -> Piece:
        time = f"{stamps.last} {stamps.count}"
        return Piece(source=source, pod=pod.name, rank=pod.rank, data=data, time=time)

    def _put(self, piece: Piece) -> None:
        with self._room:
            while self._size > BUFFER and not self._closed:
                self._room.wait(1.0)
            first = not self._pieces
            self._pieces.append(piece)
            self._size += len(piece.data)
        if first:
            self._wake()

    def _say(self, note: str) -> None:
        with self._room:
            if note not in self._known:
                self._known.add(note)
                self._notes.append(note)
        self._wake()
