"""Reading at a pin: what was pinned, as it was, and each row on exactly one rank."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyiceberg.types import StringType

from airflow_gpu_burst.errors import SnapshotGone, SpecError
from airflow_gpu_burst.lake import read
from airflow_gpu_burst.lake.pins import PinRequest, pin
from airflow_gpu_burst.spec import TablePin
from tests import lake_fixtures
from tests.lake_fixtures import WAFERS, Lake, key, wafers

lake = lake_fixtures.lake


def pinned(lake: Lake, run_id: str = "read", **request: str) -> TablePin:
    return pin(lake.config, PinRequest(table=WAFERS, **request), key(run_id))  # type: ignore[arg-type]


def numbers(lake: Lake, found: TablePin, rank: int, world_size: int, row_filter: str | None = None) -> list[int]:
    shares = read.batches(lake.config, found, rank=rank, world_size=world_size, row_filter=row_filter)
    return [number for batch in shares for number in batch.column("wafer").to_pylist()]


@pytest.fixture
def files(lake: Lake) -> Lake:
    """7 files of 1, 2, 3 ... 7 rows, numbered throughout."""
    first = 0
    for size in range(1, 8):
        lake.append(wafers(*range(first, first + size)))
        first += size
    return lake


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 8, 27, 28, 29, 64])
def test_each_row_is_on_exactly_one_rank(files: Lake, world_size: int) -> None:
    found = pinned(files)
    shares = [numbers(files, found, rank, world_size) for rank in range(world_size)]
    assert sorted(number for share in shares for number in share) == list(range(28))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_rank_gets_the_same_rows_in_the_same_order_again(files: Lake) -> None:
    found = pinned(files)
    before = [numbers(files, found, rank, 5) for rank in range(5)]
    files.append(wafers(99))
    assert [numbers(files, found, rank, 5) for rank in range(5)] == before


@pytest.mark.parametrize("world_size", [1, 3, 11])
@pytest.mark.parametrize("row_filter", ["wafer > 9", "tool = 'ETCH-1'", "wafer = 27", "wafer < 0"])
def test_with_a_filter_too(files: Lake, world_size: int, row_filter: str) -> None:
    found = pinned(files)
    shares = [numbers(files, found, rank, world_size, row_filter) for rank in range(world_size)]
    expected = files.load().scan(row_filter=row_filter).to_arrow().column("wafer").to_pylist()
    assert sorted(number for share in shares for number in share) == sorted(expected)


def test_ranks_share_what_a_filter_leaves_of_a_file(lake: Lake) -> None:
    lake.append(wafers(*range(100)))
    found = pinned(lake)
    shares = [numbers(lake, found, rank, 4, "wafer < 40") for rank in range(4)]
    assert [len(share) for share in shares] == [10, 10, 10, 10]


def test_with_deleted_rows_too(files: Lake) -> None:
    files.load().delete("wafer > 20")
    files.load().delete("wafer = 3")
    found = pinned(files)
    for world_size in (1, 4, 9):
        shares = [numbers(files, found, rank, world_size) for rank in range(world_size)]
        assert sorted(n for share in shares for n in share) == [n for n in range(21) if n != 3]


@given(
    counts=st.lists(st.integers(0, 10**12), max_size=30),
    world_size=st.integers(1, 70),
)
def test_ranges_are_complete_disjoint_and_equal(counts: list[int], world_size: int) -> None:
    taken: dict[int, int] = dict.fromkeys(range(len(counts)), 0)
    sizes = []
    for rank in range(world_size):
        share = read.ranges(counts, rank, world_size)
        for index, first, last in share:
            assert first == taken[index]  # no gap and no overlap
            assert first < last <= counts[index]
            taken[index] = last
        sizes.append(sum(last - first for _, first, last in share))
    assert list(taken.values()) == counts
    assert max(sizes) - min(sizes) <= 1


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    world_size=st.integers(1, 9),
    limit=st.integers(0, 160),
)
def test_split_over_arbitrary_files(lake: Lake, sizes: list[int], world_size: int, limit: int) -> None:
    if lake.catalog.table_exists(WAFERS):
        lake.catalog.drop_table(WAFERS)
    first = 0
    for size in sizes:
        lake.append(wafers(*range(first, first + size)))
        first += size
    found = pinned(lake, f"{sizes} {world_size}")
    shares = [numbers(lake, found, rank, world_size, f"wafer < {limit}") for rank in range(world_size)]
    assert sorted(n for share in shares for n in share) == list(range(min(first, limit)))


def test_only_the_files_of_the_range_are_opened(files: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyiceberg.io.pyarrow import ArrowScan

    opened: list[str] = []
    genuine = ArrowScan.to_record_batches

    def watched(scan: ArrowScan, tasks: list[object]) -> object:
        opened.extend(task.file.file_path for task in tasks)  # type: ignore[attr-defined]
        return genuine(scan, tasks)  # type: ignore[arg-type]

    monkeypatch.setattr(ArrowScan, "to_record_batches", watched)
    found = pinned(files)
    for rank in range(4):
        numbers(files, found, rank, 4)
    assert len(set(opened)) == 7
    assert len(opened) <= 7 + 3  # a cut falls into one file, which two ranks read


def test_memory_is_one_file(files: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches come while later files have not been opened yet."""
    from pyiceberg.io.pyarrow import ArrowScan

    opened: list[object] = []
    genuine = ArrowScan.to_record_batches

    def watched(scan: ArrowScan, tasks: list[object]) -> object:
        opened.extend(tasks)
        return genuine(scan, tasks)  # type: ignore[arg-type]

    monkeypatch.setattr(ArrowScan, "to_record_batches", watched)
    rows = read.batches(files.config, pinned(files))
    next(rows)
    assert len(opened) == 1
    rows.close()  # type: ignore[attr-defined]


