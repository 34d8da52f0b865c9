"""Bulk bytes to and from an S3 bucket, over this package's own HTTP connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from airflow_gpu_burst.errors import StoreUnavailable
from airflow_gpu_burst.store import StoreConfig, check_key
from airflow_gpu_burst.transfer import copying, deleting, multipart
from airflow_gpu_burst.transfer.client import Client
from airflow_gpu_burst.transfer.fetching import fetch
from airflow_gpu_burst.transfer.flow import Flow, Stopped, never
from airflow_gpu_burst.transfer.interface import Buffer, Mover, Settings, Span, Stored, Tally
from airflow_gpu_burst.transfer.pace import Slots, TokenBucket
from airflow_gpu_burst.transfer.uploading import Sender

if TYPE_CHECKING:
    from airflow_gpu_burst.transfer.rdma import Rdma

_QUIET_S = 10.0  # after so long without a transfer, the next one is a new beginning, of all ranks at once


class S3Mover:
    """
    See `Mover`. Connects when first used; its threads live until `close`.

    Signatures leave out the body, which its CRC64NVME guards against damage; against tampering, use https.
    """

    def __init__(self, config: StoreConfig, settings: Settings | None = None) -> None:
        self._config, self._settings = config, settings or Settings()
        self.tally = Tally()
        self._flow = Flow(TokenBucket(self._settings.cap), self.tally)
        self._client = Client(
            config, self._flow, Slots(self._settings.connections), idle_timeout_s=self._settings.idle_timeout_s
        )
        self._pool = ThreadPoolExecutor(self._settings.connections, thread_name_prefix="gpu-burst-transfer")
        self._rdma = _rdma(self._client, self._settings)
        self._call = self._rdma.call if self._rdma else self._client.call
        self._sender = Sender(
            self._client,
            self._pool,
            width=self._settings.connections,
            part=self._settings.part_size,
            call=self._call,
        )
        self._lock = threading.Lock()
        self._under_way, self._ended_at = 0, float("-inf")

    @property
    def uri(self) -> str:
        """`s3://bucket/prefix`."""
        return self._config.uri.rstrip("/")

    def upload(self, key: str, path: Path, *, state: Path | None = None) -> Stored:
        """See `Mover.upload`. `<key>.upload` lies in the store while a multipart upload is under way."""
        with self._transfer():
            return self._sender.file(check_key(key), path, state)

    def put(self, key: str, data: Buffer) -> Stored:
        """See `Mover.put`."""
        with self._transfer():
            return self._sender.bytes(check_key(key), data)

    def fetch(self, key: str, spans: Sequence[Span], *, etag: str = "") -> None:
        """See `Mover.fetch`."""
        with self._transfer():
            fetch(self._client, self._pool, check_key(key), spans, etag=etag, call=self._call)

    def copy(self, source: str, target: str, size: int, *, to: Mover | None = None) -> None:
        """See `Mover.copy`. The target's credentials must read the source."""
        other = self if to is None else to
        if not isinstance(other, S3Mover) or other._config.endpoint_url != self._config.endpoint_url:
            raise NotImplementedError("not the same server: fetch and upload")
        with self._transfer():
            copying.copy(self._client, check_key(source), other._client, check_key(target), size, self._pool)

    def delete(self, keys: Iterable[str]) -> None:
        """See `Mover.delete`."""
        with self._transfer():
            deleting.delete(self._client, map(check_key, keys))

    def abandon(self, key: str) -> None:
        """See `Mover.abandon`."""
        with self._transfer():
            multipart.abandon(self._client, check_key(key))

    def close(self) -> None:
        """Ends what is under way with StoreUnavailable."""
        self._client.close()
        self._pool.shutdown(cancel_futures=True)
        if self._rdma:
            self._rdma.close()

    @contextmanager
    def _transfer(self) -> Iterator[None]:
        try:
            with self._lock:
                quiet = not self._under_way and time.monotonic() - self._ended_at > _QUIET_S
                self._under_way += 1
            if quiet:
                self._flow.pause(self._settings.stagger_s, never)
            yield
        except (Stopped, CancelledError, RuntimeError) as stopped:
            if not self._flow.closed.is_set():  # a thread pool that is shut down raises RuntimeError
                raise
            raise StoreUnavailable(
                f"{self.uri}: the transfer was given up, its mover is closed. Open another"
            ) from stopped
        finally:
            with self._lock:
                self._under_way -= 1
                self._ended_at = time.monotonic()


def _rdma(client: Client, settings: Settings) -> Rdma | None:
    if settings.rdma == "off":
        return None
    from airflow_gpu_burst.transfer import rdma

    return rdma.Rdma(client, settings.rdma, rdma.native())
