"""The request refuses what cannot be right, and says what would be."""

import json
from dataclasses import asdict
from typing import Any

import pytest

from airflow_gpu_burst import platforms
from airflow_gpu_burst.errors import SpecError
from airflow_gpu_burst.spec import Checkpointing, RunSpec, TablePin, Timeouts

PIN = TablePin(
    catalog="lake",
    table="fab.wafers",
    table_uuid="u",
    snapshot_id="4007696190872148070",
    ref="pin-1",
    schema_id=0,
    committed_at="2026-01-01T00:00:00+00:00",
)
FULL = RunSpec(
    command=("python", "t.py"),
    image="img",
    gpus=8,
    platform="b300",
    queue="q",
    priority="low",
    inputs={"wafers": PIN},
    params={"depth": 6},
    env={"A": "b"},
    working_dir="/w",
    checkpoint=Checkpointing(keep=3, keep_every=1000, best="loss", bandwidth="2GB/s", rdma="prefer"),
    publish="model",
    timeouts=Timeouts(run_s=5.0),
)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"command": "python t.py"}, "list of arguments"),
        ({"command": ()}, "list of arguments"),
        ({"command": ("python", 6)}, "must be text"),
        ({"gpus": -1}, "0 or more"),
        ({"inputs": {"my wafers": PIN}}, "letters, digits and underscores"),
        ({"env": {"A": 1}}, "environment values are text"),
        ({"env": {"GPU_BURST_RANK": "1"}}, "choose another"),
        ({"params": {"a": float("nan")}}, "JSON-safe"),
        ({"params": {"a": object()}}, "JSON-safe"),
    ],
)
def test_a_wrong_request_is_refused_when_built(change: dict[str, Any], says: str) -> None:
    values: dict[str, Any] = {"command": ("true",), **change}
    with pytest.raises(SpecError, match=says):
        RunSpec(**values)


def test_timeouts_and_checkpoints_have_limits() -> None:
    with pytest.raises(SpecError, match="positive seconds"):
        Timeouts(queue_s=0)
    with pytest.raises(SpecError, match="at least 2"):
        Checkpointing(keep=1)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"keep": True}, "keep=True"),
        ({"keep": 2.0}, "keep=2.0"),
        ({"keep_every": 0}, "every so many steps"),
        ({"keep_best": 0}, "so many of the best"),
        ({"best": None}, "name a metric"),
        ({"best_mode": "low"}, "use one of min, max"),
        ({"rdma": True}, "use one of off, prefer, require"),
        ({"bandwidth": "fast"}, "'2GB/s' or '10Gbit/s'"),
        ({"bandwidth": "2GB"}, "'2GB/s'"),
        ({"bandwidth": "2 gb/s"}, "'2GB/s'"),
        ({"bandwidth": 0}, "None for no limit"),
        ({"bandwidth": -1}, "None for no limit"),
        ({"bandwidth": 2}, "at least 0.1 MB/s"),
        ({"bandwidth": float("nan")}, "None for no limit"),
        ({"bandwidth": float("inf")}, "None for no limit"),
        ({"bandwidth": True}, "None for no limit"),
    ],
)
def test_a_wrong_policy_for_checkpoints_is_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        Checkpointing(**values)


@pytest.mark.parametrize(
    ("given", "rate"),
    [
        (None, None),
        (500_000, 500_000.0),
        ("2GB/s", 2e9),
        (" 1.5 MB/s ", 1.5e6),
        ("500MiB/s", 500 * 1024**2),
        ("10Gbit/s", 1.25e9),
        ("800kB/s", 800_000.0),
        ("900000B/s", 900_000.0),
    ],
)
def test_a_bandwidth_is_kept_in_bytes_per_second(given: Any, rate: float | None) -> None:
    policy = Checkpointing(bandwidth=given)
    assert policy.bandwidth == rate
    assert Checkpointing(**json.loads(json.dumps(asdict(policy)))) == policy


