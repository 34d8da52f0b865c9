"""
A real catalog with real tables, and commits that go wrong on demand.

`lake` yields every kind of catalog that the suites run over. What a test writes or expires "behind the
back" of the package goes through pyiceberg directly.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import Catalog
from pyiceberg.table import Table

from airflow_gpu_burst.lake.catalog import CatalogConfig, opened
from airflow_gpu_burst.lake.write import write_once
from airflow_gpu_burst.state import RunKey
from airflow_gpu_burst.store import StoreConfig, open_store

WAFERS = "fab.wafers"


@dataclass
class Lake:
    """One catalog, seen from outside the package."""

    config: CatalogConfig
    catalog: Catalog

    def create(self, rows: pa.Table, name: str = WAFERS, **properties: str) -> Table:
        """A new table with the rows' schema and without a snapshot."""
        self.catalog.create_namespace_if_not_exists(tuple(name.split(".")[:-1]))
        return self.catalog.create_table(name, schema=rows.schema, properties=properties)

    def load(self, name: str = WAFERS) -> Table:
        return self.catalog.load_table(name)

    def append(self, rows: pa.Table, name: str = WAFERS) -> str:
        """Append, creating the table if need be; the new snapshot's id."""
        table = self.load(name) if self.catalog.table_exists(name) else self.create(rows, name)
        table.append(rows)
        return self.head(name)

    def head(self, name: str = WAFERS) -> str:
        snapshot = self.load(name).current_snapshot()
        assert snapshot is not None
        return str(snapshot.snapshot_id)

    def rows(self, name: str = WAFERS) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.load(name).scan().to_arrow().to_pylist()
        return found

    def expire(self, *snapshot_ids: str, name: str = WAFERS) -> None:
        self.load(name).maintenance.expire_snapshots().by_ids([int(i) for i in snapshot_ids]).commit()

    def data_files(self) -> set[str]:
        """Names of the data files that lie in the warehouse, whether or not a table knows them."""
        warehouse = self.config.properties["warehouse"]
        if warehouse.startswith("file:"):
            store = StoreConfig(uri=warehouse)
        else:
            store = StoreConfig(
                uri=f"s3://lake/{warehouse}",
                endpoint_url=self.config.properties["s3.endpoint"],
                region=self.config.properties["s3.region"],
                access_key_id=self.config.secrets["s3.access-key-id"],
                secret_access_key=self.config.secrets["s3.secret-access-key"],
            )
        keys = [entry.key for entry in open_store(store).list("")]
        return {key.rpartition("/")[2] for key in keys if key.endswith(".parquet")}

    def connection(self) -> dict[str, Any]:
        """As an Airflow connection."""
        properties = {**self.config.properties, **self.config.secrets}
        login, _, password = properties.pop("credential", "").partition(":")
        names = {"header.Polaris-Realm": "realm", "oauth2-server-uri": "oauth2_server_uri"}
        extra = {
            names.get(name, name.replace(".", "_").replace("-", "_")): value
            for name, value in properties.items()
            if name not in ("uri", "header.X-Iceberg-Access-Delegation")
        }
        found: dict[str, Any] = {
            "conn_type": "iceberg_lake",
            "host": properties["uri"],
            "extra": {**extra, "catalog_name": "lake"},
        }
        if login:
            found |= {"login": login, "password": password}
            found["extra"]["access_delegation"] = "none"
        return found

    def remove_tag(self, tag: str, name: str = WAFERS) -> None:
        self.load(name).manage_snapshots().remove_tag(tag).commit()


def _sql(request: pytest.FixtureRequest) -> CatalogConfig:
    path = request.getfixturevalue("tmp_path")
    return CatalogConfig.of(
        "lake", {"type": "sql", "uri": f"sqlite:///{path}/catalog.db", "warehouse": f"file://{path}/warehouse"}
    )


def _rest(request: pytest.FixtureRequest) -> CatalogConfig:
    return CatalogConfig.of("lake", request.getfixturevalue("stack").catalog())


CATALOGS: dict[str, Callable[[pytest.FixtureRequest], CatalogConfig]] = {"sql": _sql, "rest": _rest}
"""A new, empty catalog of each kind: a file, and a warehouse of the lab's REST catalog with its files in S3."""
NEEDS_LAB = ("rest",)


