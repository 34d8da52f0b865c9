"""Read a table at a pin: all of it, or one rank's share."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from airflow_gpu_burst.errors import CatalogError, SnapshotGone, SpecError
from airflow_gpu_burst.lake.cached import DataFiles, cache_of
from airflow_gpu_burst.lake.catalog import CatalogConfig, catalog_errors, load_table, opened
from airflow_gpu_burst.lake.pins import check
from airflow_gpu_burst.spec import TablePin
from airflow_gpu_burst.transfer.cache import NodeCache

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.catalog import Catalog
    from pyiceberg.io import FileIO
    from pyiceberg.table import DataScan, FileScanTask

REFRESH_S = 900.0
"""
How old a loaded table may get before the next file is opened. Storage credentials that a catalog
vends live for an hour or less, and a read over a large table takes longer.
"""


def batches(
    config: CatalogConfig,
    pin: TablePin,
    *,
    rank: int = 0,
    world_size: int = 1,
    columns: Sequence[str] | None = None,
    row_filter: str | None = None,
    cache: NodeCache | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[pa.RecordBatch]:
    """
    The rows of the pinned snapshot, in the snapshot's own schema, with its deletes applied.

    The rows, file after file in the order of their paths, are cut into `world_size` ranges of equal length;
    a rank opens only the files that its range touches. Over all ranks every row comes exactly once, and a
    rank gets the same rows in the same order each time. Counts differ by at most one; with a filter or with
    delete files they differ by more, and a rank may get nothing: a trainer that synchronises after each
    step must know.

    One data file at a time is held in memory.

    :param columns: names, in the order wanted; None: all.
    :param row_filter: an expression of Iceberg, e.g. `"tool = 'ETCH-3' and depth > 1.5"`.
    :param cache: where data files are kept on this node; None: what GPU_BURST_CACHE says, if anything.
    """
    _check_rank(rank, world_size)
    return _batches(config, pin, rank, world_size, columns, row_filter, cache or cache_of(os.environ), clock)


def table(
    config: CatalogConfig,
    pin: TablePin,
    *,
    rank: int = 0,
    world_size: int = 1,
    columns: Sequence[str] | None = None,
    row_filter: str | None = None,
) -> pa.Table:
    """Like `batches`, all in memory at once; without rows, it still has its columns."""
    import pyarrow as pa

    _check_rank(rank, world_size)
    with opened(config) as catalog:
        plan = _plan(catalog, config, pin, columns, row_filter)
        rows = _share(config, pin, plan, rank, world_size, cache_of(os.environ), time.monotonic)
        return pa.Table.from_batches(rows, schema=plan.schema)


def ranges(counts: Sequence[int], rank: int, world_size: int) -> list[tuple[int, int, int]]:
    """
    A rank's share of files with these row counts: (index of the file, first row, end row) of each it touches.

    A function of the file list alone, so that ranks agree without speaking to each other.
    """
    total = sum(counts)
    begin, end = total * rank // world_size, total * (rank + 1) // world_size
    found = []
    offset = 0
    for index, count in enumerate(counts):
        first, last = max(begin - offset, 0), min(end - offset, count)
        if first < last:
            found.append((index, first, last))
        offset += count
    return found


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """
    What a scan needs.

    :param tasks: in an order that is the same for every rank and every time.
    :param schema: what batches have in the end.
    :param renew: the scan of a freshly loaded table.
    """

    scan: DataScan
    tasks: Sequence[FileScanTask]
    schema: pa.Schema
    renew: Callable[[], DataScan]


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise SpecError(f"rank={rank}, world_size={world_size}: give 0 <= rank < world_size")


def _batches(
    config: CatalogConfig,
    pin: TablePin,
    rank: int,
    world_size: int,
    columns: Sequence[str] | None,
    row_filter: str | None,
    cache: NodeCache | None,
    clock: Callable[[], float],
) -> Iterator[pa.RecordBatch]:
    with opened(config) as catalog:
        plan = _plan(catalog, config, pin, columns, row_filter)
        yield from _share(config, pin, plan, rank, world_size, cache, clock)


def _share(
    config: CatalogConfig,
    pin: TablePin,
    plan: _Plan,
    rank: int,
    world_size: int,
    cache: NodeCache | None,
    clock: Callable[[], float],
) -> Iterator[pa.RecordBatch]:
    loaded = clock()
    counts = [task.file.record_count for task in plan.tasks]
    share = ranges(counts, rank, world_size)
    with ExitStack() as stack:
        files: DataFiles | None = None
        if cache is not None:
            files = DataFiles(cache, [plan.tasks[index] for index, _, _ in share], lambda: plan.scan.io)
            stack.enter_context(closing(files))
        for number, (index, first, last) in enumerate(share):
            if clock() - loaded > REFRESH_S:
                # renews the storage credentials, and sees to it that the snapshot is still there
                plan, loaded = replace(plan, scan=plan.renew()), clock()
            with files.reading(number) if files else nullcontext(plan.scan.io) as io:
                found = _read(config, pin, plan, plan.tasks[index], io)
            # The cuts are at rows of the file. Where deletes and the filter have left fewer, every rank moves a
            # cut by the same rule.
            left = sum(batch.num_rows for batch in found)
            begin, end = first * left // counts[index], last * left // counts[index]
            yield from _between(found, begin, end, plan.schema)


def _between(found: list[pa.RecordBatch], begin: int, end: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Rows begin to end of the batches, which are let go of on the way."""
    offset = 0
    found.reverse()
    while found:
        batch = found.pop()
        first, last = max(begin - offset, 0), min(end - offset, batch.num_rows)
        offset += batch.num_rows
        if first < last:
            yield batch.slice(first, last - first).select(schema.names).cast(schema)


