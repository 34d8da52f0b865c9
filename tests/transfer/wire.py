"""An S3 client and sender without cap, for tests of what stands below the mover."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from airflow_gpu_burst.store import StoreConfig
from airflow_gpu_burst.transfer import MIB, Tally
from airflow_gpu_burst.transfer.client import Client
from airflow_gpu_burst.transfer.flow import Flow
from airflow_gpu_burst.transfer.uploading import Sender

PART = 5 * MIB


class Free:
    """No cap, and as many requests as there are threads; remembers what it was told."""

    slice = 8 * MIB

    def __init__(self) -> None:
        self.slowed: list[float | None] = []
        self.well = 0
        self._lock = threading.Lock()

    def take(self, n: int) -> None:
        """At once."""

    @contextmanager
    def one(self, wanted: Callable[[], None]) -> Iterator[None]:
        wanted()
        yield

    def went_well(self, nbytes: int, seconds: float) -> None:
        with self._lock:
            self.well += nbytes

    def slow_down(self, retry_after_s: float | None) -> None:
        self.slowed.append(retry_after_s)


def client(config: StoreConfig, *, idle_timeout_s: float = 20.0, pace: Free | None = None) -> Client:
    """Without pauses: `Flow.pause` is what tests wait for."""
    pace = pace or Free()
    return Client(config, Quick(pace, Tally()), pace, idle_timeout_s=idle_timeout_s)


@contextmanager
def sender(config: StoreConfig, *, width: int = 3, part: int = PART, idle_timeout_s: float = 20.0) -> Iterator[Sender]:
    """Uploads in parts of 5 MiB."""
    pool = ThreadPoolExecutor(width)
    made = client(config, idle_timeout_s=idle_timeout_s)
    try:
        yield Sender(made, pool, width=width, part=part)
    finally:
        made.close()
        pool.shutdown()


def file_of(path: Path, size: int) -> bytes:
    """Make a file of random bytes."""
    data = os.urandom(min(size, MIB)) * (size // MIB + 1)
    # Different in each MiB, so that parts in the wrong place are found.
    changed = bytearray(data[:size])
    for at in range(0, size, MIB):
        changed[at : at + 8] = at.to_bytes(8, "big")[: size - at]
    path.write_bytes(changed)
    return bytes(changed)


class Quick(Flow):
    """Sleeps a hundredth of what it should."""

    def pause(self, seconds: float, halted: object) -> None:
        super().pause(seconds / 100, halted)  # type: ignore[arg-type]
