"""What a catalog that does not do what it should looks like to a user."""

from __future__ import annotations

import builtins
import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu_burst.errors import CatalogError, CatalogUnavailable, NotInstalledError, SpecError
from airflow_gpu_burst.lake import catalog
from airflow_gpu_burst.lake.catalog import CatalogConfig, load, load_table, opened

SECRET = "hush-hush"


class Rest:
    """A REST catalog that answers the config, and everything else as the test wants."""

    def __init__(self) -> None:
        self.status = 404
        self.body = json.dumps({"error": {"message": "no", "type": "NoSuchTableException", "code": 404}})
        self.config_status = 200
        self.headers: dict[str, str] = {}
        self.hold = threading.Event()
        self.hold.set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.hold.wait(10)
                outer.headers = {name.lower(): value for name, value in self.headers.items()}
                if "/v1/config" in self.path and outer.config_status == 200:
                    self.answer(200, json.dumps({"defaults": {}, "overrides": {}}))
                elif "/v1/config" in self.path:
                    self.answer(outer.config_status, outer.body)
                else:
                    self.answer(outer.status, outer.body)

            do_POST = do_HEAD = do_GET

            def answer(self, status: int, body: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body.encode())))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.uri = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()

    def config(self, **more: str) -> CatalogConfig:
        return CatalogConfig.of("lake", {"type": "rest", "uri": self.uri, "token": SECRET, **more})

    def error(self, status: int, kind: str, message: str) -> None:
        self.status = status
        self.body = json.dumps({"error": {"message": message, "type": kind, "code": status}})

    def close(self) -> None:
        self.hold.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def rest() -> Iterator[Rest]:
    server = Rest()
    yield server
    server.close()


def load_wafers(config: CatalogConfig) -> None:
    with opened(config) as found:
        load_table(found, config, "fab.wafers")


