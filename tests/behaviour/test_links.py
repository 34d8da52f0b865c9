"""Links of a task instance: filled from templates, pushed early, and never to where a trainer's text leads."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu_burst.errors import SpecError
from airflow_gpu_burst.operators import links
from airflow_gpu_burst.provider_info import get_provider_info
from airflow_gpu_burst.state import Handle, RunKey

KEY = RunKey(dag_id="dag", task_id="train", run_id="r")
HANDLE = Handle(
    connection="gpu", route="direct", kind="JobSet", namespace="ml", name="gpu-dag-1", uid="u/1", run_key=KEY,
    generation=1, store_connection="store",
)  # fmt: skip
VALUES = {"namespace": "ml", "kind": "Job", "name": "n", "uid": "u/1"}


@pytest.mark.parametrize(
    ("template", "address"),
    [
        ("", ""),
        ("https://headlamp/c/gpu/jobs/{namespace}/{name}", "https://headlamp/c/gpu/jobs/ml/n"),
        ("https://d/{kind}/{uid}?again={uid}", "https://d/Job/u%2F1?again=u%2F1"),
        ('https://g/explore?panes={"a":{"q":"{pod=~%22{name}.*%22}"}}', 'https://g/explore?panes={"a":{"q":"{pod=~%22n.*%22}"}}'),
        ("http://plain/{{name}}", "http://plain/{n}"),
        ("https://fixed/", "https://fixed/"),
    ],
)  # fmt: skip
def test_templates_are_filled(template: str, address: str) -> None:
    assert links.fill(template, VALUES) == address


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("https://d/{nmae}", r"\{nmae\}.*use \{namespace\}, \{kind\}, \{name\}, \{uid\}"),
        ("https://d/{run_id}/{name}", r"\{run_id\}"),
        ("javascript:alert('{name}')", "begin with https://"),
        ("headlamp/{name}", "begin with https://"),
        ("https://d/a b/{name}", "blank as %20"),
    ],
)
def test_a_template_that_cannot_be_filled_says_what_to_write(template: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        links.fill(template, VALUES)
    with pytest.raises(SpecError, match=f"extra dashboard_url: .*{says}"):
        links.check_templates(logs_url="https://ok/{name}", dashboard_url=template)


def test_an_unknown_value_gives_no_link_rather_than_a_wrong_one() -> None:
    assert links.fill("https://d/{name}/{uid}", {**VALUES, "uid": ""}) == ""
    assert links.fill("https://d/{name}", {**VALUES, "uid": ""}) == "https://d/n"


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_no_value_breaks_out_of_its_place(value: str) -> None:
    address = links.fill("https://d/{name}/end?x=1", {**VALUES, "name": value})
    _, _, _, inside, *rest = address.split("/")
    assert rest == ["end?x=1"] and unquote(inside) == value and "?" not in inside and "#" not in inside


def shown(pushed: dict[str, str]) -> dict[str, str]:
    """What the UI makes a link of."""
    return {key: address for key, address in pushed.items() if address}


def test_what_is_pushed_after_the_submission() -> None:
    found = links.of_submission(
        HANDLE,
        run_url=links.store_address("https://console/b/", f"{KEY.prefix}/"),
        dashboard_url="https://d/{kind}/{namespace}/{name}",
        logs_url="https://l/{uid}",
    )
    assert found == {
        "_link_RunInStoreLink": f"https://console/b/{KEY.prefix}/",
        "_link_JobLink": "https://d/JobSet/ml/gpu-dag-1",
        "_link_LogsLink": "https://l/u%2F1",
        "_link_ReportLink": "",
    }
    assert links.of_submission(HANDLE) == dict.fromkeys(found, "")


def test_a_wrong_template_costs_its_link_and_not_the_run(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links.log, "disabled", False)  # Airflow's logging set-up disables the loggers that it meets
    with caplog.at_level(logging.WARNING):
        found = links.of_submission(HANDLE, dashboard_url="https://d/{oops}", logs_url="https://l/{name}")
    assert shown(found) == {"_link_LogsLink": "https://l/gpu-dag-1"}
    assert "Job in the cluster" in caplog.text and "{oops}" in caplog.text


@pytest.mark.parametrize(
    ("outcome", "address"),
    [
        ({"result": {"report_url": "https://reports/1?a=b#c"}, "result_key": "k"}, "https://reports/1?a=b#c"),
        ({"result": {"report_url": "javascript:alert(1)"}, "result_key": "runs/ü/k.json"}, "https://c/runs/%C3%BC/k.json"),
        ({"result": {"report_url": "https://a\nb"}, "result_key": "k"}, "https://c/k"),
        ({"result": {"report_url": 7}, "result_key": "k"}, "https://c/k"),
        ({"result": ["report_url"], "result_key": "k"}, "https://c/k"),
        ({"result": None, "result_key": ""}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_the_report_is_where_the_trainer_says_else_its_result(outcome: dict[str, Any], address: str | None) -> None:
    assert links.of_result(outcome, "https://c/") == ({} if address is None else {"_link_ReportLink": address})


def test_without_a_console_only_a_report_of_the_trainers_own_is_linked() -> None:
    assert links.of_result({"result": {}, "result_key": "k"}) == {}
    assert links.of_result({"result": {"report_url": "http://r/"}}) == {"_link_ReportLink": "http://r/"}


ALL = (links.RunInStoreLink(), links.JobLink(), links.LogsLink(), links.ReportLink())


@pytest.mark.parametrize("link", ALL, ids=lambda link: type(link).__name__)
def test_the_ui_gets_what_was_pushed_and_nothing_before(link: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: dict[str, str] = {}
    # Airflow's own channel to its API server, which a test has not.
    monkeypatch.setattr(links.XCom, "get_value", lambda *, ti_key, key: pushed.get(key))
    ti_key: Any = SimpleNamespace()
    assert link.get_link(None, ti_key=ti_key) == ""
    pushed[f"_link_{type(link).__name__}"] = "https://x"
    assert link.get_link(None, ti_key=ti_key) == "https://x"


def test_airflow_knows_every_link_by_a_name_of_its_own() -> None:
    assert len({link.name for link in ALL}) == len(ALL)
    listed = get_provider_info()["extra-links"]
    assert sorted(listed) == sorted(f"{type(link).__module__}.{type(link).__name__}" for link in ALL)


def test_a_handle_without_a_uid_still_links_by_name() -> None:
    found = links.of_submission(replace(HANDLE, uid=""), dashboard_url="https://d/{name}", logs_url="https://l/{uid}")
    assert shown(found) == {"_link_JobLink": "https://d/gpu-dag-1"}
