"""The request refuses what cannot be right, and says what would be."""

import json
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
    checkpoint=Checkpointing(keep=3),
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
