"""
Write exactly once per run key.

Iceberg's own append is not idempotent: a retry after a lost answer adds the rows again. Here each write
stamps the run key into its snapshot, every attempt looks for the stamp first, and every commit requires that
the table's head is still the one that was looked at. So of all attempts and all writers of one run key, at
most one commits.
"""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from airflow_gpu_burst.errors import CatalogError, CatalogUnavailable, SpecError
from airflow_gpu_burst.lake.catalog import (
    ATTEMPTS,
    CatalogConfig,
    backoff,
    catalog_errors,
    is_conflict,
    load_table,
    opened,
    split_name,
)
from airflow_gpu_burst.state import RunKey

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.catalog import Catalog
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table, Transaction
    from pyiceberg.table.snapshots import Snapshot

log = logging.getLogger(__name__)

RUN_KEY_PROPERTY = "gpu-burst.run-key"
WRITER_PROPERTY = "gpu-burst.writer"
_PREFIX = "gpu-burst."


@dataclass(frozen=True, kw_only=True)
class WriteResult:
    """
    :param snapshot_id: the snapshot that holds the rows. Text: ids exceed 2^53.
    :param already: True when an earlier try (or a concurrent one) had written them.
    """

    table: str
    table_uuid: str
    snapshot_id: str
    already: bool


