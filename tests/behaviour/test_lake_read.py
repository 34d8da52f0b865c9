"""Reading at a pin: what was pinned, as it was, and each row on exactly one rank."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyiceberg.types import StringType

from airflow_gpu_burst.errors import SnapshotGone, SpecError
from airflow_gpu_burst.lake import cached, read
from airflow_gpu_burst.lake.cached import DataFiles
from airflow_gpu_burst.lake.pins import PinRequest, pin
from airflow_gpu_burst.spec import TablePin
from airflow_gpu_burst.transfer.cache import NodeCache
from tests import lake_fixtures
from tests.faulty_s3 import FaultyS3
from tests.lake_fixtures import WAFERS, Lake, key, wafers
from tests.s3_bucket import Body, Object

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


class TestCache:
    """Data files by way of a cache on this node."""

    @pytest.fixture
    def cache(self, tmp_path: Path) -> NodeCache:
        return NodeCache(tmp_path / "cache", 10**9)

    def rows(self, lake: Lake, found: TablePin, cache: NodeCache, world_size: int = 3, **how: Any) -> list[int]:
        """Of all ranks."""
        shares = [
            read.batches(lake.config, found, rank=rank, world_size=world_size, cache=cache, **how)
            for rank in range(world_size)
        ]
        return [number for share in shares for batch in share for number in batch.column("wafer").to_pylist()]

    def test_the_same_rows(self, files: Lake, cache: NodeCache, tmp_path: Path) -> None:
        found = pinned(files)
        without = [number for rank in range(3) for number in numbers(files, found, rank, 3)]
        assert self.rows(files, found, cache) == without
        assert len(list((tmp_path / "cache").iterdir())) == 7 + 1  # and the lock

    def test_the_same_rows_with_deletes_and_a_filter(self, files: Lake, cache: NodeCache) -> None:
        files.load().delete("wafer > 20")
        files.load().delete("wafer = 3")
        assert sorted(self.rows(files, pinned(files), cache)) == [n for n in range(21) if n != 3]
        assert sorted(self.rows(files, pinned(files), cache, row_filter="wafer > 9")) == list(range(10, 21))
        assert sorted(self.rows(files, pinned(files), cache, columns=["wafer"])) == [n for n in range(21) if n != 3]

    def test_each_file_is_fetched_once_for_all_ranks(
        self, files: Lake, cache: NodeCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fetched: list[str] = []
        genuine = DataFiles._fetch

        def watched(self: DataFiles, location: str, size: int, fd: int) -> None:
            fetched.append(location)
            genuine(self, location, size, fd)

        monkeypatch.setattr(DataFiles, "_fetch", watched)
        found = pinned(files)
        for _ in range(2):
            assert sorted(self.rows(files, found, cache)) == list(range(28))
        assert len(fetched) == len(set(fetched)) == 7

    def test_what_is_there_is_not_read_from_the_storage(
        self, files: Lake, cache: NodeCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from pyiceberg.io.pyarrow import PyArrowFileIO

        found = pinned(files)
        self.rows(files, found, cache)
        opened: list[str] = []
        genuine = PyArrowFileIO.new_input

        def watched(self: PyArrowFileIO, location: str) -> Any:
            opened.append(location)
            return genuine(self, location)

        monkeypatch.setattr(PyArrowFileIO, "new_input", watched)
        assert sorted(self.rows(files, found, cache)) == list(range(28))
        data = {task.file.file_path for task in files.load().scan().plan_files()}
        assert opened and not data & set(opened)

    @pytest.mark.parametrize("limit", [0, 1, 2500])
    def test_without_room(self, files: Lake, tmp_path: Path, limit: int) -> None:
        assert sorted(self.rows(files, pinned(files), NodeCache(tmp_path / "cache", limit))) == list(range(28))

    def test_a_cache_that_breaks(self, files: Lake, cache: NodeCache, tmp_path: Path) -> None:
        found = pinned(files)
        shutil.rmtree(tmp_path / "cache")
        (tmp_path / "cache").write_text("a file")
        assert sorted(self.rows(files, found, cache)) == list(range(28))

    def test_by_the_environment(self, files: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GPU_BURST_CACHE", str(tmp_path / "env"))
        assert sorted(numbers(files, pinned(files), 0, 1)) == list(range(28))
        assert len(list((tmp_path / "env").iterdir())) == 7 + 1
        monkeypatch.setenv("GPU_BURST_CACHE_SIZE", "ten")
        with pytest.raises(SpecError, match="GPU_BURST_CACHE_SIZE='ten'"):
            numbers(files, pinned(files), 0, 1)
        monkeypatch.setenv("GPU_BURST_CACHE_SIZE", "1000000")
        monkeypatch.setenv("GPU_BURST_CACHE", "/proc/nowhere")
        assert sorted(numbers(files, pinned(files), 0, 1)) == list(range(28))


@pytest.mark.parametrize(
    ("location", "properties", "expected"),
    [
        ("s3://b/a/data/x=1/f.parquet", {}, ("s3://b", "a/data/x=1/f.parquet")),
        ("s3a://b/a%20b/f.parquet", {}, ("s3://b", "a%20b/f.parquet")),
        ("s3://b/a//f.parquet", {}, None),
        ("s3://b/a/f.parquet", {"s3.endpoint": ""}, None),
        ("s3://b/a/f.parquet", {"s3.remote-signing-enabled": "true"}, None),
        ("s3://b/a/f.parquet", {"s3.signer": "S3V4RestSigner"}, None),
        ("file:///a/f.parquet", {}, None),
        ("gs://b/a/f.parquet", {}, None),
    ],
)
def test_which_files_this_packages_engine_fetches(
    location: str, properties: dict[str, str], expected: tuple[str, str] | None
) -> None:
    given = {"s3.endpoint": "http://s3:9000", "s3.access-key-id": "a", "s3.secret-access-key": "b", **properties}
    found = cached.place(location, given)
    assert (found and (found[0].uri, found[1])) == expected


def test_files_in_s3_come_by_this_packages_engine(tmp_path: Path) -> None:
    data = bytes(range(256)) * 100
    with FaultyS3(bucket="lake") as server:
        server.bucket.objects["w/f.parquet"] = Object(Body(len(data), 0, data), '"e"')
        properties = {
            "s3.endpoint": server.url,
            "s3.region": "eu",
            "s3.access-key-id": "a",
            "s3.secret-access-key": "b",
        }
        io = SimpleNamespace(properties=properties)
        file = SimpleNamespace(file_path="s3://lake/w/f.parquet", file_size_in_bytes=len(data))
        files = DataFiles(NodeCache(tmp_path, 10**6), [SimpleNamespace(file=file)], lambda: io)  # type: ignore[list-item, return-value, arg-type]
        with files.reading(0) as found:
            assert found.new_input("s3://lake/w/f.parquet").open().read() == data
        files.close()
    assert [call.kind for call in server.calls] == ["GetObject"]
