"""One real Airflow per test session, and its logs when a test fails."""

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from airflow_stack import AirflowStack


@pytest.fixture(scope="session")
def airflow_modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder on the PYTHONPATH of the shared stack, for modules that DAGs and triggers import."""
    return tmp_path_factory.mktemp("modules")


@pytest.fixture(scope="session")
def airflow_stack(tmp_path_factory: pytest.TempPathFactory, airflow_modules: Path) -> Iterator[AirflowStack]:
    """A started stack, shared: write DAG files to its ``dags_folder``, then ``wait_parsed``."""
    with AirflowStack(tmp_path_factory.mktemp("airflow")) as stack:
        stack.start(tmp_path_factory.mktemp("dags"), {"PYTHONPATH": str(airflow_modules)})
        yield stack


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the components' logs to the report of a failed test."""
    report = yield
    if report.failed:
        for value in getattr(item, "funcargs", {}).values():
            if isinstance(value, AirflowStack):
                report.sections.append(("Airflow components", value.component_logs()))
    return report
