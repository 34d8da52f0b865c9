"""What moves bulk bytes between files of this node and a store. Two implementations are shipped: a directory and S3."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

MIB = 1 << 20

Buffer: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """
    An object as it is in the store, verified.

    :param crc64nvme: of all its bytes.
    """

    key: str
    size: int
    crc64nvme: int
    etag: str = ""


@dataclass(frozen=True, slots=True)
class Span:
    """
    Bytes of an object, and the place of a file where they belong.

    :param start: offset in the object.
    :param fd: an open file.
    :param at: offset in that file.
    :param crc64nvme: of exactly these bytes; None: unknown, the caller checks.
    """

    start: int
    length: int
    fd: int
    at: int = 0
    crc64nvme: int | None = None


@dataclass(kw_only=True)
class Tally:
    """
    What was moved so far.

    :param throttled: answers that asked for less (429, 503).
    :param declined: transfers that the server would not do by RDMA.
    :param resumed_bytes: bytes that an earlier, killed upload had sent.
    :param unverified: objects whose checksum the store does not tell: only their size was compared.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    requests: int = 0
    retries: int = 0
    throttled: int = 0
    declined: int = 0
    resumed_bytes: int = 0
    unverified: int = 0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """
    :param cap: bytes per second, of all transfers of this mover together; None: none.
    :param connections: most at once; begins with 2 and grows while that helps.
    :param part_size: bytes of a part of a large upload; raised for files of more than 9,000 parts.
    :param rdma: whether the store's RDMA path is used: never, where it is offered, or only.
    :param idle_timeout_s: without a byte moving; there is no limit for the whole.
    :param stagger_s: pause before the first byte, so that ranks do not begin at once.
    """

    cap: float | None = None
    connections: int = 8
    part_size: int = 32 * MIB
    rdma: Literal["off", "prefer", "require"] = "off"
    idle_timeout_s: float = 60.0
    stagger_s: float = 0.0


class Mover(Protocol):
    """
    Parallel, capped, verified. Safe for threads: files that are moved at once share connections, cap and slow start.

    Errors are those of `airflow_gpu_burst.errors`: of the store, `ChecksumMismatch`, and `CheckpointError` for a file
    that is not what it was.
    """

    tally: Tally

    @property
    def uri(self) -> str:
        """As the store's."""
        ...

    def upload(self, key: str, path: Path, *, state: Path | None = None) -> Stored:
        """
        A file of any size. It must not change meanwhile.

        :param state: a file where a multipart upload keeps what it needs to go on after this process was killed.
        :raises CheckpointError: it changed; nothing is stored.
        """
        ...

    def put(self, key: str, data: Buffer) -> Stored:
        """Bytes in memory, in one request."""
        ...

    def fetch(self, key: str, spans: Sequence[Span], *, etag: str = "") -> None:
        """
        Parts of an object, in parallel, each verified by its CRC. A wrong one is fetched once more.

        :param etag: the object must still be this one.
        :raises ChecksumMismatch: bytes are not what they should be.
        :raises ObjectMissing: the store has lost it.
        """
        ...

    def copy(self, source: str, target: str, size: int, *, to: Mover | None = None) -> None:
        """
        Copy within the server.

        :param to: whose `target` it is; None: this one's.
        :raises NotImplementedError: not the same server, or it cannot: fetch and upload.
        """
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Remove many. Those that are not there are fine."""
        ...

    def abandon(self, key: str) -> None:
        """Give up an upload that was left half way."""
        ...

    def close(self) -> None:
        """No more transfers."""
        ...
