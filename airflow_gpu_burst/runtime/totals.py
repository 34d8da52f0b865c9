"""What checkpoints cost one run: the numbers that its result carries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_TALLIED = ("retries", "throttled", "declined", "resumed_bytes")


@dataclass
class Totals:
    """
    Of one rank, over all epochs that it took part in.

    :param committed: checkpoints; `bytes` are those of all ranks.
    :param saved_bytes: of this rank, in `seconds`.
    :param skipped: gave way to a newer one, since the upload was behind.
    :param failed: could not be saved.
    :param stalls: seconds of each call that the trainer waited for.
    :param restored_bytes: in `restore_s` seconds; `reused_bytes` of them lay on this node already.
    """

    committed: int = 0
    bytes: int = 0
    saved_bytes: int = 0
    seconds: float = 0.0
    skipped: int = 0
    failed: int = 0
    restored_bytes: int = 0
    reused_bytes: int = 0
    restore_s: float = 0.0
    stalls: list[float] = field(default_factory=list)

    def stalled(self, seconds: Sequence[float]) -> None:
        """An epoch of the trainer is over."""
        self.stalls.extend(seconds)

    def to_dict(self, tally: Mapping[str, int], restarts: int) -> dict[str, Any] | None:
        """
        For the run's result; None: there was no checkpoint. Pure.

        :param tally: what the agent moved, with what trouble.
        :param restarts: how often the agent died.
        """
        if not (self.committed or self.saved_bytes or self.failed or self.restored_bytes or self.stalls):
            return None
        counted = Counter(tally)
        return {
            "committed": self.committed,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 3),
            "rate": round(self.saved_bytes / self.seconds) if self.seconds else 0,
            "stall_s": round(sum(self.stalls), 6),
            "stall_max_s": round(max(self.stalls, default=0.0), 6),
            "skipped": self.skipped,
            "failed": self.failed,
            "restored_bytes": self.restored_bytes,
            "reused_bytes": self.reused_bytes,
            "restore_s": round(self.restore_s, 3),
            "restarts": restarts,
            **{name: counted[name] for name in _TALLIED},
        }
