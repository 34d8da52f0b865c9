"""Reading and appending: rules 1 and 2 of the protocol. The only module here that talks to the store."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import TypedDict, TypeVar

from airflow_gpu_burst.errors import ObjectExists, ObjectMissing, RunLogError, StoreUnavailable
from airflow_gpu_burst.runlog.history import History
from airflow_gpu_burst.runlog.records import Record, decode, encode
from airflow_gpu_burst.store import Store

R = TypeVar("R", bound=Record)
_T = TypeVar("_T")

_MANY = 16  # records to fetch at once by threads; below, one by one costs less
_THREADS = 8


class Stamp(TypedDict):
    """What every record carries besides its content."""

    id: str
    at: str


def _utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _random_id() -> str:
    return os.urandom(16).hex()


class RunLog:
    """
    The log of one run key. Safe for threads; remembers what it has read, since records never change.

    :param prefix: of the run key in the store (`RunKey.prefix`); records lie in `<prefix>/log/`.
    :param clock: monotonic seconds.
    :param now: wall clock, ISO 8601, for people.
    :param patience_s: how long `append` goes on asking a store that does not answer.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], str] = _utc_now,
        new_id: Callable[[], str] = _random_id,
        patience_s: float = 120.0,
    ) -> None:
        self.store = store
        self.prefix = prefix
        self.clock = clock
        self.sleep = sleep
        self._now = now
        self._new_id = new_id
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._known = History()

    def stamp(self) -> Stamp:
        """A fresh record id, and the time."""
        return {"id": self._new_id(), "at": self._now()}

    @property
    def known(self) -> History:
        """What has been read so far. Asks nobody."""
        return self._known

    def read(self) -> History:
        """
        Everything up to the tail: the next place is asked for until the store says that nothing is there.

        StoreForbidden and StoreUnavailable mean "cannot tell" and are passed on.
        """
        history = self._known
        listed = 0
        if not history.tail:
            listed = self._listed()
            if listed >= _MANY:
                history = self._fetch(listed)
        history = self._follow(history)
        if listed > history.tail and self._is_there(listed):
            # Asked once more, since writers are at work. A record behind a gap is damage, not staleness.
            history = self._follow(history)
            if listed > history.tail:
                raise RunLogError(
                    f"record {history.tail + 1} of {self.prefix}/log is gone, though {listed} is there. Restore "
                    "the object from a version or a backup, or delete everything of the run key"
                )
        return self._remember(history)

    def append(self, build: Callable[[History], R]) -> R:
        """
        Append what `build` makes of the log as it is, and return it with its place.

        `build` is called again whenever somebody else was faster, and every precondition is checked again
        with it; it raises what shall stop it. A record that it takes from the log is returned as it is
        (the thing was done before). StoreUnavailable: still not known, after long asking, whether the
        record was written; calling again is safe, if `build` recognises what it wants in the log.
        """
        deadline = self.clock() + self._patience_s
        while True:
            history = self._patiently(self.read, deadline)
            record = build(history)
            if record.seq:
                return record
            record = replace(record, seq=history.tail + 1)
            history.permit(record)
            found = self._write(record, deadline)
            if found.id == record.id:
                self._remember(history.then(record))
                return record
            # Somebody else has this place: take that in, and ask everything anew.
            self._remember(history.then(found))

    def _write(self, record: Record, deadline: float) -> Record:
        """Who has the place of `record` now: repeated, with the same bytes, until it is known."""
        key, data = self._key(record.seq), encode(record)

        def attempt() -> Record:
            try:
                self.store.create(key, data)
            except ObjectExists:
                try:
                    return self._get(record.seq)
                except ObjectMissing as error:
                    raise StoreUnavailable(f"{key} exists, and cannot be read") from error
            return record

        return self._patiently(attempt, deadline)

    def _patiently(self, attempt: Callable[[], _T], deadline: float) -> _T:
        pause = 0.1
        while True:
            try:
                return attempt()
            except StoreUnavailable as error:
                if self.clock() >= deadline:
                    raise StoreUnavailable(
                        f"gave up after {self._patience_s:.0f} s, not knowing whether the record is in "
                        f"{self.prefix}/log: {error}"
                    ) from error
            self.sleep(pause)
            pause = min(2 * pause, 5.0)

    def _key(self, seq: int) -> str:
        return f"{self.prefix}/log/{seq:012d}.json"

    def _get(self, seq: int) -> Record:
        return decode(self.store.get(self._key(seq)), seq)

    def _remember(self, history: History) -> History:
        """The longer of what is known; another thread may have read on."""
        with self._lock:
            if history.tail > self._known.tail:
                self._known = history
            return history

    def _listed(self) -> int:
        """The highest place in a listing. A hint: it saves time, and nothing is decided by it."""
        try:
            names = [e.key.rpartition("/")[2].removesuffix(".json") for e in self.store.list(f"{self.prefix}/log/")]
        except StoreUnavailable:
            return 0
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def _fetch(self, listed: int) -> History:
        """Records 1 to `listed` at once, as far as they are there."""
        from concurrent.futures import ThreadPoolExecutor

        def get(seq: int) -> Record | None:
            try:
                return self._get(seq)
            except ObjectMissing:
                return None

        history = History()
        with ThreadPoolExecutor(_THREADS) as pool:
            for record in pool.map(get, range(1, listed + 1)):
                if record is None:
                    break
                history = history.then(record)
        return history

    def _follow(self, history: History) -> History:
        while True:
            try:
                record = self._get(history.tail + 1)
            except ObjectMissing:
                return history
            history = history.then(record)

    def _is_there(self, seq: int) -> bool:
        try:
            self._get(seq)
        except ObjectMissing:
            return False
        return True
