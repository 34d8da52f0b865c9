"""One S3 request, made until it is answered for good: a place in the line, a connection, a signature, another try."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from airflow_gpu_burst.store import StoreConfig
from airflow_gpu_burst.transfer import answers
from airflow_gpu_burst.transfer.answers import Fault, Kind
from airflow_gpu_burst.transfer.connection import Answer, Broken, Connection, FileRange, Into, Request, Sink
from airflow_gpu_burst.transfer.endpoint import Endpoint
from airflow_gpu_burst.transfer.flow import Flow, Halted, never
from airflow_gpu_burst.transfer.interface import Buffer
from airflow_gpu_burst.transfer.signing import Credentials, Signer, query_string, quoted

ATTEMPTS = 8  # with their pauses about 25 s: longer than a server's restart
_PAUSE_MOST_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """
    A request, as it is meant.

    :param action: what it is for: `get`, `put`, `upload`, `list` or `delete`; said in errors, with the permission.
    :param key: of this mover; empty: the bucket itself.
    :param late: its error may come in the body of a 200.
    """

    action: str
    method: str
    key: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Buffer | FileRange | None = None
    late: bool = False

    @property
    def size(self) -> int:
        """Bytes of the body."""
        return self.body.length if isinstance(self.body, FileRange) else len(self.body or b"")


@dataclass(frozen=True, slots=True)
class Reply:
    """
    :param fault: None: a success; else of a kind that the caller expected.
    """

    answer: Answer
    fault: Fault | None = None


class Line(Protocol):
    """How many requests may be made at once: see `pace.Slots`."""

    def one(self, wanted: Callable[[], None]) -> AbstractContextManager[object]:
        """A place, for as long as the request takes. `wanted` is called while waiting, and may raise to give up."""
        ...

    def went_well(self, nbytes: int, seconds: float) -> None:
        """A request was answered."""
        ...

    def slow_down(self, retry_after_s: float | None) -> None:
        """The server wants less."""
        ...


class Client:
    """
    Requests to the bucket of a configuration, below its prefix. Safe for threads.

    :param flow: cap, counts, and the order to stop.
    :param line: how many at once.
    """

    def __init__(self, config: StoreConfig, flow: Flow, line: Line, *, idle_timeout_s: float = 60.0) -> None:
        self.config, self.flow = config, flow
        self.endpoint = Endpoint.of(config)
        self._line, self._idle_s = line, idle_timeout_s
        self._prefix = f"{config.prefix}/" if config.prefix else ""
        self._signer = Signer(Credentials(config), config.region)
        self._lock = threading.Lock()
        self._idle: list[Connection] = []

    def name(self, key: str) -> str:
        """The key in the bucket."""
        return self._prefix + key

    def close(self) -> None:
        """Stop what is under way, soon."""
        self.flow.closed.set()
        self._drop_idle()

    def call(
        self,
        ask: Ask | Callable[[], Ask],
        *,
        into: Into | None = None,
        expected: Collection[Kind] = (),
        halted: Halted = never,
        attempts: int = ATTEMPTS,
    ) -> Reply:
        """
        Make a request until the answer is a success, or one that no repetition mends.

        :param ask: a function is called for each attempt; when it asks for something else than before, there was
            progress, and the attempts count anew.
        :param into: where the body of a success goes; called for each attempt that has one.
        :param expected: faults that are returned at once instead of raised (or retried).
        :param halted: whether the result is still wanted.
        :raises StoreError: the store refused, or did not answer.
        :raises Stopped: it is not wanted any more.
        :raises FileEnded: the body's file is shorter than its range.
        """
        trial = _Trial(attempts)
        while True:
            self.flow.check(halted)
            wanted = ask() if callable(ask) else ask
            trial.begins(wanted)
            try:
                reply = self._once(wanted, into, expected, halted)
            except (Broken, OSError) as problem:
                error = answers.unanswered(problem, wanted.action, wanted.key, self.config)
                if not error.retryable or trial.over:
                    raise error from problem
                pause = trial.pause()
            else:
                found = reply.fault
                if found is None or found.kind in expected:
                    return reply
                if not self._may_help(found, reply.answer, trial):
                    raise found.error(wanted.action, wanted.key, self.config)
                pause = trial.pause(found)
            self.flow.count(retries=1)
            self.flow.pause(pause, halted)

    def _may_help(self, found: Fault, answer: Answer, trial: _Trial) -> bool:
        """Whether to try again, after what the fault asks for."""
        if found.kind in (Kind.SKEWED, Kind.EXPIRED):
            if found.kind in trial.mended:
                return False
            trial.mended.add(found.kind)
            if found.kind is Kind.EXPIRED:
                return self._signer.renew()
            return self._signer.adopt(answer.headers.get("date", ""))
        return found.kind in (Kind.AGAIN, Kind.SLOW) and not trial.over

    def _once(self, ask: Ask, into: Into | None, expected: Collection[Kind], halted: Halted) -> Reply:
        with self._line.one(lambda: self.flow.check(halted)):
            began = time.monotonic()
            answer = self._exchange(ask, into, halted)
            self.flow.count(requests=1)
            found = answers.fault(answer, late=ask.late, head=ask.method == "HEAD")
            if found is None:
                length = answer.headers.get("content-length", "") if ask.method == "GET" else ""
                moved = ask.size + (int(length) if length.isdecimal() else 0)
                self._line.went_well(moved, time.monotonic() - began)
            elif found.kind is Kind.SLOW:
                self.flow.count(throttled=1)
                self._line.slow_down(found.retry_after_s)
        return Reply(answer, found)

    def _exchange(self, ask: Ask, into: Into | None, halted: Halted) -> Answer:
        request = self._request(ask)

        def chosen(answer: Answer) -> Sink | None:
            return into(answer) if into and 200 <= answer.status < 300 else None

        while True:
            connection = self._connection()
            reused = connection.used
            try:
                answer = connection.exchange(request, into=chosen, halted=halted)
            except Broken as problem:
                # Closed by the server while it was idle: says nothing about the request, and its siblings are gone too.
                if reused and not problem.answered and not isinstance(problem.__cause__, TimeoutError):
                    self._drop_idle()
                    continue
                raise
            self._give_back(connection)
            return answer

    def _request(self, ask: Ask) -> Request:
        path = self.endpoint.base + ("/" + quoted(self.name(ask.key)) if ask.key else "")
        headers = self._signer.signed(ask.method, path, ask.query, {"host": self.endpoint.host, **ask.headers})
        target = path + ("?" + query_string(ask.query) if ask.query else "")
        return Request(method=ask.method, target=target, headers=headers, body=ask.body)

    def _connection(self) -> Connection:
        while True:
            with self._lock:
                found = self._idle.pop() if self._idle else None
            if found is None:
                sock = self.endpoint.connect()
                return Connection(sock, self.flow, host=self.endpoint.host, idle_timeout_s=self._idle_s)
            if not found.stale():
                return found
            found.close()

    def _give_back(self, connection: Connection) -> None:
        with self._lock:
            if connection.open and not self.flow.closed.is_set():
                self._idle.append(connection)
                return
        connection.close()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


class _Trial:
    """The attempts at one request."""

    def __init__(self, attempts: int) -> None:
        self._attempts, self._left = attempts, attempts
        self._last: Ask | None = None
        self.mended: set[Kind] = set()

    def begins(self, ask: Ask) -> None:
        if self._last is not None and self._last != ask:
            self._left = self._attempts
        self._last = ask
        self._left -= 1

    @property
    def over(self) -> bool:
        return self._left <= 0

    def pause(self, found: Fault | None = None) -> float:
        if found and found.kind in (Kind.SKEWED, Kind.EXPIRED):
            return 0.0
        asked = found.retry_after_s if found else None
        own = min(0.2 * 2.0 ** (self._attempts - self._left - 1), _PAUSE_MOST_S)
        return max(asked or 0.0, own * (0.5 + os.urandom(1)[0] / 256))  # jitter: ranks fail together