def _plan(
    catalog: Catalog,
    config: CatalogConfig,
    pin: TablePin,
    columns: Sequence[str] | None,
    row_filter: str | None,
) -> _Plan:
    import pyarrow as pa
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    renew = functools.partial(_scan, catalog, config, pin, columns, row_filter)
    scan = renew()
    try:
        with catalog_errors(config, table=pin.table):
            schema = schema_to_pyarrow(scan.projection(), include_field_ids=False)
            tasks = sorted(scan.plan_files(), key=lambda task: task.file.file_path)
    except ValueError as error:  # an unknown column, in `columns` or in the filter
        known = ", ".join(field.name for field in scan.table_metadata.schema().fields)
        raise SpecError(
            f"table {pin.table!r}, snapshot {pin.snapshot_id}: {error}. Its columns are: {known}"
        ) from error
    if columns is not None:
        schema = pa.schema([schema.field(name) for name in columns])
    return _Plan(scan=scan, tasks=tasks, schema=schema, renew=renew)


def _scan(
    catalog: Catalog,
    config: CatalogConfig,
    pin: TablePin,
    columns: Sequence[str] | None,
    row_filter: str | None,
) -> DataScan:
    """
    The scan at the pin, over the table as if the snapshot's schema were the current one.

    pyiceberg projects by the snapshot's schema but binds filters to the current one, where a column of
    the snapshot may be renamed or gone.
    """
    from pyparsing import ParseException

    found = load_table(catalog, config, pin.table)
    check(found, pin)
    if pin.schema_id in found.schemas():
        found.metadata = found.metadata.model_copy(update={"current_schema_id": pin.schema_id})
    try:
        return found.scan(
            row_filter=row_filter or "true",
            selected_fields=tuple(columns) if columns is not None else ("*",),
            snapshot_id=int(pin.snapshot_id),
        )
    except ParseException as error:
        raise SpecError(
            f"row_filter={row_filter!r} cannot be read: {error}. Write it like \"tool = 'ETCH-3' and depth > 1.5\""
        ) from error


def _read(config: CatalogConfig, pin: TablePin, plan: _Plan, task: FileScanTask, io: FileIO) -> list[pa.RecordBatch]:
    """
    One file. ArrowScan is given one task at a time: given all, it decodes as many as there are threads ahead
    of the reader and keeps them.
    """
    from pyiceberg.io.pyarrow import ArrowScan

    scan = plan.scan
    arrow = ArrowScan(scan.table_metadata, io, scan.projection(), scan.row_filter)
    try:
        with catalog_errors(config, table=pin.table):
            return list(arrow.to_record_batches([task]))
    except CatalogError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        raise SnapshotGone(
            f"table {pin.table!r}, snapshot {pin.snapshot_id}: data file {task.file.file_path} is not in the "
            "storage any more. Start a new run to pin anew, and check what removes files of snapshots that "
            "tags hold"
        ) from error
