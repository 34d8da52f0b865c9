"""A store and a mover for it: a directory, and S3 servers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from airflow_gpu_burst.store import Store, StoreConfig, open_store
from airflow_gpu_burst.transfer import Mover, Settings, open_mover
from tests.checkpoint.trees import MIB
from tests.faulty_s3 import FaultyS3


@pytest.fixture(params=["directory", "s3"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> StoreConfig:
    """`moto` as a third one, for tests that ask for it: it verifies no checksums, and does other things by itself."""
    if request.param == "directory":
        return StoreConfig(uri=f"file://{tmp_path}/store")
    if request.param == "s3":
        config: StoreConfig = request.getfixturevalue("faulty").config("team/x")
        return config
    return bucket_of(request.getfixturevalue("moto"), "team/x")


@pytest.fixture
def faulty() -> Iterator[FaultyS3]:
    with FaultyS3() as server:
        yield server


@pytest.fixture
def moto() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    yield f"http://127.0.0.1:{port}"
    server.stop()


def bucket_of(endpoint: str, prefix: str) -> StoreConfig:
    """A new bucket of a server that has buckets."""
    import boto3

    config = StoreConfig(
        uri=f"s3://b-{os.urandom(6).hex()}/{prefix}",
        endpoint_url=endpoint,
        region="us-east-1",
        access_key_id="k",
        secret_access_key="s",
    )
    boto3.client(
        "s3",
        endpoint_url=config.endpoint_url,
        region_name=config.region,
        aws_access_key_id=config.access_key_id,
        aws_secret_access_key=config.secret_access_key,
    ).create_bucket(Bucket=config.bucket)
    return config


@pytest.fixture
def store(config: StoreConfig) -> Store:
    return open_store(config)


@pytest.fixture
def mover(config: StoreConfig) -> Iterator[Mover]:
    opened = open_mover(config, Settings(part_size=5 * MIB))  # S3's smallest: a few MiB make a multipart upload
    yield opened
    opened.close()


@pytest.fixture
def elsewhere(config: StoreConfig, tmp_path: Path) -> Iterator[tuple[Mover, Store]]:
    """Another store on the same machine or server."""
    other = StoreConfig(uri=f"file://{tmp_path}/elsewhere")
    if not config.directory:
        other = replace(config, uri=f"s3://{config.bucket}/elsewhere")
    mover = open_mover(other, Settings(part_size=5 * MIB))
    yield mover, open_store(other)
    mover.close()
