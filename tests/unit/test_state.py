"""Run keys and names: readable, within every limit, different for different runs."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu_burst.state import Handle, Observation, Phase, RunKey

KEYS = st.builds(
    RunKey,
    dag_id=st.text(min_size=1, max_size=250),
    task_id=st.text(min_size=1, max_size=250),
    run_id=st.text(min_size=1, max_size=250),
    map_index=st.integers(-1, 2000),
)
DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


@given(KEYS, st.integers(1, 9999))
def test_object_names_are_dns_labels_within_the_limit(key: RunKey, generation: int) -> None:
    name = key.object_name(generation)
    assert DNS_LABEL.fullmatch(name) and len(name) <= 46


def test_long_ids_fill_a_name_and_no_more() -> None:
    key = RunKey(dag_id="d" * 250, task_id="t" * 250, run_id="r" * 250)
    assert [len(key.object_name(generation)) for generation in (1, 9999)] == [46, 46]
    assert len(key.object_name(1, limit=40)) == 40


@given(KEYS)
def test_prefixes_are_plain_ascii_paths(key: RunKey) -> None:
    assert re.fullmatch(r"runs/[a-z0-9-]+/[a-z0-9-]+/[a-z0-9-]+", key.prefix)
    assert "//" not in key.prefix


@given(KEYS, KEYS)
def test_different_runs_have_different_names(one: RunKey, other: RunKey) -> None:
    same = one == other
    assert (one.digest == other.digest) is same
    assert (one.prefix == other.prefix) is same
    assert (one.object_name(1) == other.object_name(1)) is same


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("a_b", "c", "r"), ("a", "b_c", "r")),
        (("a", "b", "r 1"), ("a", "b", "r_1")),
        (("wäfer", "t", "r"), ("wafer", "t", "r")),
        (("d" * 80 + "x", "t", "r"), ("d" * 80 + "y", "t", "r")),
    ],
)
def test_names_that_look_alike_are_kept_apart(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    keys = [RunKey(dag_id=d, task_id=t, run_id=r) for d, t, r in (one, other)]
    assert keys[0].object_name(1) != keys[1].object_name(1)
    assert keys[0].prefix != keys[1].prefix


def test_generations_have_names_of_their_own() -> None:
    key = RunKey(dag_id="d", task_id="t", run_id="r")
    assert key.object_name(1) != key.object_name(2)


@given(KEYS, st.text(min_size=1, max_size=100), st.text(min_size=1, max_size=100))
def test_deployments_with_equal_ids_have_names_of_their_own(key: RunKey, one: str, other: str) -> None:
    names = {key.object_name(1), key.object_name(1, salt=one), key.object_name(1, salt=other)}
    assert len(names) == 3 - (one == other)
    assert all(DNS_LABEL.fullmatch(name) and len(name) <= 46 for name in names)


@given(KEYS)
def test_a_handle_survives_json(key: RunKey) -> None:
    handle = Handle(
        connection="c", route="local", kind="Process", namespace="", name="n", uid="u",
        run_key=key, generation=3, store_connection="s",
    )  # fmt: skip
    assert Handle.from_json(handle.to_json()) == handle


@pytest.mark.parametrize("phase", list(Phase))
def test_only_four_phases_are_terminal_and_one_is_success(phase: Phase) -> None:
    observation = Observation(phase=phase)
    assert observation.terminal is (phase in {"SUCCEEDED", "FAILED", "LOST", "CANCELLED"})
    assert observation.success is (phase == "SUCCEEDED")
