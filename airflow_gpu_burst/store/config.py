"""Where the store is and how to get in: a frozen value that travels as environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from airflow_gpu_burst.errors import SpecError
from airflow_gpu_burst.store.interface import Store, check_key

_ENVIRONMENT = {
    "uri": "GPU_BURST_STORE",
    "endpoint_url": "GPU_BURST_S3_ENDPOINT",
    "region": "AWS_REGION",
    "ca_bundle": "AWS_CA_BUNDLE",
    "access_key_id": "AWS_ACCESS_KEY_ID",
    "secret_access_key": "AWS_SECRET_ACCESS_KEY",
    "session_token": "AWS_SESSION_TOKEN",
}


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """
    :param uri: `file:///absolute/directory` or `s3://bucket/prefix`.
    :param endpoint_url: of the S3 server; empty: the one of the region.
    :param ca_bundle: file with the certificate authority of the S3 server; empty: the system's.
    :param access_key_id: empty: botocore's own chain (instance role, web identity, profile).
    """

    uri: str
    endpoint_url: str = ""
    region: str = ""
    ca_bundle: str = ""
    access_key_id: str = field(default="", repr=False)
    secret_access_key: str = field(default="", repr=False)
    session_token: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        scheme, _, rest = self.uri.partition("://")
        if scheme == "file" and rest.startswith("/"):
            return
        bucket, _, prefix = rest.partition("/")
        if scheme != "s3" or not bucket:
            raise SpecError(
                f"store {self.uri!r}: use file:///absolute/directory or s3://bucket/prefix (GPU_BURST_STORE)"
            )
        if self.endpoint_url and not self.endpoint_url.startswith(("http://", "https://")):
            raise SpecError(f"store endpoint {self.endpoint_url!r}: begin with https:// (GPU_BURST_S3_ENDPOINT)")
        if prefix.strip("/"):
            check_key(prefix.strip("/"))
        if bool(self.access_key_id) != bool(self.secret_access_key):
            raise SpecError("store: give both AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or neither")

    @property
    def directory(self) -> str:
        """The directory of a `file:` store, else empty."""
        from urllib.parse import unquote  # 4 ms that an S3 store need not pay

        return unquote(self.uri.removeprefix("file://")) if self.uri.startswith("file:") else ""

    @property
    def bucket(self) -> str:
        """The bucket of an `s3:` store."""
        return self.uri.removeprefix("s3://").partition("/")[0]

    @property
    def prefix(self) -> str:
        """What stands before every key in the bucket, without slashes around it."""
        return self.uri.removeprefix("s3://").partition("/")[2].strip("/")

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Self:
        """Back from `to_env`."""
        if not environ.get("GPU_BURST_STORE"):
            raise SpecError("GPU_BURST_STORE is not set: use file:///absolute/directory or s3://bucket/prefix")
        return cls(**{name: environ.get(variable, "") for name, variable in _ENVIRONMENT.items()})

    def to_env(self) -> dict[str, str]:
        """Environment variables that carry this to another process. Holds secrets: never log it."""
        return {v: getattr(self, name) for name, v in _ENVIRONMENT.items() if getattr(self, name)}


def open_store(config: StoreConfig) -> Store:
    """The store that a configuration names. Opens no connection yet."""
    if config.directory:
        from airflow_gpu_burst.store.directory import DirectoryStore

        return DirectoryStore(config.directory)
    from airflow_gpu_burst.store.s3 import S3Store

    return S3Store(config)
