"""write_once: one set of rows per run key, whatever happens between the commit and its answer."""

from __future__ import annotations

import threading
from typing import Any

import pyarrow as pa
import pytest
import requests
from pyiceberg import exceptions as ice
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import StringType

from airflow_gpu_burst.errors import CatalogError, CatalogUnavailable, SpecError
from airflow_gpu_burst.lake.write import RUN_KEY_PROPERTY, WriteResult, write_once
from tests import lake_fixtures
from tests.lake_fixtures import (
    WAFERS,
    Commit,
    Faults,
    Lake,
    NoWait,
    Processes,
    key,
    lost_answer,
    meanwhile,
    refused,
    wafers,
)

lake = lake_fixtures.lake
faults = lake_fixtures.faults

MAYBE = [
    ice.CommitStateUnknownException("504"),
    ice.ServiceUnavailableError("503"),
    requests.ConnectionError("reset by peer"),
    requests.ReadTimeout("read timed out"),
]
CONFLICT = ice.CommitFailedException("409")


def written(lake: Lake) -> list[int]:
    return sorted(row["wafer"] for row in lake.rows())


def named_files(lake: Lake) -> set[str]:
    """Data files of all snapshots."""
    table = lake.load()
    return {
        entry.data_file.file_path.rpartition("/")[2]
        for snapshot in table.snapshots()
        for manifest in snapshot.manifests(table.io)
        for entry in manifest.fetch_manifest_entry(table.io)
    }


def test_appends_and_the_second_time_does_not(lake: Lake) -> None:
    lake.append(wafers(1))
    first = write_once(lake.config, WAFERS, wafers(2, 3), key())
    assert first == WriteResult(
        table=WAFERS, table_uuid=str(lake.load().metadata.table_uuid), snapshot_id=lake.head(), already=False
    )
    lake.append(wafers(4))
    again = write_once(lake.config, WAFERS, wafers(2, 3), key())
    assert again == WriteResult(**{**vars(first), "already": True})
    assert written(lake) == [1, 2, 3, 4]


def test_other_runs_and_other_parts_append(lake: Lake) -> None:
    write_once(lake.config, WAFERS, wafers(1), key("a"))
    write_once(lake.config, WAFERS, wafers(2), key("b"))
    write_once(lake.config, WAFERS, wafers(3), key("a", map_index=3))
    write_once(lake.config, WAFERS, wafers(4), key("a"), part="summary")
    assert written(lake) == [1, 2, 3, 4]


def test_creates_namespace_and_table(lake: Lake) -> None:
    result = write_once(lake.config, "fab.new.results", wafers(1, 2), key())
    assert not result.already
    assert lake.rows("fab.new.results") == wafers(1, 2).to_pylist()


def test_stamps_what_people_ask_for(lake: Lake) -> None:
    result = write_once(lake.config, WAFERS, wafers(1), key("ロット 42"), properties={"model": "m7"})
    snapshot = lake.load().snapshot_by_id(int(result.snapshot_id))
    assert snapshot is not None
    assert snapshot.summary is not None
    assert snapshot.summary["model"] == "m7"
    assert snapshot.summary["gpu-burst.run"] == "yield / pin / ロット 42"
    assert len(str(snapshot.summary[RUN_KEY_PROPERTY])) == 64
    with pytest.raises(SpecError, match="choose others"):
        write_once(lake.config, WAFERS, wafers(1), key(), properties={RUN_KEY_PROPERTY: "mine"})


def test_no_rows_are_remembered_too(lake: Lake) -> None:
    assert write_once(lake.config, WAFERS, wafers(), key()).already is False
    assert write_once(lake.config, WAFERS, wafers(), key()).already is True


def test_rows_that_do_not_fit(lake: Lake) -> None:
    lake.append(wafers(1))
    with pytest.raises(SpecError, match="(?s)do not fit.*Cast them"):
        write_once(lake.config, WAFERS, pa.table({"wafer": ["x"], "tool": ["y"]}), key())
    assert written(lake) == [1]


