"""How to reach a catalog, and what its errors mean."""

from __future__ import annotations

import difflib
import functools
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import unquote, urlsplit

from airflow_gpu_burst.errors import (
    CatalogError,
    CatalogUnavailable,
    GpuBurstError,
    NotInstalledError,
    SpecError,
)

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table

CATALOG_NAME = "catalog_name"
"""
Our own property: what the catalog is called where the name is part of its keys (a SQL catalog's rows).
Without it, two connections to one SQL catalog would not see each other's tables.
"""

HTTP_TIMEOUT_S = (10.0, 120.0)
"""Connect and read timeout of one request to a REST catalog. pyiceberg has none, and would wait for ever."""

_SECRET_WORDS = re.compile(
    r"(^|[.\-_])(credential|token|secret|password|sas-token|connection-string|"
    r"access-key(-id)?|account-key|secret-access-key|session-token|client[-_]secret|authorization|cookie)$",
    re.IGNORECASE,
)
_URI_PASSWORD = re.compile(r"^[a-z][a-z0-9+.\-]*://[^/@]*:[^/@]+@", re.IGNORECASE)
_SHORTEST_SECRET = 4
"""Replacing a shorter text would garble a message and hide nothing."""


def is_secret(key: str, value: str) -> bool:
    """True for a property that must never be written anywhere: by its name, or a URI with a password."""
    return bool(_SECRET_WORDS.search(key) or _URI_PASSWORD.match(value))


@dataclass(frozen=True, kw_only=True)
class CatalogConfig:
    """
    A catalog, as properties of pyiceberg. Build it with `of`, which tells the secrets from the rest.

    Beyond pyiceberg's own, `catalog_name` and dotted `ssl.*` and `auth.*` are understood.

    :param name: the connection id of the lake; names the catalog in pins.
    :param properties: may be written down.
    :param secrets: must never be: not in a manifest, an XCom, a log or an error.
    """

    name: str
    properties: Mapping[str, str]
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        exposed = sorted(key for key, value in self.properties.items() if is_secret(key, value))
        if exposed:
            raise SpecError(
                f"catalog {self.name!r}: {', '.join(exposed)} is a secret and must not stand among the "
                "properties that are written down. Build the config with CatalogConfig.of(name, properties)"
            )

    @classmethod
    def of(cls, name: str, properties: Mapping[str, str]) -> Self:
        """From all properties of the catalog, secret or not."""
        secrets = {key: value for key, value in properties.items() if is_secret(key, value)}
        plain = {key: value for key, value in properties.items() if key not in secrets}
        return cls(name=name, properties=plain, secrets=secrets)

    def redact(self, text: str) -> str:
        """The text without any secret of this catalog, nor the secret part of one."""
        hidden = {part for value in self.secrets.values() for part in _secret_parts(value)}
        for secret in sorted(hidden, key=len, reverse=True):
            if len(secret) >= _SHORTEST_SECRET:
                text = text.replace(secret, "***")
        return text


def _secret_parts(value: str) -> Iterator[str]:
    """The value; the password of a URI, as written and as meant; the secret of `id:secret`."""
    yield value
    if _URI_PASSWORD.match(value):
        password = urlsplit(value).password or ""
        yield from (password, unquote(password))
    else:
        yield value.partition(":")[2]


def load(config: CatalogConfig) -> Catalog:
    """
    Open the catalog; the caller closes it. `opened` does both.

    :raises NotInstalledError: without pyiceberg.
    """
    try:
        from pyiceberg.catalog import CatalogType, infer_catalog_type, load_catalog
        from pyiceberg.exceptions import NotInstalledError as DriverMissing
    except ImportError as error:
        raise _not_installed("Reading Iceberg tables needs pyiceberg") from error
    properties = _nested({**config.properties, **config.secrets})
    name = properties.pop(CATALOG_NAME, config.name)
    with catalog_errors(config):
        try:
            if "py-catalog-impl" not in properties:
                kind = properties.get("type") or infer_catalog_type(name, properties)
                if CatalogType(kind) is CatalogType.REST:
                    return _rest_catalog()(name, **properties)  # type: ignore[no-any-return]
            return load_catalog(name, **properties)
        except (DriverMissing, ModuleNotFoundError) as error:
            raise _not_installed(f"Catalog {config.name!r} needs a driver: {error}") from error
        except (ValueError, KeyError) as error:
            raise SpecError(
                f"catalog {config.name!r} cannot be opened: {config.redact(str(error))}. "
                "Check 'type' (rest or sql), 'uri' and 'warehouse' of its connection"
            ) from error


@contextmanager
def opened(config: CatalogConfig) -> Iterator[Catalog]:
    """The catalog for the length of a block."""
    catalog = load(config)
    try:
        yield catalog
    finally:
        catalog.close()


