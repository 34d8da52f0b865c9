"""The bytes of large objects: a window on a file to send, a download that goes on where it broke."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any

from airflow_gpu_burst.store import files

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


class Window(io.RawIOBase):
    """Some bytes of an open file, read with `pread`: threads share one descriptor, retries rewind."""

    def __init__(self, fd: int, start: int, length: int) -> None:
        self._fd = fd
        self._start = start
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._length - self._at)
        wanted = left if size is None or size < 0 else min(size, left)
        data = os.pread(self._fd, wanted, self._start + self._at) if wanted else b""
        self._at += len(data)
        return data

    def __len__(self) -> int:
        return self._length


class Download:
    """A request that may be repeated: each call reads on from what has arrived, if the object is the same."""

    def __init__(self, client: S3Client, bucket: str, name: str, fd: int) -> None:
        self._client = client
        self._where: Any = {"Bucket": bucket, "Key": name}
        self._fd = fd
        self._etag = ""
        self._size = -1

    def __call__(self) -> None:
        have = os.lseek(self._fd, 0, os.SEEK_CUR)
        if have == self._size:
            return
        rest: Any = {"Range": f"bytes={have}-", "IfMatch": self._etag} if have else {}
        answer = self._client.get_object(**self._where, **rest)
        if have and "ContentRange" not in answer:  # the server ignores ranges
            os.lseek(self._fd, 0, os.SEEK_SET)
            os.ftruncate(self._fd, 0)
            have = 0
        self._etag = answer["ETag"]
        self._size = have + answer["ContentLength"]
        for chunk in answer["Body"].iter_chunks(files.CHUNK):
            files.write_all(self._fd, chunk)