class TestLostAnswers:
    @pytest.mark.parametrize("error", MAYBE, ids=lambda e: type(e).__name__)
    def test_committed_all_the_same(self, lake: Lake, faults: Faults, error: Exception) -> None:
        lake.append(wafers(1))
        faults.play(lost_answer(error))
        result = write_once(lake.config, WAFERS, wafers(2), key(), sleep=NoWait())
        assert (result.already, result.snapshot_id) == (False, lake.head())
        assert written(lake) == [1, 2]

    @pytest.mark.parametrize("error", [*MAYBE, CONFLICT], ids=lambda e: type(e).__name__)
    def test_not_committed(self, lake: Lake, faults: Faults, error: Exception) -> None:
        lake.append(wafers(1))
        faults.play(refused(error), refused(error))
        assert write_once(lake.config, WAFERS, wafers(2), key(), sleep=NoWait()).already is False
        assert written(lake) == [1, 2]
        assert lake.data_files() == named_files(lake)  # written once, however often it was tried

    def test_a_late_commit_of_an_earlier_attempt_loses(self, lake: Lake, faults: Faults) -> None:
        """The first attempt's commit sits in a queue somewhere and is done after the second one's."""
        lake.append(wafers(1))
        late: list[Commit] = []

        def swallow(commit: Commit) -> None:
            late.append(commit)
            raise requests.ReadTimeout("read timed out")

        faults.play(swallow)
        write_once(lake.config, WAFERS, wafers(2), key(), sleep=NoWait())
        with pytest.raises(ice.CommitFailedException):
            late[0]()
        assert written(lake) == [1, 2]

    def test_a_late_commit_that_comes_first_wins(self, lake: Lake, faults: Faults) -> None:
        lake.append(wafers(1))
        late: list[Commit] = []

        def swallow(commit: Commit) -> None:
            late.append(commit)
            raise requests.ReadTimeout("read timed out")

        faults.play(swallow, meanwhile(lambda: late[0]()))
        result = write_once(lake.config, WAFERS, wafers(2), key(), sleep=NoWait())
        assert (result.already, result.snapshot_id) == (False, lake.head())
        assert written(lake) == [1, 2]

    def test_gives_up_and_may_be_called_again(self, lake: Lake, faults: Faults) -> None:
        lake.append(wafers(1))
        faults.play(*[refused(MAYBE[0])] * 19, lost_answer(MAYBE[0]))
        with pytest.raises(CatalogUnavailable, match="Try again: what may have been written will be found$"):
            write_once(lake.config, WAFERS, wafers(2), key(), sleep=NoWait())
        assert write_once(lake.config, WAFERS, wafers(2), key()).already is True
        assert written(lake) == [1, 2]

    def test_a_refusal_is_final(self, lake: Lake, faults: Faults) -> None:
        lake.append(wafers(1))
        faults.play(refused(ice.ForbiddenError("no")))
        with pytest.raises(CatalogError, match="not allowed"):
            write_once(lake.config, WAFERS, wafers(2), key(), sleep=NoWait())
        assert written(lake) == [1]

    def test_killed_between_commit_and_answer(self, lake: Lake) -> None:
        """A real process, and no chance to clean up."""
        lake.append(wafers(1))
        assert Processes().append_killed_after_commit(lake.config, key()) == 9
        assert write_once(lake.config, WAFERS, wafers(2), key()).already is True
        assert written(lake) == [1, 2]


