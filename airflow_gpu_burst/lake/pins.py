"""
Pins: a tag that holds one snapshot of a table, named by the run key.

The tag is the durable state. The first try resolves what was asked for and tags it; every later try, and
every concurrent one, reads the tag back and gets the same snapshot, whatever the table has become since.
Nothing else is kept: an XCom may be cleared.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from airflow_gpu_burst.errors import (
    CatalogUnavailable,
    ChecksumMismatch,
    GpuBurstError,
    SnapshotGone,
    SpecError,
    TableReplaced,
)
from airflow_gpu_burst.lake.catalog import (
    ATTEMPTS,
    CatalogConfig,
    backoff,
    catalog_errors,
    load_table,
    opened,
    split_name,
)
from airflow_gpu_burst.spec import TablePin
from airflow_gpu_burst.state import RunKey

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table
    from pyiceberg.table.refs import SnapshotRef
    from pyiceberg.table.snapshots import Snapshot

log = logging.getLogger(__name__)

DEFAULT_RETENTION_S = 30 * 86400.0
"""Long enough to audit last month's run, short enough not to hold every snapshot for ever."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FUTURE_S = 60.0
"""How far ahead of this machine's clock `as_of` may be: clocks differ a little."""
_DIGEST_THREADS = 8
"""Manifests are small objects; reading them one by one would cost a round trip each."""


@dataclass(frozen=True, kw_only=True)
class PinRequest:
    """
    Which snapshot of which table. At most one of `snapshot_id`, `ref` and `as_of`; none: the current one.

    :param table: `namespace.name`.
    :param snapshot_id: as text, since ids exceed 2^53. An int is accepted and becomes text.
    :param ref: a tag or a branch, as it is at the first try.
    :param as_of: the snapshot that was current then. A datetime, or ISO 8601 text, **with a time zone**: a
        naive time is refused, since a guess that is wrong by hours would silently pin other data.
    :param retention_s: how long the tag is meant to hold, from now; None: no end.
    """

    table: str
    snapshot_id: str | None = None
    ref: str | None = None
    as_of: datetime | None = None
    retention_s: float | None = DEFAULT_RETENTION_S

    def __post_init__(self) -> None:
        split_name(self.table)
        given = [n for n in ("snapshot_id", "ref", "as_of") if getattr(self, n) is not None]
        if len(given) > 1:
            raise SpecError(
                f"{' and '.join(given)} are both given for {self.table!r}: give one, or none for the current snapshot"
            )
        if self.snapshot_id is not None:
            object.__setattr__(self, "snapshot_id", _snapshot_id(self.snapshot_id))
        if self.ref is not None and (not isinstance(self.ref, str) or not self.ref.strip()):
            raise SpecError(f"ref={self.ref!r}: give the name of a tag or a branch, e.g. 'main'")
        if self.as_of is not None:
            object.__setattr__(self, "as_of", _instant(self.as_of))
        if self.retention_s is not None and not self.retention_s >= 1:
            raise SpecError(f"retention_s={self.retention_s}: give at least 1 second, or None for no end")


def tag_name(run_key: RunKey, table: str) -> str:
    """
    Name of the tag that a run key holds in a table. The try number is no part of it, on purpose.

    16 hex digits keep runs apart; a tag name must survive every engine that reads the table.
    """
    return "pin-" + hashlib.sha256(f"{run_key.digest}\0{table}".encode()).hexdigest()[:16]


