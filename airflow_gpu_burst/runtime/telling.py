"""Progress of a transfer as lines of the pod's log: seldom, with rate and time left."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_S = 10.0
"""Most checkpoints are through before: then the line at the end says it all."""
EVERY_S = 30.0
_GB = 1e9


class Telling:
    """
    Says how far one transfer is.

    :param what: which one, e.g. `checkpoint 1200`.
    :param say: prints a line.
    """

    def __init__(self, what: str, say: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._say, self._clock = what, say, clock
        self._began = clock()
        self._due = self._began + FIRST_S
        self._last = (self._began, 0)
        self.moved_at = self._began
        self._done = -1

    @property
    def seconds(self) -> float:
        """Since it began."""
        return self._clock() - self._began

    def progress(self, done: int, total: int) -> None:
        """So many bytes of so many are through."""
        now = self._clock()
        if done != self._done:
            self._done, self.moved_at = done, now
        if now < self._due:
            return
        at, before = self._last
        self._say(f"{self._what}: {progress_line(done, total, (done - before) / max(now - at, 1e-9))}")
        self._last, self._due = (now, done), now + EVERY_S


def progress_line(done: int, total: int, rate: float) -> str:
    """
    E.g. `3.1 of 12.0 GB, 1.2 GB/s, 8 s left`. Pure.

    :param rate: bytes per second since the last line, which is what people want to know of a store that slows down.
    """
    unit, name = (_GB, "GB") if total >= _GB else (1e6, "MB")
    left = f"{max(0, total - done) / rate:.0f} s left" if rate > 0 else "nothing moves"
    return f"{done / unit:.1f} of {total / unit:.1f} {name}, {rate_text(rate)}, {left}"


def moved(size: int, seconds: float) -> str:
    """E.g. `12.0 GB in 9.8 s, 1.2 GB/s`. Pure."""
    return f"{size_text(size)} in {seconds:.1f} s, {rate_text(size / max(seconds, 1e-9))}"


def size_text(size: float) -> str:
    """Bytes, rounded for people. Pure."""
    for unit, name in ((1e12, "TB"), (_GB, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size:.0f} bytes"


def rate_text(rate: float) -> str:
    """Bytes per second, rounded for people. Pure."""
    return f"{size_text(rate)}/s"