def test_how_checkpoints_are_saved_and_which_further_ones_stay_is_no_other_request() -> None:
    def digest(**values: Any) -> str:
        return RunSpec(command=("true",), checkpoint=Checkpointing(**values)).digest

    assert digest(bandwidth="1GB/s", rdma="prefer", keep_every=5, best="loss") == digest()
    assert digest(keep=3) != digest()


@pytest.mark.parametrize("spec", [FULL, RunSpec(command=("true",), checkpoint=None)])
def test_a_request_survives_json(spec: RunSpec) -> None:
    again = RunSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec
    assert again.digest == spec.digest


def test_the_digest_tells_requests_apart_but_for_timeouts() -> None:
    values = {name: getattr(FULL, name) for name in FULL.__dataclass_fields__}
    assert RunSpec(**{**values, "timeouts": Timeouts()}).digest == FULL.digest
    for name, other in {"gpus": 16, "image": "x", "params": {}, "inputs": {}, "command": ("x",)}.items():
        assert RunSpec(**{**values, name: other}).digest != FULL.digest, name


def test_differences_name_the_field_and_both_values() -> None:
    other = json.loads(json.dumps(FULL.to_dict()))
    other["gpus"] = 16
    assert FULL.differences(other) == ["gpus: 16 -> 8"]


@pytest.mark.parametrize("snapshot_id", [4007696190872148070, "", "abc", "1.5"])
def test_a_snapshot_id_is_text_of_digits(snapshot_id: Any) -> None:
    with pytest.raises(SpecError, match="text of digits"):
        TablePin.from_dict({**PIN.to_dict(), "snapshot_id": snapshot_id})


def test_what_is_not_a_pin_is_refused_with_the_way_to_get_one() -> None:
    with pytest.raises(SpecError, match=r"missing \['ref'.*unknown \['refs'\].*PinSnapshotOperator"):
        data = {**PIN.to_dict(), "refs": "x"}
        del data["ref"]
        TablePin.from_dict(data)


@pytest.mark.parametrize(("gpus", "nodes"), [(0, 1), (1, 1), (7, 1), (8, 1), (16, 2), (80, 10)])
def test_whole_nodes(gpus: int, nodes: int) -> None:
    assert platforms.load("b300").check_gpus(gpus) == nodes


@pytest.mark.parametrize(
    ("gpus", "says"), [(12, r"gpus=8 \(1 node\) or gpus=16 \(2 nodes\)"), (17, r"gpus=16 \(2 nodes\) or gpus=24")]
)
def test_part_of_a_node_beyond_the_first_is_refused(gpus: int, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        platforms.load("b300").check_gpus(gpus)


def test_an_unknown_platform_lists_the_known_ones(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="there are b300, generic, local"):
        platforms.load("b200")
    (tmp_path / "b200.yaml").write_text("gpus_per_node: 4\n")
    monkeypatch.setenv("GPU_BURST_PLATFORMS", str(tmp_path))
    assert platforms.load("b200").gpus_per_node == 4
    (tmp_path / "b200.yaml").write_text("gpus: 4\n")
    with pytest.raises(SpecError, match="does not read as a platform"):
        platforms.load("b200")


def test_what_a_dag_says_of_checkpoints() -> None:
    assert Checkpointing.of(0) is None
    assert Checkpointing.of(3) == Checkpointing(keep=3)
    assert Checkpointing.of({"keep": 2, "best": "loss", "bandwidth": "2GB/s"}) == Checkpointing(
        best="loss", bandwidth=2e9
    )
    own = Checkpointing(keep_every=100)
    assert Checkpointing.of(own) is own


@pytest.mark.parametrize("given", [True, 1, {"kept": 3}, "3", None, {"bandwidth": "fast"}])
def test_what_a_dag_may_not_say_of_checkpoints(given: Any) -> None:
    with pytest.raises(SpecError, match="checkpoint"):
        Checkpointing.of(given)
