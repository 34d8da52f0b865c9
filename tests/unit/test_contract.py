"""The border: what is written fits the published schemas; what is not understood is refused."""

import json
from importlib import resources
from typing import Any

import jsonschema
import pytest

from airflow_gpu_burst import contract
from airflow_gpu_burst.contract import Artifact, PodContext, PodResult
from airflow_gpu_burst.errors import ContractError, ExitCode
from airflow_gpu_burst.runtime.totals import Totals
from airflow_gpu_burst.state import RunKey
from tests.unit.test_spec import FULL, PIN

KEY = RunKey(dag_id="däg", task_id="t", run_id="manual 2026 ☃", map_index=4)
CONTEXT = PodContext.of(FULL, run_key=KEY, generation=2, catalogs={"lake": {"uri": "x"}})


def schema(name: str) -> Any:
    return json.loads(resources.files(contract).joinpath(f"{name}.schema.json").read_text())


def test_a_context_fits_its_schema_and_comes_back() -> None:
    data = CONTEXT.to_bytes()
    jsonschema.validate(json.loads(data), schema("pod_context"))
    assert PodContext.from_bytes(data, contract.sha256_hex(data)) == CONTEXT
    assert PodContext.from_bytes(data, contract.sha256_hex(data)).inputs["wafers"] == PIN


@pytest.mark.parametrize("model", [None, Artifact(key="m", sha256="0" * 64)])
def test_a_result_fits_its_schema_and_comes_back(model: Artifact | None) -> None:
    numbers = Totals(committed=1, bytes=5, saved_bytes=5, seconds=0.5).to_dict({"retries": 1}, 0)
    result = PodResult(seconds=1.5, model=model, step=3, model_uri="s3://b/models/m/v", checkpoints=numbers)
    jsonschema.validate(json.loads(json.dumps(result.to_dict())), schema("pod_result"))
    assert PodResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_a_result_of_before_there_were_numbers_is_read() -> None:
    data = PodResult(seconds=1.5).to_dict()
    del data["checkpoints"], data["model_uri"]
    jsonschema.validate(data, schema("pod_result"))
    assert PodResult.from_dict(data) == PodResult(seconds=1.5)


@pytest.mark.parametrize(("version", "says"), [(2, "this side"), (0, "the other side"), ("x", "the other side")])
def test_another_version_is_refused_and_says_which_side_to_update(version: Any, says: str) -> None:
    data = json.dumps({**json.loads(CONTEXT.to_bytes()), "version": version}).encode()
    with pytest.raises(ContractError, match=f"{says}.*pip install --upgrade") as caught:
        PodContext.from_bytes(data, contract.sha256_hex(data))
    assert caught.value.exit_code == ExitCode.CONTRACT_MISMATCH and not caught.value.retryable
    with pytest.raises(ContractError, match=says):
        PodResult.from_dict({**PodResult(seconds=1).to_dict(), "version": version})


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"\xff"])
def test_what_is_not_a_context_is_refused(data: bytes) -> None:
    with pytest.raises(ContractError, match="submit again"):
        PodContext.from_bytes(data, contract.sha256_hex(data))


def test_other_bytes_than_announced_are_refused() -> None:
    with pytest.raises(ContractError, match="not the one that was submitted"):
        PodContext.from_bytes(CONTEXT.to_bytes(), "0" * 64)