def write_once(
    config: CatalogConfig,
    table_name: str,
    arrow_table: pa.Table,
    run_key: RunKey,
    *,
    part: str = "",
    replace: Mapping[str, str] | Literal["everything"] | None = None,
    properties: Mapping[str, str] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> WriteResult:
    """
    Write the rows, unless this run key has written them to this table before.

    The first set of rows of a run key stands; a later try does not compare its own with it. The table (and
    its namespace) is created from the rows' schema if it is missing. The memory of what was written is the
    table's own snapshots: once the snapshot has been expired, or the table rolled back behind it, the same
    run key writes again.

    :param part: tells several writes of one run to one table apart.
    :param replace: rows that the new ones take the place of, in the same commit: "everything", or those
        with these values (`{"run_key": "…"}`). None: rows are only added.
    :param properties: more to stamp into the snapshot, for people.
    :raises SpecError: the rows do not fit the table.
    :raises CatalogUnavailable: nothing is known; calling again is safe.
    """
    split_name(table_name)
    stamp = hashlib.sha256(f"{run_key.digest}\0{part}".encode()).hexdigest()
    wrong = sorted(key for key in properties or {} if key.startswith(_PREFIX))
    if wrong:
        raise SpecError(f"properties {wrong}: names with {_PREFIX!r} are this package's own; choose others")
    writer = uuid.uuid4().hex
    stamps = {
        **(properties or {}),
        RUN_KEY_PROPERTY: stamp,
        WRITER_PROPERTY: writer,
        f"{_PREFIX}run": str(run_key),
    }
    staged = _Staged(config=config, name=table_name, rows=arrow_table, stamps=stamps, replace=replace)
    failure: CatalogUnavailable | None = None
    tried = False
    with opened(config) as catalog:
        for attempt in range(ATTEMPTS):
            try:
                table = _load(catalog, config, table_name)
                if table is None:
                    tried = True
                    table = _create(catalog, config, table_name, arrow_table)
                if (found := find(table, stamp)) is not None:
                    ours = found.summary is not None and found.summary[WRITER_PROPERTY] == writer
                    if not ours:
                        staged.discard(table)
                    return WriteResult(
                        table=table_name,
                        table_uuid=str(table.metadata.table_uuid),
                        snapshot_id=str(found.snapshot_id),
                        already=not ours,
                    )
                tried = True
                staged.commit(table)
            except CatalogUnavailable as error:
                if not tried:  # nothing was asked for yet: leave waiting to the caller
                    raise
                failure = error
                backoff(attempt, sleep)
    raise CatalogUnavailable(
        f"table {table_name!r}: rows could not be written in {ATTEMPTS} attempts; last: {failure}. Try "
        "again: what may have been written will be found"
    ) from failure


def find(table: Table, stamp: str) -> Snapshot | None:
    """
    The snapshot with this stamp in the history of the main branch.

    A snapshot that main has been rolled back behind does not count: its rows are not in the table. Where an
    expiry has torn the chain of parents, it counts if nothing speaks against it.
    """
    stamped = [s for s in table.snapshots() if s.summary is not None and s.summary[RUN_KEY_PROPERTY] == stamp]
    return next((s for s in stamped if _in_main(table, s)), None)


def _in_main(table: Table, wanted: Snapshot) -> bool:
    current = table.current_snapshot()
    while current is not None:
        if current.snapshot_id == wanted.snapshot_id:
            return True
        if _order(current) < _order(wanted):
            return False  # the chain went past it: it was rolled back, or is on another branch
        parent = current.parent_snapshot_id
        current = table.snapshot_by_id(parent) if parent is not None else None
    return table.current_snapshot() is not None


def _order(snapshot: Snapshot) -> tuple[int, int]:
    return (snapshot.sequence_number or 0, snapshot.timestamp_ms)


@dataclass(kw_only=True)
class _Staged:
    """The rows on their way: data files are written once, however often the commit has to be tried."""

    config: CatalogConfig
    name: str
    rows: pa.Table
    stamps: Mapping[str, str]
    replace: Mapping[str, str] | Literal["everything"] | None
    unknown: bool = False
    """True once a commit got no clear answer: then no file may be deleted any more."""
    files: list[DataFile] = field(default_factory=list)
    layout: tuple[object, ...] = ()

    def commit(self, table: Table) -> None:
        """One try, on top of exactly this state of the table."""
        layout = (table.metadata.table_uuid, table.schema().schema_id, table.spec().spec_id)
        _forbid_retries(table)
        transaction = table.transaction()
        with catalog_errors(self.config, table=self.name):
            self._delete_replaced(table, transaction)
            if layout == self.layout:
                with transaction.update_snapshot(snapshot_properties=dict(self.stamps)).fast_append() as append:
                    for data_file in self.files:
                        append.append_data_file(data_file)
            else:
                self._write(transaction)
                self.files, self.layout = _files(table, transaction), layout
        try:
            with catalog_errors(self.config, table=self.name):
                transaction.commit_transaction()
        except CatalogUnavailable as error:
            self.unknown = self.unknown or not is_conflict(error)
            raise

    def discard(self, table: Table) -> None:
        """Delete the files of a writer that came second. What cannot be is left to the table's clean-up."""
        if self.unknown:
            return
        for data_file in self.files:
            try:
                table.io.delete(data_file.file_path)
            except Exception as error:
                log.info("File %s of a lost race could not be deleted: %s", data_file.file_path, error)

    def _delete_replaced(self, table: Table, transaction: Transaction) -> None:
        if self.replace is None or table.current_snapshot() is None:
            return
        from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression, EqualTo

        values = {} if self.replace == "everything" else self.replace
        condition: BooleanExpression = AlwaysTrue()
        for column, value in values.items():
            condition = And(condition, EqualTo(column, value))  # type: ignore[arg-type, call-arg]
        with warnings.catch_warnings():
            # Nothing to replace is no news.
            warnings.filterwarnings("ignore", message="Delete operation did not match any records")
            try:
                transaction.delete(condition)
            except ValueError as error:
                raise SpecError(
                    f"table {self.name!r}: replace={self.replace!r} does not fit: {error}. Name columns of the "
                    "table, and values of their types"
                ) from error

    def _write(self, transaction: Transaction) -> None:
        try:
            transaction.append(self.rows, snapshot_properties=dict(self.stamps))
        except ValueError as error:
            raise SpecError(
                f"table {self.name!r}: the rows do not fit: {error}. Cast them to the table's schema first, "
                "or evolve the table"
            ) from error


def _forbid_retries(table: Table) -> None:
    """
    Switch off pyiceberg's own commit retry, for this object only; nothing of it is committed.

    That retry puts the rows on top of whatever was committed meanwhile, without looking whether it was the
    same rows.
    """
    properties = {**table.metadata.properties, "commit.retry.num-retries": "0"}
    table.metadata = table.metadata.model_copy(update={"properties": properties})


def _files(table: Table, transaction: Transaction) -> list[DataFile]:
    """The data files that a transaction is about to add."""
    snapshot = transaction.table_metadata.current_snapshot()
    assert snapshot is not None  # an append always stages one
    return [
        entry.data_file
        for manifest in snapshot.manifests(table.io)
        if manifest.added_snapshot_id == snapshot.snapshot_id
        for entry in manifest.fetch_manifest_entry(table.io)
        if entry.snapshot_id == snapshot.snapshot_id
    ]


def _load(catalog: Catalog, config: CatalogConfig, name: str) -> Table | None:
    from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

    try:
        return load_table(catalog, config, name)
    except CatalogError as error:
        if isinstance(error.__cause__, NoSuchTableError | NoSuchNamespaceError):
            return None
        raise


def _create(catalog: Catalog, config: CatalogConfig, name: str, rows: pa.Table) -> Table:
    """The table, by us or by whoever was faster."""
    try:
        with catalog_errors(config, table=name):
            catalog.create_namespace_if_not_exists(split_name(name)[:-1])
            return catalog.create_table_if_not_exists(name, schema=rows.schema)
    except (ValueError, TypeError) as error:
        raise SpecError(
            f"table {name!r} cannot be created from the rows' schema: {error}. Cast the columns to types that "
            "Iceberg has, or create the table first"
        ) from error
