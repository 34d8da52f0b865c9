"""Join records: how the ranks of one owner find each other. Hints, overwritten at will; the log decides."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from typing import Self

from airflow_gpu_burst.errors import ObjectMissing, RunLogError
from airflow_gpu_burst.runlog.log import RunLog
from airflow_gpu_burst.runlog.records import Seat, dumps

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class Member:
    """
    One boot of one rank.

    :param owner: UID of the object that owns the pod, as the pod sees it (controller or JobSet UID).
    :param nonce: new for every boot; made here unless given.
    """

    owner: str
    rank: int
    pod_uid: str
    nonce: str = field(default_factory=lambda: os.urandom(8).hex())

    def __post_init__(self) -> None:
        for name in ("owner", "pod_uid", "nonce"):
            if not _NAME.fullmatch(getattr(self, name)):
                raise RunLogError(f"member {name}={getattr(self, name)!r}: use a UID (letters, digits, '.', '-')")
        if self.rank < 0:
            raise RunLogError(f"member rank={self.rank}: ranks count from 0")

    @property
    def seat(self) -> Seat:
        """(pod UID, boot nonce)."""
        return (self.pod_uid, self.nonce)


@dataclass(frozen=True, kw_only=True)
class Join:
    """
    "This rank waits for an epoch later than `after`, and found these commits damaged."
    """

    seat: Seat
    after: int = 0
    damaged: tuple[int, ...] = ()

    @classmethod
    def read(cls, log: RunLog, owner: str, rank: int) -> Self | None:
        """The last one that was written for a rank; None if there is none, or what is there is none."""
        try:
            raw = json.loads(log.store.get(_key(log, owner, rank)))
            return cls(
                seat=(str(raw["pod_uid"]), str(raw["nonce"])),
                after=int(raw["after"]),
                damaged=tuple(int(seq) for seq in raw["damaged"]),
            )
        except (ObjectMissing, ValueError, KeyError, TypeError):
            return None

    def write(self, log: RunLog, owner: str, rank: int) -> None:
        """Over whatever is there."""
        pod_uid, nonce = self.seat
        data = {"pod_uid": pod_uid, "nonce": nonce, "after": self.after, "damaged": self.damaged}
        log.store.put(_key(log, owner, rank), dumps(data))


def _key(log: RunLog, owner: str, rank: int) -> str:
    return f"{log.prefix}/join/{owner}/{rank}"