class TestRest:
    @pytest.mark.parametrize(
        ("status", "kind", "error", "says"),
        [
            (404, "NoSuchTableException", CatalogError, "'fab.wafers': there is no such table. Check the name"),
            (401, "NotAuthorizedException", CatalogError, "did not accept the credentials.*Check client id"),
            (419, "AuthenticationTimeoutException", CatalogError, "did not accept the credentials"),
            (403, "ForbiddenException", CatalogError, "not allowed: ForbiddenException: because.*Check the grants"),
            (400, "BadRequestException", CatalogError, "refused the request.*because.*Check uri and warehouse"),
            (406, "UnsupportedOperationException", CatalogError, "refused the request.*because"),
            (429, "TooManyRequests", CatalogUnavailable, "no answer.*because.*Try again"),
            (500, "InternalServerError", CatalogUnavailable, "no answer"),
            (502, "BadGateway", CatalogUnavailable, "no answer"),
            (503, "ServiceUnavailable", CatalogUnavailable, "no answer"),
        ],
    )
    def test_each_status_has_one_meaning(
        self, rest: Rest, status: int, kind: str, error: type[CatalogError], says: str
    ) -> None:
        rest.error(status, kind, "because")
        with pytest.raises(
            CatalogError, match=f"catalog 'lake', table {'.*' if status != 404 else ''}.*{says}"
        ) as caught:
            load_wafers(rest.config())
        assert type(caught.value) is error
        assert caught.value.__cause__ is not None

    def test_an_empty_401(self, rest: Rest) -> None:
        """As Polaris answers a bad bearer token."""
        rest.status, rest.body = 401, ""
        with pytest.raises(CatalogError, match="did not accept the credentials"):
            load_wafers(rest.config())

    def test_the_secret_is_not_in_the_message(self, rest: Rest) -> None:
        rest.error(403, "ForbiddenException", f"token {SECRET} may not")
        with pytest.raises(CatalogError, match=r"token \*\*\* may not"):
            load_wafers(rest.config())

    def test_refused_when_it_is_opened(self, rest: Rest) -> None:
        rest.config_status = 403
        rest.error(403, "ForbiddenException", "because")
        with pytest.raises(CatalogError, match="not allowed"):
            load(rest.config())

    def test_something_else_is_listening_there(self, rest: Rest) -> None:
        rest.status, rest.body = 200, "<html>Welcome to nginx</html>"
        rest.config_status = 201
        with pytest.raises(SpecError, match="(?s)cannot be opened.*Check 'type'"):
            load(rest.config())

    def test_nobody_is_listening(self, rest: Rest) -> None:
        config = rest.config()
        rest.close()
        with pytest.raises(CatalogUnavailable, match="no answer.*check that the connection's uri"):
            load(config)

    def test_silence_ends(self, rest: Rest, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(catalog, "HTTP_TIMEOUT_S", (1.0, 0.1))
        rest.hold.clear()
        with pytest.raises(CatalogUnavailable, match="no answer.*timed out"):
            load(rest.config())

    def test_headers_and_token_are_sent(self, rest: Rest) -> None:
        more = {"header.Polaris-Realm": "FAB", "header.X-Iceberg-Access-Delegation": ""}
        with opened(rest.config(**more)):
            pass
        assert rest.headers["polaris-realm"] == "FAB"
        assert rest.headers["authorization"] == f"Bearer {SECRET}"
        assert rest.headers["x-iceberg-access-delegation"] == ""

    def test_credentials_that_the_token_endpoint_refuses(self, rest: Rest) -> None:
        rest.status = 401
        rest.body = json.dumps({"error": "unauthorized_client", "error_description": "no"})
        more = {"credential": f"me:{SECRET}", "oauth2-server-uri": f"{rest.uri}/oauth", "token": ""}
        config = CatalogConfig.of("lake", {**rest.config().properties, **more})
        with pytest.raises(CatalogError, match="did not accept the credentials: unauthorized_client.*Check client id"):
            load_wafers(config)


class TestSql:
    def test_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        config = CatalogConfig.of("lake", {"uri": f"sqlite:///{tmp_path}/no/where.db"})
        with pytest.raises(CatalogError, match="unable to open database file. Check.*folder exists") as caught:
            load(config)
        assert not caught.value.retryable

    def test_a_locked_database_is_worth_another_try(self, tmp_path: Path) -> None:
        config = CatalogConfig.of("lake", {"uri": f"sqlite:///{tmp_path}/c.db?timeout=0.05"})
        with opened(config):
            pass
        holder = sqlite3.connect(tmp_path / "c.db")
        holder.execute("BEGIN EXCLUSIVE")
        try:
            with pytest.raises(CatalogUnavailable, match="busy or away.*locked.*Try again"):
                load_wafers(config)
        finally:
            holder.close()

    def test_the_name_of_the_rows_can_be_told_apart_from_the_connection_s(self, tmp_path: Path) -> None:
        properties = {"uri": f"sqlite:///{tmp_path}/c.db", "warehouse": f"file://{tmp_path}/w"}
        with opened(CatalogConfig.of("one", {**properties, "catalog_name": "shared"})) as found:
            found.create_namespace("fab")
        with opened(CatalogConfig.of("other", {**properties, "catalog_name": "shared"})) as found:
            assert found.list_namespaces() == [("fab",)]
        with opened(CatalogConfig.of("other", properties)) as found:
            assert found.list_namespaces() == []

    def test_a_database_without_its_driver(self) -> None:
        with pytest.raises(NotInstalledError, match="needs a driver"):
            load(CatalogConfig.of("lake", {"uri": "postgresql+pg8000://db/ice"}))


@pytest.mark.parametrize(
    ("properties", "says"),
    [
        ({}, "Check 'type'"),
        ({"type": "nonsense", "uri": "x"}, "Check 'type'"),
        ({"uri": "ftp://x"}, "Check 'type'"),
        ({"type": "sql", "uri": "nonsense"}, "Check the connection's uri"),
    ],
)
def test_configs_that_cannot_be_opened(properties: dict[str, str], says: str) -> None:
    with pytest.raises((SpecError, CatalogError), match=says):
        load(CatalogConfig.of("lake", properties))


def test_without_pyiceberg_the_command_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine: Callable[..., Any] = builtins.__import__

    def without(name: str, *args: Any, **more: Any) -> Any:
        if name.startswith("pyiceberg"):
            raise ImportError(f"No module named {name!r}")
        return genuine(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(NotInstalledError, match=r"pip install 'airflow-gpu-burst\[lake\]'$"):
        load(CatalogConfig.of("lake", {"uri": "sqlite://"}))
