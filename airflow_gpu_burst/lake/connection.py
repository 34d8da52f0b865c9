"""From the fields of an Airflow connection of type `iceberg_lake` to a catalog's properties: plain data."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from airflow_gpu_burst.errors import SpecError
from airflow_gpu_burst.lake.catalog import CATALOG_NAME, CatalogConfig

_DELEGATION = {"vended": "vended-credentials", "remote-signing": "remote-signing", "none": ""}
_ACCESS_DELEGATION_HEADER = "header.X-Iceberg-Access-Delegation"

_DIRECT = {
    "type": "type",
    "uri": "uri",
    "warehouse": "warehouse",
    "catalog_name": CATALOG_NAME,
    "scope": "scope",
    "audience": "audience",
    "resource": "resource",
    "oauth2_server_uri": "oauth2-server-uri",
    "token": "token",
    "realm": "header.Polaris-Realm",
    "ca_bundle": "ssl.cabundle",
    "client_cert": "ssl.client.cert",
    "client_key": "ssl.client.key",
    "s3_endpoint": "s3.endpoint",
    "s3_region": "s3.region",
    "s3_access_key_id": "s3.access-key-id",
    "s3_secret_access_key": "s3.secret-access-key",
    "s3_session_token": "s3.session-token",
}
"""Extra of the connection → property of the catalog. What is not listed is refused; none passes by itself."""

_KNOWN = (*_DIRECT, "access_delegation")


def config_of(
    conn_id: str,
    *,
    host: str | None,
    port: int | None = None,
    login: str | None = None,
    password: str | None = None,
    extras: Mapping[str, Any],
) -> CatalogConfig:
    """
    The catalog that a connection describes.

    The URI is the connection's host or the extra `uri`. Login and password are the OAuth2 client's id and
    secret, or the user of a SQL catalog's database.

    :raises SpecError: when it describes none; names the field.
    """
    known = _extras(conn_id, extras)
    properties = {_DIRECT[name]: value for name, value in known.items() if name in _DIRECT}
    uri = properties["uri"] = _uri(conn_id, properties.get("uri") or host or "", port)
    if "access_delegation" in known:
        properties[_ACCESS_DELEGATION_HEADER] = _delegation(conn_id, known["access_delegation"])
    if uri.startswith(("http://", "https://")):
        if login or password:
            properties["credential"] = f"{login}:{password or ''}" if login else str(password)
    elif login:
        properties["uri"] = _with_user(uri, login, password or "")
    return CatalogConfig.of(conn_id, properties)


def _extras(conn_id: str, extras: Mapping[str, Any]) -> dict[str, str]:
    """Those that are set, all of them known. A misspelt one would be a setting silently not made."""
    for name, value in extras.items():
        if name not in _KNOWN:
            near = difflib.get_close_matches(name, _KNOWN, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise SpecError(f"connection {conn_id!r}: unknown extra {name!r}.{hint} Known: {', '.join(_KNOWN)}")
        if value is not None and not isinstance(value, str):
            raise SpecError(f"connection {conn_id!r}: extra {name!r} is {type(value).__name__}: write it as text")
    return {name: value.strip() for name, value in extras.items() if value and value.strip()}


def _uri(conn_id: str, uri: str, port: int | None) -> str:
    if "://" in uri or uri.startswith("sqlite:"):
        return uri.rstrip("/").removesuffix("/v1") if uri.startswith("http") else uri
    shown = f"{uri}:{port}" if port else uri
    raise SpecError(
        f"connection {conn_id!r}: {shown!r} is no URI of a catalog. Set host (or the extra 'uri') to the "
        "whole of it, e.g. https://polaris.example.com/api/catalog or sqlite:////data/catalog.db"
    )


def _delegation(conn_id: str, value: str) -> str:
    if value not in _DELEGATION:
        raise SpecError(f"connection {conn_id!r}: access_delegation={value!r}. Choose one of: {', '.join(_DELEGATION)}")
    return _DELEGATION[value]


def _with_user(uri: str, login: str, password: str) -> str:
    """`postgresql://host/db` → `postgresql://login:password@host/db`."""
    scheme, _, rest = uri.partition("://")
    if "@" in rest or scheme.startswith("sqlite"):
        return uri
    return f"{scheme}://{quote(login, safe='')}:{quote(password, safe='')}@{rest}"
