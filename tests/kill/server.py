"""An S3 server in a process of its own, for as long as its standard input is open. Prints its endpoint."""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from airflow_gpu_burst.store import StoreConfig
from tests.faulty_s3 import FaultyS3

BUCKET = "burst"


@contextmanager
def serving() -> Iterator[StoreConfig]:
    """A server with an empty bucket. It has checksums and conditions, and faults only where a `Gate` makes some."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.kill.server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield StoreConfig(
            uri=f"s3://{BUCKET}",
            endpoint_url=process.stdout.readline().strip(),
            region="us-east-1",
            access_key_id="key",
            secret_access_key="secret",
        )
    finally:
        process.stdin.close()
        process.wait(10)
        process.stdout.close()


def main() -> None:
    """Serve."""
    with FaultyS3(bucket=BUCKET) as server:
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        while not select.select([sys.stdin], [], [], 1.0)[0]:
            server.calls.clear()  # they hold the bodies: a gigabyte for ten rounds


if __name__ == "__main__":
    main()