class TestRaces:
    def test_an_unrelated_append_in_between(self, lake: Lake, faults: Faults) -> None:
        lake.append(wafers(1))
        faults.play(meanwhile(lambda: lake.append(wafers(7))), meanwhile(lambda: lake.append(wafers(8))))
        result = write_once(lake.config, WAFERS, wafers(2), key(), sleep=NoWait())
        assert (result.already, result.snapshot_id) == (False, lake.head())
        assert written(lake) == [1, 2, 7, 8]
        assert lake.data_files() == named_files(lake)

    def test_the_same_run_in_between(self, lake: Lake, faults: Faults) -> None:
        """A zombie try and the retry: the second finds the first's rows and takes its own files away."""
        lake.append(wafers(1))
        theirs: list[WriteResult] = []
        faults.play(meanwhile(lambda: theirs.append(write_once(lake.config, WAFERS, wafers(2), key()))))
        ours = write_once(lake.config, WAFERS, wafers(2), key(), sleep=NoWait())
        assert ours.already
        assert ours.snapshot_id == theirs[0].snapshot_id
        assert written(lake) == [1, 2]
        assert lake.data_files() == named_files(lake)

    def test_nothing_is_deleted_after_an_unknown_outcome(self, lake: Lake, faults: Faults) -> None:
        lake.append(wafers(1))
        faults.play(refused(MAYBE[3]), meanwhile(lambda: write_once(lake.config, WAFERS, wafers(2), key())))
        assert write_once(lake.config, WAFERS, wafers(2), key(), sleep=NoWait()).already
        assert written(lake) == [1, 2]
        assert len(lake.data_files() - named_files(lake)) == 1

    def test_threads_of_one_run_on_an_empty_catalog(self, lake: Lake) -> None:
        results = self._race(lake, [key()] * 6)
        assert [r.already for r in results].count(False) == 1
        assert len({r.snapshot_id for r in results}) == 1
        assert written(lake) == [5]

    def test_threads_of_many_runs(self, lake: Lake) -> None:
        results = self._race(lake, [key(map_index=n // 2) for n in range(12)])
        assert [r.already for r in results].count(False) == 6
        assert written(lake) == [5] * 6

    def test_processes_of_one_run(self, lake: Lake) -> None:
        lake.append(wafers(1))
        assert sorted(Processes().append_at_once(lake.config, key(), 3)) == [False, True, True]
        assert written(lake) == [1, 2]

    def _race(self, lake: Lake, run_keys: list[object]) -> list[WriteResult]:
        results: list[WriteResult] = []
        barrier = threading.Barrier(len(run_keys))

        def one(run_key: object) -> None:
            barrier.wait()
            results.append(write_once(lake.config, WAFERS, wafers(5), run_key))  # type: ignore[arg-type]

        threads = [threading.Thread(target=one, args=(run_key,)) for run_key in run_keys]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == len(run_keys)
        return results


class TestMemory:
    def test_after_a_rollback_the_rows_are_missing_and_come_again(self, lake: Lake) -> None:
        before = lake.append(wafers(1))
        write_once(lake.config, WAFERS, wafers(2), key())
        lake.load().manage_snapshots().set_current_snapshot(snapshot_id=int(before)).commit()
        lake.append(wafers(3))
        assert write_once(lake.config, WAFERS, wafers(2), key()).already is False
        assert written(lake) == [1, 2, 3]

    def test_rows_on_another_branch_do_not_count(self, lake: Lake) -> None:
        before = lake.append(wafers(1))
        write_once(lake.config, WAFERS, wafers(2), key())
        table = lake.load()
        table.manage_snapshots().create_branch(int(lake.head()), "audit").commit()
        lake.load().manage_snapshots().set_current_snapshot(snapshot_id=int(before)).commit()
        assert write_once(lake.config, WAFERS, wafers(2), key()).already is False

    def test_a_torn_chain_of_parents_is_given_the_benefit(self, lake: Lake) -> None:
        lake.append(wafers(1))
        result = write_once(lake.config, WAFERS, wafers(2), key())
        lake.load().manage_snapshots().create_tag(int(result.snapshot_id), "keep").commit()
        between = lake.append(wafers(3))
        lake.append(wafers(4))
        lake.expire(between)
        assert write_once(lake.config, WAFERS, wafers(2), key()).already is True
        assert written(lake) == [1, 2, 3, 4]

    def test_an_expired_snapshot_is_forgotten(self, lake: Lake) -> None:
        """Said in the docstring: the memory is the table's snapshots."""
        result = write_once(lake.config, WAFERS, wafers(2), key())
        lake.append(wafers(3))
        lake.expire(result.snapshot_id)
        assert write_once(lake.config, WAFERS, wafers(2), key()).already is False


def test_the_table_changes_its_layout_in_between(lake: Lake, faults: Faults) -> None:
    lake.append(wafers(1))

    def evolve() -> None:
        with lake.load().update_spec() as update:
            update.add_identity("tool")
        with lake.load().update_schema() as change:
            change.add_column("lot", StringType())
        lake.append(pa.table({"wafer": [7], "tool": ["ETCH-1"], "lot": ["L"]}))

    faults.play(meanwhile(evolve))
    write_once(lake.config, WAFERS, wafers(2), key(), sleep=NoWait())
    assert written(lake) == [1, 2, 7]
    tasks = {task.file.partition for task in lake.load().scan().plan_files() if task.file.spec_id == 1}
    assert {record[0] for record in tasks} == {"ETCH-1", "ETCH-2"}


def test_partitioned_tables_survive_conflicts(lake: Lake, faults: Faults) -> None:
    rows = wafers(1)
    lake.catalog.create_namespace_if_not_exists("fab")
    table = lake.catalog.create_table("fab.plain", schema=rows.schema)
    field = table.schema().find_field("tool")
    spec = PartitionSpec(PartitionField(field.field_id, 1000, IdentityTransform(), "tool"))
    lake.catalog.create_table(WAFERS, schema=table.schema(), partition_spec=spec)
    lake.append(rows)
    faults.play(meanwhile(lambda: lake.append(wafers(7))), refused(CONFLICT))
    write_once(lake.config, WAFERS, wafers(2, 3, 4), key(), sleep=NoWait())
    assert written(lake) == [1, 2, 3, 4, 7]
    etch_1 = lake.load().scan(row_filter="tool = 'ETCH-1'").to_arrow()
    assert sorted(etch_1.column("wafer").to_pylist()) == [1, 4, 7]


def test_the_table_s_own_retry_setting_is_not_changed(lake: Lake) -> None:
    lake.create(wafers(1), **{"commit.retry.num-retries": "7"})
    write_once(lake.config, WAFERS, wafers(1), key())
    assert lake.load().properties["commit.retry.num-retries"] == "7"


@pytest.mark.parametrize(
    ("replace", "left"), [(None, [1, 2, 3]), ("everything", [3]), ({"lot": "A"}, [2, 3]), ({"lot": "none"}, [1, 2, 3])]
)
def test_replaces_what_it_is_told_to_in_the_same_commit(lake: Lake, replace: Any, left: list[int]) -> None:
    lake.append(pa.table({"lot": ["A", "B"], "wafer": [1, 2]}))
    before = lake.head()
    for _ in range(2):
        write_once(lake.config, WAFERS, pa.table({"lot": ["A"], "wafer": [3]}), key(), replace=replace)
    assert written(lake) == left
    assert [row["wafer"] for row in lake.load().scan(snapshot_id=int(before)).to_arrow().to_pylist()] == [1, 2]


def test_replaces_in_a_table_that_is_new_or_empty(lake: Lake) -> None:
    write_once(lake.config, WAFERS, wafers(1), key(), replace="everything")
    assert written(lake) == [1]


def test_replaces_what_came_in_between_as_well(lake: Lake, faults: Faults) -> None:
    lake.append(wafers(1))
    faults.play(meanwhile(lambda: lake.append(wafers(2))))
    write_once(lake.config, WAFERS, wafers(3), key(), replace="everything", sleep=NoWait())
    assert written(lake) == [3]


@pytest.mark.parametrize("replace", [{"lott": "A"}, {"wafer": "no number"}])
def test_replaces_only_by_columns_that_there_are(lake: Lake, replace: dict[str, str]) -> None:
    lake.append(wafers(1))
    with pytest.raises(SpecError, match="does not fit.*Name columns of the table"):
        write_once(lake.config, WAFERS, wafers(3), key(), replace=replace)
    assert written(lake) == [1]


def test_replaced_rows_do_not_come_back_with_a_lost_answer(lake: Lake, faults: Faults) -> None:
    lake.append(wafers(1))
    faults.play(refused(MAYBE[3]), lost_answer(MAYBE[0]))
    result = write_once(lake.config, WAFERS, wafers(2, 3), key(), replace={"tool": "ETCH-1"}, sleep=NoWait())
    assert (result.already, result.snapshot_id) == (False, lake.head())
    assert written(lake) == [2, 3]
