"""What a try has to do: a table over what the log holds and what Airflow says."""

from __future__ import annotations

import pytest

from airflow_gpu_burst.errors import Fenced, SpecError
from airflow_gpu_burst.runlog import Adopt, Close, Collect, Finish, History, Open, OpenNew, Record, Start, plan


def common(seq: int, generation: int = 1) -> dict[str, object]:
    return {"seq": seq, "id": str(seq), "generation": generation, "owner": "o", "at": ""}


def log(*kinds: str) -> History:
    """A history in which generation 1 was opened by try 2, with max_tries 3, for spec `s`."""
    records: list[Record] = []
    for kind in kinds:
        seq = len(records) + 1
        match kind:
            case "open":
                record: Record = Open(**common(seq), spec_digest="s", max_tries=3, try_number=2, restore_since=1)
            case "start":
                record = Start(**common(seq), members=(("p", "n"),), world_size=1, restore_from=None)
            case "finish":
                record = Finish(**common(seq), epoch=2, result={})
            case verdict:
                record = Close(**common(seq), verdict=verdict, reason="")
        records.append(record)
    return History.of(records)


EMPTY = log()
OPEN = log("open")
FINISHED = log("open", "start", "finish")
SUCCEEDED = log("open", "start", "finish", "succeeded")
FAILED = log("open", "start", "failed")
LOST = log("open", "lost")

FINISH = FINISHED.finishes.get(1)
RETRY = {"max_tries": 3, "try_number": 3, "spec_digest": "s"}
CLEAR = {"max_tries": 6, "try_number": 4, "spec_digest": "s"}
CLEAR_WITH_FEWER_RETRIES = {"max_tries": 2, "try_number": 3, "spec_digest": "s"}
ZOMBIE = {"max_tries": 2, "try_number": 1, "spec_digest": "s"}
CHANGED = {"max_tries": 3, "try_number": 3, "spec_digest": "t"}
CLEAR_CHANGED = {"max_tries": 6, "try_number": 4, "spec_digest": "t"}


def new(close: str | None, verdict: str) -> OpenNew:
    return OpenNew(generation=2, close_verdict=close, previous=1, previous_verdict=verdict)


COLLECT = Collect(generation=1, finish=FINISH) if FINISH else None
ADOPT = Adopt(generation=1)


@pytest.mark.parametrize(
    ("history", "asked", "todo"),
    [
        (EMPTY, RETRY, OpenNew(generation=1)),
        (OPEN, RETRY, ADOPT),
        (OPEN, CLEAR, new("cancelled", "cancelled")),
        (OPEN, CLEAR_WITH_FEWER_RETRIES, new("cancelled", "cancelled")),
        (OPEN, ZOMBIE, Fenced),
        (OPEN, CHANGED, SpecError),
        (OPEN, CLEAR_CHANGED, new("cancelled", "cancelled")),
        (FINISHED, RETRY, COLLECT),
        (FINISHED, CLEAR, new("succeeded", "succeeded")),
        (FINISHED, CHANGED, SpecError),
        (FINISHED, ZOMBIE, Fenced),
        (SUCCEEDED, RETRY, COLLECT),
        (SUCCEEDED, CLEAR, new(None, "succeeded")),
        (SUCCEEDED, CHANGED, SpecError),
        (SUCCEEDED, CLEAR_CHANGED, new(None, "succeeded")),
        (FAILED, RETRY, new(None, "failed")),
        (FAILED, CHANGED, new(None, "failed")),
        (FAILED, CLEAR, new(None, "failed")),
        (FAILED, ZOMBIE, Fenced),
        (LOST, RETRY, new(None, "lost")),
    ],
)
def test_plan(history: History, asked: dict[str, object], todo: object) -> None:
    if isinstance(todo, type):
        with pytest.raises(todo) as caught:
            plan(history, **asked)
        if todo is SpecError:
            assert "spec s" in str(caught.value)
            assert "asks for t" in str(caught.value)
            assert "Clear the task" in str(caught.value)
    else:
        assert plan(history, **asked) == todo
