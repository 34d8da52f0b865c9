"""Where this package meets Airflow's versions and exceptions: the one place for both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from typing import Any

from airflow_gpu_burst.errors import GpuBurstError, NotInstalledError
from airflow_gpu_burst.state import RunKey

AIRFLOW_FLOOR = (3, 3)
"""`task_state_store` and a trigger's `on_kill` came with Airflow 3.3; both are relied on."""


def require_airflow() -> None:
    """
    Refuse to go on without a fitting Airflow, before an import fails somewhere deep.

    :raises NotInstalledError: with the command to type.
    """
    try:
        found = metadata.version("apache-airflow-core")
    except metadata.PackageNotFoundError:
        try:
            found = metadata.version("apache-airflow")
        except metadata.PackageNotFoundError as error:
            raise NotInstalledError(
                "Airflow is not installed here. Operators need it: pip install 'airflow-gpu-burst[airflow]'"
            ) from error
    if _release(found) < AIRFLOW_FLOOR:
        raise NotInstalledError(
            f"airflow-gpu-burst needs Airflow 3.3 or later, and this is {found}: "
            "pip install --upgrade 'apache-airflow>=3.3'"
        )


def _release(version: str) -> tuple[int, ...]:
    """`3.3.2rc1` → (3, 3)."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


@contextmanager
def airflow_errors() -> Iterator[None]:
    """
    Translate once, at the operator's edge.

    An error of ours that no retry can mend becomes AirflowFailException, which spends no retries; the rest
    goes on as it is, and Airflow retries it.
    """
    try:
        yield
    except GpuBurstError as error:
        if error.retryable:
            raise
        from airflow.sdk.exceptions import AirflowFailException

        raise AirflowFailException(f"{type(error).__name__}: {error}") from error


def run_key(context: Mapping[str, Any]) -> RunKey:
    """The run key of the task instance that a context belongs to."""
    ti = context["ti"]
    map_index = ti.map_index if ti.map_index is not None else -1
    return RunKey(dag_id=ti.dag_id, task_id=ti.task_id, run_id=ti.run_id, map_index=map_index)
