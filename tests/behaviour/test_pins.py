"""Pins: once decided, a run's data stays decided."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
import requests
from pyiceberg import exceptions as ice

from airflow_gpu_burst.errors import (
    CatalogError,
    CatalogUnavailable,
    ChecksumMismatch,
    SnapshotGone,
    SpecError,
    TableReplaced,
)
from airflow_gpu_burst.lake import pins, read
from airflow_gpu_burst.lake.pins import PinRequest, pin, release, tag_name, verify
from airflow_gpu_burst.spec import TablePin
from tests import lake_fixtures
from tests.lake_fixtures import WAFERS, Faults, Lake, NoWait, key, lost_answer, meanwhile, refused, wafers

lake = lake_fixtures.lake
faults = lake_fixtures.faults

CURRENT = PinRequest(table=WAFERS)
DAY = 86400.0


def pins_of(lake: Lake) -> dict[str, str]:
    return {name: str(ref.snapshot_id) for name, ref in lake.load().refs().items() if name != "main"}


class TestResolve:
    def test_nothing_asked_for_is_the_current_snapshot(self, lake: Lake) -> None:
        lake.append(wafers(1))
        head = lake.append(wafers(2))
        found = pin(lake.config, CURRENT, key())
        assert found.snapshot_id == head
        assert found.catalog == "lake"
        assert found.table_uuid == str(lake.load().metadata.table_uuid)
        assert pins_of(lake) == {found.ref: head}

    def test_by_id_as_text_or_int(self, lake: Lake) -> None:
        first = lake.append(wafers(1))
        lake.append(wafers(2))
        assert pin(lake.config, PinRequest(table=WAFERS, snapshot_id=first), key("a")).snapshot_id == first
        by_int = PinRequest(table=WAFERS, snapshot_id=int(first))  # type: ignore[arg-type]
        assert pin(lake.config, by_int, key("b")).snapshot_id == first

    def test_by_tag_and_by_branch(self, lake: Lake) -> None:
        first = lake.append(wafers(1))
        lake.load().manage_snapshots().create_tag(int(first), "golden").commit()
        head = lake.append(wafers(2))
        assert pin(lake.config, PinRequest(table=WAFERS, ref="golden"), key("a")).snapshot_id == first
        assert pin(lake.config, PinRequest(table=WAFERS, ref="main"), key("b")).snapshot_id == head

    def test_as_of_is_what_was_current_then(self, lake: Lake) -> None:
        first = lake.append(wafers(1))
        then = lake.load().metadata.last_updated_ms
        time.sleep(0.005)  # Iceberg's own clock: it counts in milliseconds
        lake.append(wafers(2))
        at = datetime.fromtimestamp(then / 1000, UTC)
        assert pin(lake.config, PinRequest(table=WAFERS, as_of=at), key("a")).snapshot_id == first
        in_tokyo = at.astimezone(datetime.strptime("+0900", "%z").tzinfo).isoformat()
        request = PinRequest(table=WAFERS, as_of=in_tokyo)  # type: ignore[arg-type]
        assert pin(lake.config, request, key("b")).snapshot_id == first

    def test_as_of_before_the_first_snapshot_says_when_that_was(self, lake: Lake) -> None:
        lake.append(wafers(1))
        first = pin(lake.config, CURRENT, key()).committed_at
        request = PinRequest(table=WAFERS, as_of=datetime(2001, 1, 1, tzinfo=UTC))
        with pytest.raises(SnapshotGone, match=first.replace("+", r"\+") + r".*later as_of$"):
            pin(lake.config, request, key("b"))

    def test_as_of_in_the_future_is_refused(self, lake: Lake) -> None:
        lake.append(wafers(1))
        request = PinRequest(table=WAFERS, as_of=datetime.now(UTC) + timedelta(hours=1))
        with pytest.raises(SpecError, match="in the future"):
            pin(lake.config, request, key())

    def test_unknown_id_names_the_newest(self, lake: Lake) -> None:
        head = lake.append(wafers(1))
        with pytest.raises(SnapshotGone, match=f"no snapshot 4711.*as text.*{head} of 20"):
            pin(lake.config, PinRequest(table=WAFERS, snapshot_id="4711"), key())
        assert pins_of(lake) == {}

    def test_unknown_ref_lists_those_there_are(self, lake: Lake) -> None:
        head = lake.append(wafers(1))
        lake.load().manage_snapshots().create_tag(int(head), "golden").commit()
        with pytest.raises(SpecError, match="no ref 'gold'. Choose one of: golden, main$"):
            pin(lake.config, PinRequest(table=WAFERS, ref="gold"), key())

    def test_table_without_snapshots(self, lake: Lake) -> None:
        lake.create(wafers(1))
        with pytest.raises(SpecError, match="nothing to pin. Write to it first"):
            pin(lake.config, CURRENT, key())

    def test_unknown_table_suggests_a_near_name(self, lake: Lake) -> None:
        lake.append(wafers(1))
        with pytest.raises(CatalogError, match="did you mean 'fab.wafers'"):
            pin(lake.config, PinRequest(table="fab.wafer"), key())
        with pytest.raises(CatalogError, match="did you mean 'fab'"):
            pin(lake.config, PinRequest(table="fabs.wafers"), key())


class TestSameAgain:
    def test_retry_returns_the_same_pin_after_the_table_moved(self, lake: Lake) -> None:
        lake.append(wafers(1))
        first = pin(lake.config, CURRENT, key())
        lake.append(wafers(2))
        assert pin(lake.config, CURRENT, key()) == first
        assert read.table(lake.config, first).to_pylist() == wafers(1).to_pylist()

    def test_retry_by_branch_and_by_time_too(self, lake: Lake) -> None:
        lake.append(wafers(1))
        by_ref = PinRequest(table=WAFERS, ref="main")
        first = pin(lake.config, by_ref, key())
        lake.append(wafers(2))
        assert pin(lake.config, by_ref, key()) == first

    def test_other_runs_mapped_tasks_and_tables_have_pins_of_their_own(self, lake: Lake) -> None:
        lake.append(wafers(1))
        lake.append(wafers(1), "fab.lots")
        found = {
            pin(lake.config, PinRequest(table=table), run_key).ref
            for table in (WAFERS, "fab.lots")
            for run_key in (key("a"), key("b"), key("a", map_index=0), key("a", map_index=1))
        }
        assert len(found) == 8

    def test_explicit_id_that_differs_from_the_pin_shows_both(self, lake: Lake) -> None:
        first = lake.append(wafers(1))
        second = lake.append(wafers(2))
        pin(lake.config, PinRequest(table=WAFERS, snapshot_id=first), key())
        with pytest.raises(SpecError, match=f"(?s){first}.*{second}.*start a new run"):
            pin(lake.config, PinRequest(table=WAFERS, snapshot_id=second), key())
        assert pins_of(lake) == {tag_name(key(), WAFERS): first}

    def test_run_ids_may_hold_anything(self, lake: Lake) -> None:
        lake.append(wafers(1))
        run_ids = ["manual run 1", "manual run  1", "ロット/42", "a\nb", "x" * 5000, "é", "e\u0301"]
        refs = {pin(lake.config, CURRENT, key(run_id)).ref for run_id in run_ids}
        assert len(refs) == len(run_ids)
        assert all(ref.isascii() and len(ref) == 20 for ref in refs)

    def test_two_at_once_agree(self, lake: Lake) -> None:
        lake.append(wafers(1))
        barrier = threading.Barrier(4)
        found: list[TablePin] = []

        def one(number: int) -> None:
            barrier.wait()
            if number % 2:
                lake_append(lake, number)
            found.append(pin(lake.config, CURRENT, key()))

        threads = [threading.Thread(target=one, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4
        assert len(set(found)) == 1
        assert pins_of(lake) == {found[0].ref: found[0].snapshot_id}

    def test_a_crowd_of_mapped_tasks_gets_through(self, lake: Lake) -> None:
        head = lake.append(wafers(1))
        found: list[TablePin] = []

        def one(index: int) -> None:
            found.append(pin(lake.config, CURRENT, key(map_index=index)))

        threads = [threading.Thread(target=one, args=(n,)) for n in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({p.ref for p in found}) == 16
        assert {p.snapshot_id for p in found} == {head}


def lake_append(lake: Lake, number: int) -> None:
    """An append of its own catalog: handles are not shared between threads."""
    from airflow_gpu_burst.lake.catalog import opened

    with opened(lake.config) as catalog:
        catalog.load_table(WAFERS).append(wafers(number))


MAYBE = [
    ice.CommitStateUnknownException("500"),
    ice.ServiceUnavailableError("503"),
    requests.ConnectionError("reset by peer"),
    requests.ReadTimeout("read timed out"),
]


class TestCommit:
    @pytest.mark.parametrize("error", MAYBE, ids=lambda e: type(e).__name__)
    def test_a_lost_answer_is_looked_up(self, lake: Lake, faults: Faults, error: Exception) -> None:
        head = lake.append(wafers(1))
        faults.play(lost_answer(error))
        found = pin(lake.config, CURRENT, key(), sleep=NoWait())
        assert found.snapshot_id == head
        assert faults.commits == 1
        assert pins_of(lake) == {found.ref: head}

    @pytest.mark.parametrize("error", MAYBE, ids=lambda e: type(e).__name__)
    def test_a_commit_that_did_not_happen_is_done_again(self, lake: Lake, faults: Faults, error: Exception) -> None:
        head = lake.append(wafers(1))
        wait = NoWait()
        faults.play(refused(error), refused(ice.CommitFailedException("409")))
        assert pin(lake.config, CURRENT, key(), sleep=wait).snapshot_id == head
        assert len(wait.slept) == 2
        assert 0 < wait.slept[0] < 0.1

    def test_the_one_who_comes_second_takes_the_pin_of_the_first(self, lake: Lake, faults: Faults) -> None:
        lake.append(wafers(1))
        theirs: list[TablePin] = []

        def zombie() -> None:
            lake.append(wafers(2))
            theirs.append(pin(lake.config, CURRENT, key()))

        faults.play(meanwhile(zombie))
        ours = pin(lake.config, CURRENT, key(), sleep=NoWait())
        assert [ours] == theirs
        assert ours.snapshot_id == lake.head()

    def test_another_commit_in_between_does_not_lose_the_tag(self, lake: Lake, faults: Faults) -> None:
        first = lake.append(wafers(1))
        faults.play(meanwhile(lambda: lake.append(wafers(2))))
        found = pin(lake.config, CURRENT, key(), sleep=NoWait())
        assert found.snapshot_id == first
        assert pins_of(lake) == {found.ref: first}

    def test_a_tag_that_vanished_right_after_its_commit_is_set_again(self, lake: Lake, faults: Faults) -> None:
        head = lake.append(wafers(1))
        name = tag_name(key(), WAFERS)

        def step(commit: object) -> None:
            commit()  # type: ignore[operator]
            lake.remove_tag(name)

        faults.play(step)
        assert pin(lake.config, CURRENT, key(), sleep=NoWait()).snapshot_id == head
        assert pins_of(lake) == {name: head}

    def test_a_snapshot_expired_under_our_hands(self, lake: Lake, faults: Faults) -> None:
        first = lake.append(wafers(1))
        lake.append(wafers(2))
        faults.play(meanwhile(lambda: lake.expire(first)))
        with pytest.raises(SnapshotGone, match=f"no snapshot {first}"):
            pin(lake.config, PinRequest(table=WAFERS, snapshot_id=first), key(), sleep=NoWait())
        assert pins_of(lake) == {}

    def test_gives_up_after_a_while_and_may_be_called_again(self, lake: Lake, faults: Faults) -> None:
        head = lake.append(wafers(1))
        wait = NoWait()
        faults.play(*[refused(ice.ServiceUnavailableError("503"))] * 100)
        with pytest.raises(CatalogUnavailable, match="Try again"):
            pin(lake.config, CURRENT, key(), sleep=wait)
        assert 20 < sum(wait.slept) < 120
        faults.play()
        assert pin(lake.config, CURRENT, key()).snapshot_id == head

    def test_a_refusal_is_final(self, lake: Lake, faults: Faults) -> None:
        lake.append(wafers(1))
        wait = NoWait()
        faults.play(refused(ice.ForbiddenError("no TABLE_WRITE_DATA")))
        with pytest.raises(CatalogError, match="not allowed: no TABLE_WRITE_DATA. Check the grants") as caught:
            pin(lake.config, CURRENT, key(), sleep=wait)
        assert not caught.value.retryable
        assert wait.slept == []

    def test_a_branch_in_the_place_of_the_tag_is_not_touched(self, lake: Lake) -> None:
        head = lake.append(wafers(1))
        name = tag_name(key(), WAFERS)
        lake.load().manage_snapshots().create_branch(int(head), name).commit()
        with pytest.raises(SpecError, match="rename or drop the branch"):
            pin(lake.config, CURRENT, key())
        assert lake.load().refs()[name].snapshot_ref_type == "branch"


class TestRetention:
    def test_is_counted_from_now_and_not_from_the_snapshot(self, lake: Lake) -> None:
        lake.append(wafers(1))
        committed_ms = lake.load().metadata.last_updated_ms
        now = committed_ms / 1000 + 10 * DAY
        found = pin(lake.config, PinRequest(table=WAFERS, retention_s=7 * DAY), key(), clock=lambda: now)
        age = lake.load().refs()[found.ref].max_ref_age_ms
        assert age == pytest.approx(17 * DAY * 1000, abs=2)
        assert datetime.fromisoformat(found.expires_at).timestamp() == pytest.approx(now + 7 * DAY, abs=0.01)

    def test_a_writer_whose_clock_is_ahead(self, lake: Lake) -> None:
        lake.append(wafers(1))
        committed_s = lake.load().metadata.last_updated_ms / 1000
        request = PinRequest(table=WAFERS, retention_s=60)
        found = pin(lake.config, request, key(), clock=lambda: committed_s - 3600)
        assert lake.load().refs()[found.ref].max_ref_age_ms == 60_000

    def test_none_has_no_end(self, lake: Lake) -> None:
        lake.append(wafers(1))
        found = pin(lake.config, PinRequest(table=WAFERS, retention_s=None), key())
        assert found.expires_at == ""
        assert lake.load().refs()[found.ref].max_ref_age_ms is None

    def test_a_pin_holds_its_snapshot_against_expiry(self, lake: Lake) -> None:
        first = lake.append(wafers(1))
        found = pin(lake.config, CURRENT, key())
        lake.append(wafers(2))
        lake.load().maintenance.expire_snapshots().older_than(datetime.now(UTC) + timedelta(days=1)).commit()
        assert verify(lake.config, found).snapshot_by_id(int(first)) is not None


class TestVerify:
    def test_a_good_pin(self, lake: Lake) -> None:
        lake.append(wafers(1))
        found = pin(lake.config, CURRENT, key())
        lake.append(wafers(2))
        assert verify(lake.config, found, check_digest=True).name() == ("fab", "wafers")

    def test_expired_between_pin_and_verify(self, lake: Lake) -> None:
        first = lake.append(wafers(1))
        found = pin(lake.config, CURRENT, key())
        lake.append(wafers(2))
        lake.remove_tag(found.ref)
        lake.expire(first)
        with pytest.raises(SnapshotGone, match=f"no snapshot {first} any more.*Start a new run"):
            verify(lake.config, found)
        with pytest.raises(SnapshotGone):
            read.table(lake.config, found)

    def test_dropped_and_created_again(self, lake: Lake) -> None:
        lake.append(wafers(1))
        found = pin(lake.config, CURRENT, key())
        lake.catalog.drop_table(WAFERS)
        lake.append(wafers(1))
        with pytest.raises(TableReplaced, match="Start a new run to pin the new table$"):
            verify(lake.config, found)
        with pytest.raises(TableReplaced):
            read.table(lake.config, found)

    def test_a_lost_tag_is_a_warning(self, lake: Lake, caplog: pytest.LogCaptureFixture) -> None:
        lake.append(wafers(1))
        found = pin(lake.config, CURRENT, key())
        lake.remove_tag(found.ref)
        with caplog.at_level(logging.WARNING):
            verify(lake.config, found)
        assert f"Tag {found.ref} of table {WAFERS} is gone" in caplog.text

    def test_a_moved_tag_does_not_move_the_data(self, lake: Lake, caplog: pytest.LogCaptureFixture) -> None:
        lake.append(wafers(1))
        found = pin(lake.config, CURRENT, key())
        second = lake.append(wafers(2))
        lake.load().manage_snapshots().create_tag(int(second), found.ref).commit()  # moves, silently
        with caplog.at_level(logging.WARNING):
            assert read.table(lake.config, found).to_pylist() == wafers(1).to_pylist()
        assert f"points to {second} now" in caplog.text

    def test_another_digest(self, lake: Lake) -> None:
        lake.append(wafers(1))
        found = TablePin(**{**pin(lake.config, CURRENT, key()).to_dict(), "digest": "0" * 64})
        verify(lake.config, found)
        with pytest.raises(ChecksumMismatch, match="pin anew in a new run$"):
            verify(lake.config, found, check_digest=True)


class TestDigest:
    def test_tells_data_apart_and_not_the_table_s_place(self, lake: Lake) -> None:
        lake.append(wafers(1))
        one = pin(lake.config, CURRENT, key("a")).digest
        assert pin(lake.config, CURRENT, key("b")).digest == one
        lake.append(wafers(2))
        assert pin(lake.config, CURRENT, key("c")).digest != one
        table = lake.load()
        snapshot = table.current_snapshot()
        assert snapshot is not None
        before = pins.files_digest(table, snapshot)
        assert before == pins.files_digest(table, snapshot)

    def test_is_what_it_says(self, lake: Lake) -> None:
        """Anyone can recompute it from the metadata tables, in any engine."""
        lake.append(wafers(1))
        lake.append(wafers(2, 3))
        table = lake.load()
        root = table.location() + "/"
        lines = sorted(
            f"{f['file_path'].removeprefix(root)}\t{f['content']}\t{f['file_size_in_bytes']}\t{f['record_count']}\n"
            for f in table.inspect.files().to_pylist()
        )
        assert lines[0].startswith("data/")
        assert pin(lake.config, CURRENT, key()).digest == hashlib.sha256("".join(lines).encode()).hexdigest()

    def test_deleted_rows_change_it(self, lake: Lake) -> None:
        lake.append(wafers(1, 2, 3))
        before = pin(lake.config, CURRENT, key("a")).digest
        lake.load().delete("wafer = 2")
        assert pin(lake.config, CURRENT, key("b")).digest != before


class TestRelease:
    def test_removes_the_tag_once(self, lake: Lake) -> None:
        lake.append(wafers(1))
        found = pin(lake.config, CURRENT, key())
        assert release(lake.config, found) is True
        assert release(lake.config, found) is False
        assert pins_of(lake) == {}

    def test_leaves_what_is_not_ours(self, lake: Lake) -> None:
        lake.append(wafers(1))
        found = pin(lake.config, CURRENT, key())
        second = lake.append(wafers(2))
        lake.load().manage_snapshots().create_tag(int(second), found.ref).commit()
        assert release(lake.config, found) is False
        assert pins_of(lake) == {found.ref: second}

    def test_table_gone_or_replaced(self, lake: Lake) -> None:
        lake.append(wafers(1))
        found = pin(lake.config, CURRENT, key())
        lake.catalog.drop_table(WAFERS)
        assert release(lake.config, found) is False
        lake.append(wafers(1))
        again = pin(lake.config, CURRENT, key())
        assert release(lake.config, found) is False
        assert pins_of(lake) == {again.ref: again.snapshot_id}

    @pytest.mark.parametrize("error", [*MAYBE, ice.CommitFailedException("409")], ids=lambda e: type(e).__name__)
    def test_lost_answers(self, lake: Lake, faults: Faults, error: Exception) -> None:
        lake.append(wafers(1))
        found = pin(lake.config, CURRENT, key())
        faults.play(refused(error), lost_answer(error))
        assert release(lake.config, found, sleep=NoWait()) is True
        assert pins_of(lake) == {}


class TestWire:
    def test_large_ids_survive_json_as_text(self, lake: Lake) -> None:
        head = lake.append(wafers(1))
        found = pin(lake.config, CURRENT, key())
        wire = json.dumps(found.to_dict())
        as_javascript = json.loads(wire, parse_int=float)
        assert as_javascript["snapshot_id"] == head
        assert TablePin.from_dict(json.loads(wire)) == found

    def test_ids_over_2_to_the_53_are_pinned_exactly(self, lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
        large = iter([4007696190872148070, 4007696190872148071])  # equal as floats
        monkeypatch.setattr("pyiceberg.table.metadata._generate_snapshot_id", lambda: next(large))
        lake.append(wafers(1))
        lake.append(wafers(2))
        request = PinRequest(table=WAFERS, snapshot_id="4007696190872148070")
        found = TablePin.from_dict(json.loads(json.dumps(pin(lake.config, request, key()).to_dict())))
        assert read.table(lake.config, found).to_pylist() == wafers(1).to_pylist()

    def test_without_schema_in_the_snapshot(self, lake: Lake) -> None:
        rows = wafers(1)
        lake.create(rows, **{"format-version": "1"}).append(rows)
        found = pin(lake.config, CURRENT, key())
        assert found.schema_id == lake.load().schema().schema_id
        assert isinstance(read.table(lake.config, found), pa.Table)
