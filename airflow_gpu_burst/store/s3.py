"""A store in an S3 bucket, by boto3's low-level client. Retries are our own, so that each is known."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from airflow_gpu_burst.errors import ObjectMissing, StoreError
from airflow_gpu_burst.store.config import StoreConfig
from airflow_gpu_burst.store.interface import Entry, check_key, check_prefix, is_key

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

T = TypeVar("T")


class S3Store:
    """
    Objects of one bucket below one prefix. Safe for threads; connects when first used.

    :param attempts: per request, `create` excepted: that makes one, since a repeated conditional write
        may find its own first one.
    """

    def __init__(
        self,
        config: StoreConfig,
        *,
        attempts: int = 5,
        connect_timeout_s: float = 10,
        read_timeout_s: float = 60,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._config = config
        self._bucket = config.bucket
        self._base = f"{config.prefix}/" if config.prefix else ""
        self._attempts = attempts
        self._timeouts = (connect_timeout_s, read_timeout_s)
        self._sleep = sleep
        self._lock = threading.Lock()
        self._made: S3Client | None = None

    @property
    def uri(self) -> str:
        """`s3://bucket/prefix`."""
        return f"s3://{self._bucket}/{self._base}".rstrip("/")

    def get(self, key: str) -> bytes:
        """The whole object."""
        name = self._name(key)

        def read() -> bytes:
            return self._client.get_object(Bucket=self._bucket, Key=name)["Body"].read()

        return self._call("get", key, read)

    def put(self, key: str, data: bytes) -> None:
        """Write over whatever is there."""
        name = self._name(key)
        self._call("put", key, lambda: self._client.put_object(Bucket=self._bucket, Key=name, Body=data))

    def create(self, key: str, data: bytes) -> None:
        """Write if nothing is there: one attempt, so that a 412 is not about this call's own write."""
        name = self._name(key)
        self._call(
            "create",
            key,
            lambda: self._client.put_object(Bucket=self._bucket, Key=name, Body=data, IfNoneMatch="*"),
            attempts=1,
        )

    def list(self, prefix: str) -> Iterator[Entry]:
        """Objects whose key begins with `prefix`, page by page."""
        where: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._base + check_prefix(prefix)}
        while True:
            page = self._call("list", prefix, partial(self._client.list_objects_v2, **where))
            for found in page.get("Contents", []):
                key = found["Key"].removeprefix(self._base)
                if is_key(key):  # leaves out "directories": empty objects whose name ends with a slash
                    yield Entry(key, found["Size"])
            if not page.get("IsTruncated"):
                return
            where["ContinuationToken"] = page["NextContinuationToken"]

    def delete(self, key: str) -> None:
        """Remove. In a bucket with versioning the bytes stay as an older version."""
        name = self._name(key)
        with suppress(ObjectMissing):
            self._call("delete", key, lambda: self._client.delete_object(Bucket=self._bucket, Key=name))

    def _name(self, key: str) -> str:
        return self._base + check_key(key)

    @property
    def _client(self) -> S3Client:
        with self._lock:
            if self._made is None:
                from botocore.exceptions import BotoCoreError

                try:
                    self._made = _connect(self._config, *self._timeouts)
                except (BotoCoreError, ValueError) as error:
                    raise StoreError(f"{self._config}: {error}. Correct the store's configuration") from error
            return self._made

    def _call(self, action: str, key: str, request: Callable[[], T], *, attempts: int = 0) -> T:
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError

        from airflow_gpu_burst.store.s3_errors import mapped

        for left in reversed(range(attempts or self._attempts)):
            try:
                return request()
            except (BotoCoreError, ClientError, ResponseParserError) as error:
                problem = mapped(error, action, key, self._config)
                if not left or not problem.retryable:
                    raise problem from error
            pause = 0.2 * 2 ** (self._attempts - left)
            self._sleep(min(pause, 5.0) * (0.5 + os.urandom(1)[0] / 256))  # jitter: ranks fail together
        raise AssertionError("unreachable")


def _connect(config: StoreConfig, connect_timeout_s: float, read_timeout_s: float) -> S3Client:
    from boto3.session import Session
    from botocore.config import Config

    if config.ca_bundle and not os.path.isfile(config.ca_bundle):
        raise StoreError(f"there is no file {config.ca_bundle}: correct AWS_CA_BUNDLE")
    settings = Config(
        s3={"addressing_style": "path"},  # most S3 servers on premises have no wildcard DNS
        # Newer SDKs wrap bodies in trailers with a CRC, which some servers store as part of the object.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        retries={"total_max_attempts": 1, "mode": "standard"},
        connect_timeout=connect_timeout_s,
        read_timeout=read_timeout_s,
        max_pool_connections=16,
        tcp_keepalive=True,
    )
    # A session of its own: the default one is not safe to use from several threads.
    return Session().client(
        "s3",
        endpoint_url=config.endpoint_url or None,
        region_name=config.region or None,
        verify=config.ca_bundle or None,
        aws_access_key_id=config.access_key_id or None,
        aws_secret_access_key=config.secret_access_key or None,
        aws_session_token=config.session_token or None,
        config=settings,
    )