class TestSchema:
    def test_is_that_of_the_snapshot(self, lake: Lake) -> None:
        lake.append(wafers(1, 2, 3))
        before = pinned(lake, "before")
        with lake.load().update_schema() as update:
            update.add_column("lot", StringType())
            update.rename_column("tool", "chamber")
        lake.append(pa.table({"wafer": [4], "chamber": ["ETCH-1"], "lot": ["L1"]}))
        assert read.table(lake.config, before).to_pylist() == wafers(1, 2, 3).to_pylist()
        after = read.table(lake.config, pinned(lake, "after"))
        assert after.column_names == ["wafer", "chamber", "lot"]
        assert after.num_rows == 4

    def test_filters_know_the_snapshot_s_columns_only(self, lake: Lake) -> None:
        lake.append(wafers(1, 2, 3))
        before = pinned(lake, "before")
        with lake.load().update_schema() as update:
            update.rename_column("tool", "chamber")
        found = read.table(lake.config, before, row_filter="tool = 'ETCH-2'", columns=["wafer"])
        assert found.to_pylist() == [{"wafer": 2}]
        with pytest.raises(SpecError, match="chamber.*Its columns are: wafer, tool$"):
            read.table(lake.config, before, row_filter="chamber = 'ETCH-2'")

    def test_a_dropped_column_is_still_there(self, lake: Lake) -> None:
        lake.append(wafers(1))
        before = pinned(lake)
        with lake.load().update_schema() as update:
            update.delete_column("tool")
        assert read.table(lake.config, before, row_filter="tool = 'ETCH-1'").column_names == ["wafer", "tool"]

    def test_columns_come_in_the_order_asked_for(self, lake: Lake) -> None:
        lake.append(wafers(1))
        assert read.table(lake.config, pinned(lake), columns=["tool", "wafer"]).column_names == ["tool", "wafer"]

    def test_unknown_column_lists_those_there_are(self, lake: Lake) -> None:
        lake.append(wafers(1))
        with pytest.raises(SpecError, match="lot.*Its columns are: wafer, tool$"):
            read.table(lake.config, pinned(lake), columns=["lot"])

    def test_a_filter_that_cannot_be_read(self, lake: Lake) -> None:
        lake.append(wafers(1))
        with pytest.raises(SpecError, match="cannot be read.*Write it like"):
            read.table(lake.config, pinned(lake), row_filter="wafer >>> 1")

    def test_no_rows_still_have_columns(self, lake: Lake) -> None:
        lake.append(wafers())
        found = read.table(lake.config, pinned(lake))
        assert found.num_rows == 0
        assert found.column_names == ["wafer", "tool"]
        assert list(read.batches(lake.config, pinned(lake))) == []

    def test_all_batches_have_one_schema(self, lake: Lake) -> None:
        lake.append(wafers(1))
        lake.append(wafers(2).set_column(1, "tool", pa.array(["ETCH-2"], pa.large_string())))
        rows = list(read.batches(lake.config, pinned(lake)))
        assert len({str(batch.schema) for batch in rows}) == 1
        assert pa.Table.from_batches(rows).num_rows == 2


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 1), (1, 1), (0, 0), (3, 2)])
def test_ranks_that_cannot_be(lake: Lake, rank: int, world_size: int) -> None:
    lake.append(wafers(1))
    with pytest.raises(SpecError, match="0 <= rank < world_size"):
        read.batches(lake.config, pinned(lake), rank=rank, world_size=world_size)


def test_a_data_file_that_is_gone(files: Lake) -> None:
    found = pinned(files)
    task = next(iter(files.load().scan().plan_files()))
    files.load().io.delete(task.file.file_path)
    with pytest.raises(SnapshotGone, match="is not in the storage any more. Start a new run"):
        read.table(files.config, found)


def test_a_long_read_loads_the_table_anew(files: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vended storage credentials end within the hour."""
    from airflow_gpu_burst.lake import catalog

    loads = 0
    genuine = catalog.load_table

    def counted(*args: object) -> object:
        nonlocal loads
        loads += 1
        return genuine(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(read, "load_table", counted)
    ticks = iter(range(0, 10**6, 400))
    found = pinned(files)
    rows = read.batches(files.config, found, clock=lambda: float(next(ticks)))
    assert sum(batch.num_rows for batch in rows) == 28
    assert loads == 3  # 400 s per file: after the 3rd and the 6th


def test_an_expiry_during_a_long_read_is_told(files: Lake) -> None:
    found = pinned(files)
    ticks = iter([0.0, 0.0, *[1e6 * n for n in range(1, 20)]])
    rows = read.batches(files.config, found, clock=lambda: next(ticks))
    next(rows)
    files.append(wafers(99))
    files.remove_tag(found.ref)
    files.expire(found.snapshot_id)
    with pytest.raises(SnapshotGone, match="expired"):
        list(rows)