def load_table(catalog: Catalog, config: CatalogConfig, name: str) -> Table:
    """
    The table as it is now.

    :raises CatalogError: when there is none, with the nearest names.
    """
    with catalog_errors(config, table=name, catalog=catalog):
        return catalog.load_table(name)


@contextmanager
def catalog_errors(config: CatalogConfig, *, table: str = "", catalog: Catalog | None = None) -> Iterator[None]:
    """
    The one place where errors of catalogs, their transports and storages become ours.

    What means "nothing is known, a later try may succeed" becomes CatalogUnavailable: the commit it stands
    for may or may not have happened. What it does not know goes through as it is.

    :param catalog: where to look for names near the one that does not exist.
    """
    try:
        yield
    except GpuBurstError:
        raise
    except Exception as error:
        mapped = _explain(error, config, table, catalog)
        if mapped is None:
            raise
        raise mapped from error


def is_conflict(error: CatalogUnavailable) -> bool:
    """True when the catalog surely did not commit: somebody else was first."""
    from pyiceberg.exceptions import CommitFailedException

    return isinstance(error.__cause__, CommitFailedException)


def backoff(attempt: int, sleep: Callable[[float], None]) -> None:
    """
    Wait before another look: 0.05 s doubling up to 5 s, and between half and all of that.

    The jitter is what lets a crowd of mapped tasks through one table, one by one.
    """
    sleep(random.uniform(0.5, 1.0) * min(5.0, 0.05 * 2**attempt))


ATTEMPTS = 20
"""About a minute of waiting in all: 50 mapped tasks on one table get through, a dead catalog is noticed."""


def split_name(table: str) -> tuple[str, ...]:
    """`a.b.c` → parts. Raises SpecError for what cannot name a table."""
    parts = tuple(table.split(".")) if isinstance(table, str) else ()
    if len(parts) < 2 or not all(part.strip() for part in parts):
        raise SpecError(f"table={table!r}: give namespace and name, e.g. 'fab.wafers'")
    return parts


def _explain(error: Exception, config: CatalogConfig, table: str, catalog: Catalog | None) -> GpuBurstError | None:
    where = f"catalog {config.name!r}" + (f", table {table!r}" if table else "")
    said = config.redact(str(error)).strip() or type(error).__name__
    for explain in _EXPLAINERS:
        found = explain(error, where, said)
        if found is not None:
            hint = _nearest(catalog, table) if explain is _explain_names else ""
            return type(found)(f"{found}{hint}")
    return None


def _explain_names(error: Exception, where: str, said: str) -> CatalogError | None:
    from pyiceberg import exceptions as ice

    if isinstance(error, ice.NoSuchTableError):
        return CatalogError(f"{where}: there is no such table. Check the name, and that the role may see it")
    if isinstance(error, ice.NoSuchNamespaceError | ice.NoSuchIdentifierError):
        return CatalogError(f"{where}: there is no such namespace. Check the name ('namespace.table')")
    return None


def _explain_refusal(error: Exception, where: str, said: str) -> CatalogError | None:
    from pyiceberg import exceptions as ice
    from requests import HTTPError

    status = getattr(error.response, "status_code", 0) if isinstance(error, HTTPError) else 0
    if isinstance(error, ice.ForbiddenError) or status == 403:
        return CatalogError(
            f"{where}: not allowed: {said}. Check the grants of the connection's principal, that its scope "
            "names a role that has them, and, if the catalog does not vend storage credentials, "
            "set access_delegation to 'none'"
        )
    refused = (ice.UnauthorizedError, ice.AuthorizationExpiredError, ice.OAuthError)
    if isinstance(error, refused) or status in (400, 401):
        return CatalogError(
            f"{where}: the catalog did not accept the credentials: {said}. Check client id and secret (login "
            "and password of the connection), scope and oauth2_server_uri"
        )
    return None


def _explain_silence(error: Exception, where: str, said: str) -> CatalogUnavailable | None:
    import requests
    from pyiceberg import exceptions as ice

    if isinstance(error, ice.CommitFailedException):
        return CatalogUnavailable(f"{where}: somebody else committed at the same time: {said}. Try again")
    silent = (
        ice.CommitStateUnknownException,
        ice.ServiceUnavailableError,
        ice.ServerError,
        ice.TooManyRequestsError,
        ice.WaitingForLockException,
        requests.RequestException,  # connection refused or reset, timeout, 5xx of the token endpoint
        TimeoutError,
        ConnectionError,
    )
    if isinstance(error, silent):
        return CatalogUnavailable(
            f"{where}: no answer from the catalog: {said}. Try again; if it stays so, check that the "
            "connection's uri can be reached from here and that the catalog is up"
        )
    return None


