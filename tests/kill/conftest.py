"""The store of this folder's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from airflow_gpu_burst.store import StoreConfig
from tests.kill.server import serving


@pytest.fixture(scope="session")
def place() -> Iterator[StoreConfig]:
    """An S3 server of this test run."""
    with serving() as store:
        yield store