def pin(
    config: CatalogConfig,
    request: PinRequest,
    run_key: RunKey,
    *,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> TablePin:
    """
    Hold the snapshot, and return what is held. Doing it again returns the same pin.

    The tag is a commit of its own (staged beside a write it would get lost in pyiceberg's commit retry) and
    counts only once it has been seen in the reloaded table. After a conflict or a lost answer the table is
    looked at again before anything is decided.

    :raises SnapshotGone: the id or the time asked for is not there (any more).
    :raises SpecError: the request cannot be met as it is.
    :raises CatalogUnavailable: nothing is known; calling again is safe.
    """
    name = tag_name(run_key, request.table)
    failure: CatalogUnavailable | None = None
    tried = False
    with opened(config) as catalog:
        for attempt in range(ATTEMPTS):
            try:
                table = load_table(catalog, config, request.table)
                if (ref := table.refs().get(name)) is not None:
                    return _held(config, table, request, name, ref)
                snapshot = _resolve(config, table, request, clock())
                tried = True
                _create_tag(catalog, config, table, request, name, snapshot, clock())
            except CatalogUnavailable as error:
                if not tried:  # nothing was asked for yet: leave waiting to the caller
                    raise
                failure = error
                backoff(attempt, sleep)
    raise CatalogUnavailable(
        f"table {request.table!r}: tag {name!r} did not stay in {ATTEMPTS} attempts; last: {failure}. "
        "Try again; if it stays so, look for a maintenance job that removes tags"
    ) from failure


def verify(config: CatalogConfig, pin: TablePin, *, check_digest: bool = False) -> Table:
    """
    Check that a pin still stands for what was pinned, and return the table.

    :param check_digest: also read all manifests and compare the digest.
    :raises TableReplaced: the name now belongs to another table.
    :raises SnapshotGone: the snapshot has been expired.
    :raises ChecksumMismatch: the snapshot lists other files than at the time of the pin.
    """
    with opened(config) as catalog:
        table = load_table(catalog, config, pin.table)
        check(table, pin)
        if check_digest and pin.digest:
            snapshot = table.snapshot_by_id(int(pin.snapshot_id))
            assert snapshot is not None  # check() has seen it
            with catalog_errors(config, table=pin.table):
                found = files_digest(table, snapshot)
            if found != pin.digest:
                raise ChecksumMismatch(
                    f"table {pin.table!r}, snapshot {pin.snapshot_id}: its file list hashes to "
                    f"{found[:16]}..., and was {pin.digest[:16]}... when it was pinned. The table's metadata "
                    "has been rewritten; find out by whom before using the data, then pin anew in a new run"
                )
        return table


def check(table: Table, pin: TablePin) -> None:
    """`verify` for a table that has just been loaded. A lost or moved tag is logged: reading is by id."""
    if str(table.metadata.table_uuid) != pin.table_uuid:
        raise TableReplaced(
            f"table {pin.table!r} has been dropped and created again since it was pinned (UUID "
            f"{pin.table_uuid}, now {table.metadata.table_uuid}): the pinned data is gone. Start a new run "
            "to pin the new table"
        )
    if table.snapshot_by_id(int(pin.snapshot_id)) is None:
        raise SnapshotGone(
            f"table {pin.table!r} has no snapshot {pin.snapshot_id} any more: it was expired although tag "
            f"{pin.ref!r} was to hold it. Start a new run to pin anew; to keep snapshots longer, raise the "
            "pin's retention, and check that the maintenance job respects tags"
        )
    ref = table.refs().get(pin.ref)
    if ref is None or str(ref.snapshot_id) != pin.snapshot_id:
        now = "is gone" if ref is None else f"points to {ref.snapshot_id} now"
        log.warning(
            "Tag %s of table %s %s; snapshot %s is still there, but nothing holds it any more",
            pin.ref,
            pin.table,
            now,
            pin.snapshot_id,
        )


def release(config: CatalogConfig, pin: TablePin, *, sleep: Callable[[float], None] = time.sleep) -> bool:
    """
    Let go of a pin. True if this call removed the tag; False if there was none of ours (any more).

    A tag that points elsewhere by now, or stands in another table of the same name, is not ours.
    """
    failure: CatalogUnavailable | None = None
    tried = False
    with opened(config) as catalog:
        for attempt in range(ATTEMPTS):
            try:
                with catalog_errors(config, table=pin.table):
                    if not catalog.table_exists(pin.table):
                        return tried
                table = load_table(catalog, config, pin.table)
                ref = table.refs().get(pin.ref)
                if ref is None or not _is_ours(table, ref, pin):
                    return tried
                tried = True
                with catalog_errors(config, table=pin.table):
                    table.manage_snapshots().remove_tag(pin.ref).commit()
            except CatalogUnavailable as error:
                if not tried:
                    raise
                failure = error
                backoff(attempt, sleep)
    raise CatalogUnavailable(
        f"table {pin.table!r}: tag {pin.ref!r} could not be removed in {ATTEMPTS} attempts; last: {failure}. Try again"
    ) from failure


def files_digest(table: Table, snapshot: Snapshot) -> str:
    """
    SHA-256 over the data and delete files of a snapshot: path relative to the table's location, content,
    size, record count; sorted. Equal digests prove "the same data" without reading it.
    """
    root = table.location().rstrip("/") + "/"
    io = table.io
    with ThreadPoolExecutor(_DIGEST_THREADS) as pool:
        entries = pool.map(lambda manifest: manifest.fetch_manifest_entry(io), snapshot.manifests(io))
        lines = sorted(
            f"{f.file_path.removeprefix(root)}\t{int(f.content)}\t{f.file_size_in_bytes}\t{f.record_count}\n"
            for found in entries
            for f in (entry.data_file for entry in found)
        )
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode())
    return digest.hexdigest()