@pytest.fixture(params=[pytest.param(kind, marks=pytest.mark.lab if kind in NEEDS_LAB else ()) for kind in CATALOGS])
def lake(request: pytest.FixtureRequest) -> Iterator[Lake]:
    """An empty catalog of each kind."""
    config = CATALOGS[request.param](request)
    with opened(config) as catalog:
        yield Lake(config=config, catalog=catalog)


def wafers(*numbers: int) -> pa.Table:
    """Rows that can be told apart."""
    tools = pa.array([f"ETCH-{n % 3}" for n in numbers], pa.string())
    return pa.table({"wafer": pa.array(numbers, pa.int64()), "tool": tools})


def key(run_id: str = "scheduled__2026-01-01T00:00:00+00:00", **other: Any) -> RunKey:
    return RunKey(**{"dag_id": "yield", "task_id": "pin", "run_id": run_id, **other})


class NoWait:
    """A `sleep` that does not, and remembers."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.slept.append(seconds)


Commit = Callable[[], None]
Step = Callable[[Commit], None]


def lost_answer(error: Exception) -> Step:
    """The commit happens; its answer gets lost."""

    def step(commit: Commit) -> None:
        commit()
        raise error

    return step


def refused(error: Exception) -> Step:
    """The commit does not happen."""

    def step(commit: Commit) -> None:
        raise error

    return step


def meanwhile(action: Callable[[], object]) -> Step:
    """Somebody else comes between loading the table and committing."""

    def step(commit: Commit) -> None:
        action()
        commit()

    return step


class Faults:
    """Plays one step per commit that reaches the catalog; without steps, commits are left alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[Step] = []
        self.commits = 0
        genuine = Table._do_commit

        def do_commit(table: Table, updates: Any, requirements: Any) -> None:
            if not self.steps:
                return genuine(table, updates, requirements)
            self.commits += 1
            step = self.steps.pop(0)
            rest, self.steps = self.steps, []  # what a step commits itself is not disturbed
            try:
                step(lambda: genuine(table, updates, requirements))
            finally:
                self.steps = rest
            return None

        monkeypatch.setattr(Table, "_do_commit", do_commit)

    def play(self, *steps: Step) -> None:
        self.steps = list(steps)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


class Processes:
    """Real processes, forked from a clean one that has imported everything: an import costs seconds."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        modules = ["pyiceberg.catalog.sql", "pyiceberg.catalog.rest", "pyiceberg.io.pyarrow"]
        self._context.set_forkserver_preload([__name__, *modules])

    def append_killed_after_commit(self, config: CatalogConfig, run_key: RunKey) -> int:
        """Append, and die between the commit and its answer; the exit code."""
        process = self._context.Process(target=_append_and_die, args=(_all(config), run_key))
        process.start()
        process.join()
        assert process.exitcode is not None
        return process.exitcode

    def append_at_once(self, config: CatalogConfig, run_key: RunKey, count: int) -> list[bool]:
        """What each of them says: were the rows there already?"""
        barrier, answers = self._context.Barrier(count), self._context.Queue()
        args = (_all(config), run_key, barrier, answers)
        racers = [self._context.Process(target=_append_at_once, args=args) for _ in range(count)]
        for racer in racers:
            racer.start()
        found = [answers.get(timeout=60) for _ in racers]
        for racer in racers:
            racer.join()
        answers.close()
        return found


def _all(config: CatalogConfig) -> dict[str, str]:
    return {**config.properties, **config.secrets}


def _append_and_die(properties: dict[str, str], run_key: RunKey) -> None:
    genuine = Table._do_commit

    def killed(table: Table, updates: Any, requirements: Any) -> None:
        genuine(table, updates, requirements)
        os._exit(9)

    Table._do_commit = killed  # type: ignore[assignment, method-assign]
    write_once(CatalogConfig.of("lake", properties), WAFERS, wafers(2), run_key)


def _append_at_once(properties: dict[str, str], run_key: RunKey, barrier: Any, answers: Any) -> None:
    barrier.wait()
    answers.put(write_once(CatalogConfig.of("lake", properties), WAFERS, wafers(2), run_key).already)
