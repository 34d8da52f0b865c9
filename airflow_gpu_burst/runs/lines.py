"""Bytes in pieces become lines fit for a task log."""

from __future__ import annotations

import re

MAX_LINE = 8192
"""Longest line that goes into a task log, in bytes; the spool keeps the whole."""

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
        if not self.pending and not self.dropped and b"\r" not in data and b"::" not in data:
            return self._feed_plain(data)
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

    def _feed_plain(self, data: bytes) -> list[str]:
        """The usual case, a tenth of the work: whole lines without anything to mend."""
        whole, newline, rest = data.rpartition(b"\n")
        lines = whole.decode(errors="replace").split("\n") if newline else []
        if any(len(line) > MAX_LINE // 4 for line in lines):  # a character has up to 4 bytes
            lines = []
            for piece in whole.split(b"\n"):
                self._add(piece)
                lines.append(self._take())
        self._add(rest)
        return lines

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