def _held(config: CatalogConfig, table: Table, request: PinRequest, name: str, ref: SnapshotRef) -> TablePin:
    """The pin that an existing ref stands for."""
    from pyiceberg.table.refs import SnapshotRefType

    if ref.snapshot_ref_type != SnapshotRefType.TAG:
        raise SpecError(
            f"table {request.table!r} has a branch {name!r}, where this run's tag would be. Names 'pin-...' "
            "are for pins: rename or drop the branch"
        )
    if request.snapshot_id is not None and str(ref.snapshot_id) != request.snapshot_id:
        raise SpecError(
            f"table {request.table!r}: this run has already pinned snapshot {ref.snapshot_id} (tag "
            f"{name!r}), and now {request.snapshot_id} is asked for. A run keeps its data: start a new run "
            "for other data, or remove the tag to change this one"
        )
    snapshot = table.snapshot_by_id(ref.snapshot_id)
    if snapshot is None:
        raise SnapshotGone(
            f"table {request.table!r}: tag {name!r} points to snapshot {ref.snapshot_id}, which is not "
            "there: it was expired in spite of the tag. Remove the tag, and start a new run to pin anew"
        )
    expires = "" if ref.max_ref_age_ms is None else _iso(snapshot.timestamp_ms + ref.max_ref_age_ms)
    schema_id = snapshot.schema_id if snapshot.schema_id is not None else table.schema().schema_id
    with catalog_errors(config, table=request.table):
        digest = files_digest(table, snapshot)
    return TablePin(
        catalog=config.name,
        table=request.table,
        table_uuid=str(table.metadata.table_uuid),
        snapshot_id=str(snapshot.snapshot_id),
        ref=name,
        schema_id=schema_id,
        committed_at=_iso(snapshot.timestamp_ms),
        expires_at=expires,
        digest=digest,
    )


def _create_tag(
    catalog: Catalog,
    config: CatalogConfig,
    table: Table,
    request: PinRequest,
    name: str,
    snapshot: Snapshot,
    now: float,
) -> None:
    """
    One try to commit the tag. `table` was loaded just now and has no such ref: the commit requires exactly
    that.

    Engines count a ref's age from its snapshot's time and not from the tag's creation, so the age of the
    snapshot is added: otherwise a tag on old data is removed by the next expiry.
    """
    age_ms = None
    if request.retention_s is not None:
        age_ms = max(0, int(now * 1000) - snapshot.timestamp_ms) + int(request.retention_s * 1000)
    try:
        with catalog_errors(config, table=request.table):
            table.manage_snapshots().create_tag(snapshot.snapshot_id, name, max_ref_age_ms=age_ms).commit()
    except CatalogUnavailable:
        raise
    except (GpuBurstError, ValueError) as error:
        # SQL catalogs answer ValueError and REST catalogs 400 if the snapshot was expired in between
        if load_table(catalog, config, request.table).snapshot_by_id(snapshot.snapshot_id) is not None:
            raise
        raise CatalogUnavailable(
            f"table {request.table!r}: snapshot {snapshot.snapshot_id} was expired while it was being pinned. Try again"
        ) from error


