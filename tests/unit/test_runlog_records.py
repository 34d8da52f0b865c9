"""Records: canonical, complete, and refused when they are not ours."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu_burst.errors import RunLogError
from airflow_gpu_burst.runlog.records import Close, Commit, Finish, Open, Record, Retire, Start, decode, encode

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
numbers = st.integers(0, 10**15)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(text, json_values, max_size=4)
common = {"seq": st.integers(1, 10**12), "id": text, "generation": numbers, "owner": text, "at": text}

records = st.one_of(
    st.builds(Open, **common, spec_digest=text, max_tries=numbers, try_number=numbers, restore_since=numbers),
    st.builds(
        Start,
        **common,
        members=st.lists(st.tuples(text, text), max_size=4).map(tuple),
        world_size=numbers,
        restore_from=st.none() | numbers,
        damaged=st.lists(numbers, max_size=3).map(tuple),
    ),
    st.builds(Commit, **common, epoch=numbers, step=numbers, manifests=st.dictionaries(text, text), metrics=objects),
    st.builds(Retire, **common, epoch=numbers, seqs=st.lists(numbers, max_size=3).map(tuple)),
    st.builds(Finish, **common, epoch=numbers, result=objects, model=st.none() | st.tuples(text, text)),
    st.builds(Close, **common, verdict=text, reason=text),
)


@given(records)
def test_round_trip(record: Record) -> None:
    data = encode(record)
    assert decode(data, record.seq) == record
    assert encode(decode(data, record.seq)) == data


@given(st.dictionaries(text, json_values, max_size=5))
def test_equal_records_are_equal_bytes(result: dict[str, object]) -> None:
    common = {"id": "i", "generation": 1, "owner": "o", "at": "t", "epoch": 2}
    forward = Finish(**common, result=result)
    backward = Finish(**common, result=dict(reversed(result.items())))
    assert encode(forward) == encode(backward)


def commit(**changes: object) -> bytes:
    record = Commit(id="i", seq=3, generation=1, owner="o", at="t", epoch=2, step=1, manifests={"k": "0"}, metrics={})
    return json.dumps({**json.loads(encode(record)), **changes}).encode()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no record"),
        (b"[]", "no record"),
        (b"{}", "no record"),
        (b"\xff", "no record"),
        (b'{"version": 1, "kind"', "no record"),
        (commit(version=2), "version 2.*Use the release that wrote it"),
        (commit(kind="pause"), "'pause'"),
        (commit(seq=4), "malformed"),
        (commit(extra=1), "malformed"),
        (json.dumps({k: v for k, v in json.loads(commit()).items() if k != "step"}).encode(), "malformed"),
    ],
)
def test_what_is_not_ours_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(RunLogError, match=said):
        decode(data, 3)


def test_a_loss_that_is_not_a_number_does_not_stop_a_commit() -> None:
    metrics = {"loss": math.nan, "deep": [math.inf, {"x": -math.inf}], "fine": 0.5}
    record = Commit(id="i", seq=1, generation=1, owner="o", at="t", epoch=2, step=1, manifests={}, metrics=metrics)
    found = decode(encode(record), 1)
    assert isinstance(found, Commit)
    assert found.metrics == {"loss": "nan", "deep": ["inf", {"x": "-inf"}], "fine": 0.5}


def test_values_that_are_not_json_say_so() -> None:
    record = Finish(id="i", seq=1, generation=1, owner="o", at="t", epoch=2, result={"array": object()})
    with pytest.raises(RunLogError, match="not JSON-safe.*Pass plain numbers"):
        encode(record)