_SQL_BUSY = ("locked", "already exists", "UNIQUE constraint", "duplicate key", "could not connect", "timeout")


def _explain_sql(error: Exception, where: str, said: str) -> CatalogError | None:
    """SQLAlchemy's errors, by name: it is there only if a SQL catalog is used."""
    names = {cls.__name__ for cls in type(error).__mro__ if cls.__module__.startswith("sqlalchemy.")}
    if not names & {"DBAPIError", "ArgumentError", "SQLAlchemyError"}:
        return None
    short = said.partition("\n")[0]
    if any(word in said for word in _SQL_BUSY) or getattr(error, "connection_invalidated", False):
        return CatalogUnavailable(f"{where}: the catalog's database is busy or away: {short}. Try again")
    return CatalogError(
        f"{where}: the catalog's database cannot be used: {short}. Check the connection's uri; for SQLite, "
        "that the folder exists and may be written"
    )


def _explain_storage(error: Exception, where: str, said: str) -> CatalogError | None:
    if isinstance(error, FileNotFoundError):
        return CatalogError(
            f"{where}: the catalog names a file that is not in the storage: {said}. Check that the "
            "connection's storage settings (s3_endpoint, s3_region) belong to this catalog"
        )
    if isinstance(error, PermissionError) or (isinstance(error, OSError) and "ACCESS_DENIED" in said):
        return CatalogError(
            f"{where}: the storage refused: {said}. Check the storage credentials (s3_access_key_id, "
            "s3_secret_access_key), or let the catalog vend them (access_delegation 'vended')"
        )
    if isinstance(error, OSError) and ("AWS Error" in said or "curlCode" in said):
        return CatalogUnavailable(f"{where}: no answer from the storage: {said}. Try again; check s3_endpoint")
    return None


def _explain_rest(error: Exception, where: str, said: str) -> CatalogError | None:
    """What is left of the answers of a REST catalog: 400, 404, 406, 422."""
    from pyiceberg import exceptions as ice

    if isinstance(error, ice.RESTError):
        return CatalogError(f"{where}: the catalog refused the request: {said}. Check uri and warehouse")
    return None


_EXPLAINERS = (
    _explain_names,
    _explain_refusal,
    _explain_silence,
    _explain_sql,
    _explain_storage,
    _explain_rest,
)
"""In this order: errors of pyiceberg inherit from each other."""


def _nearest(catalog: Catalog | None, table: str) -> str:
    """` (did you mean ...?)`, if the catalog says so without trouble."""
    if catalog is None or not table:
        return ""
    namespace, _, name = table.rpartition(".")
    try:
        known = {identifier[-1] for identifier in catalog.list_tables(namespace)}
        prefix = f"{namespace}."
    except Exception:  # a hint must not replace the error it belongs to
        try:
            known, prefix = {".".join(identifier) for identifier in catalog.list_namespaces()}, ""
            name = namespace
        except Exception:
            return ""
    near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    if near:
        return " (did you mean " + " or ".join(repr(prefix + other) for other in near) + "?)"
    return f" (known there: {', '.join(sorted(known)[:10])})" if known else ""


def _not_installed(what: str) -> NotInstalledError:
    return NotInstalledError(f"{what}: pip install 'airflow-gpu-burst[lake]'")


def _nested(properties: Mapping[str, str]) -> dict[str, Any]:
    """`ssl.client.cert` → {"ssl": {"client": {"cert": ...}}}: what pyiceberg wants nested, and only that."""
    result: dict[str, Any] = {}
    for key, value in properties.items():
        parts = key.split(".") if key.startswith(("ssl.", "auth.")) else [key]
        inner = result
        for part in parts[:-1]:
            inner = inner.setdefault(part, {})
        inner[parts[-1]] = value
    return result


@functools.cache
def _rest_catalog() -> Any:
    """
    pyiceberg's REST catalog with a timeout on every request, that for the token included.

    pyiceberg 0.12 has none (apache/iceberg-python#3418 adds it later): a catalog that accepts and then keeps
    silent would hold a worker slot until the task's own timeout.
    """
    from pyiceberg.catalog.rest import RestCatalog
    from requests import PreparedRequest, Response, Session
    from requests.adapters import HTTPAdapter

    class TimedAdapter(HTTPAdapter):
        def send(self, request: PreparedRequest, **options: Any) -> Response:  # type: ignore[override]
            options["timeout"] = options.get("timeout") or HTTP_TIMEOUT_S
            return super().send(request, **options)

    class TimedRestCatalog(RestCatalog):
        def _create_session(self) -> Session:
            session = super()._create_session()
            for scheme in ("https://", "http://"):
                session.mount(scheme, TimedAdapter())
            return session

    return TimedRestCatalog