def _resolve(config: CatalogConfig, table: Table, request: PinRequest, now: float) -> Snapshot:
    """The snapshot that is asked for."""
    if not table.metadata.snapshots:
        raise SpecError(
            f"table {request.table!r} has no snapshot yet, so there is nothing to pin. Write to it first, or "
            "let the DAG wait for its data"
        )
    if request.snapshot_id is not None:
        return _by_id(table, request.table, request.snapshot_id)
    if request.as_of is not None:
        return _by_time(table, request.table, request.as_of, now)
    return _by_ref(table, request.table, request.ref or "main")


def _by_id(table: Table, name: str, snapshot_id: str) -> Snapshot:
    snapshot = table.snapshot_by_id(int(snapshot_id))
    if snapshot is None:
        newest = sorted(table.snapshots(), key=lambda s: s.timestamp_ms, reverse=True)[:3]
        raise SnapshotGone(
            f"table {name!r} has no snapshot {snapshot_id}: it was expired, or the id is of another table. "
            "Ids must come as text, for JSON rounds large numbers. The newest here: "
            + ", ".join(f"{s.snapshot_id} of {_iso(s.timestamp_ms)}" for s in newest)
        )
    return snapshot


def _by_ref(table: Table, name: str, ref: str) -> Snapshot:
    snapshot = table.snapshot_by_name(ref)
    if snapshot is None:
        raise SpecError(f"table {name!r} has no ref {ref!r}. Choose one of: {_names(table.refs())}")
    return snapshot


def _by_time(table: Table, name: str, as_of: datetime, now: float) -> Snapshot:
    if as_of.timestamp() > now + _FUTURE_S:
        raise SpecError(
            f"as_of={as_of.isoformat()} is in the future, where no snapshot can be known. Give a time in the "
            "past, or no as_of for the current snapshot"
        )
    millis = (as_of - _EPOCH) // timedelta(milliseconds=1)
    snapshot = table.snapshot_as_of_timestamp(millis)
    if snapshot is None:
        history = [e for e in table.history() if table.snapshot_by_id(e.snapshot_id) is not None]
        first = f"the first that is still known is of {_iso(history[0].timestamp_ms)}" if history else "none is known"
        raise SnapshotGone(
            f"table {name!r} had no snapshot at {as_of.isoformat()}, or it has been expired since: {first}. "
            "Give a later as_of"
        )
    return snapshot


def _is_ours(table: Table, ref: SnapshotRef, pin: TablePin) -> bool:
    from pyiceberg.table.refs import SnapshotRefType

    return (
        str(table.metadata.table_uuid) == pin.table_uuid
        and ref.snapshot_ref_type == SnapshotRefType.TAG
        and str(ref.snapshot_id) == pin.snapshot_id
    )


def _snapshot_id(value: object) -> str:
    text = str(value).strip() if isinstance(value, int | str) and not isinstance(value, bool) else ""
    if not text.removeprefix("-").isdecimal():
        raise SpecError(f"snapshot_id={value!r}: give the id's digits as text, e.g. '4007696190872148070'")
    return text


def _instant(value: object) -> datetime:
    try:
        moment = value if isinstance(value, datetime) else datetime.fromisoformat(str(value).strip())
    except ValueError as error:
        raise SpecError(
            f"as_of={value!r} is no time. Give a datetime or ISO 8601 text, e.g. '2026-01-31T12:00:00+00:00'"
        ) from error
    if moment.utcoffset() is None:
        raise SpecError(
            f"as_of={value!r} has no time zone. Add one, e.g. '2026-01-31T12:00:00+00:00'; "
            "in a template use {{ data_interval_end }} or {{ ts }}"
        )
    return moment.astimezone(UTC)


def _iso(millis: int) -> str:
    return (_EPOCH + timedelta(milliseconds=millis)).isoformat(timespec="milliseconds")


def _names(refs: Iterable[str]) -> str:
    """Refs for people: pins are many and nobody's choice, so they come last and few."""
    ordered = sorted(refs, key=lambda name: (name.startswith("pin-"), name))
    return ", ".join(ordered[:15]) + (f" and {len(ordered) - 15} more" if len(ordered) > 15 else "")
