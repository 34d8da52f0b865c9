"""
Links from a task instance in the UI: to the job in its cluster's dashboard, to its logs, to what it has in the store.

Addresses come from the templates of the cluster's connection (`dashboard_url`, `logs_url`) and the console of the
store's (`console_url`). The operator pushes each as soon as it is known, under the key that the UI reads, so that a
waiting and a failed task have theirs as well.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow.sdk import BaseOperatorLink
from airflow.sdk.execution_time.xcom import XCom

from airflow_gpu_burst.errors import SpecError
from airflow_gpu_burst.state import Handle

if TYPE_CHECKING:
    from airflow.sdk.types import TaskInstanceKey

log = logging.getLogger(__name__)

PLACEHOLDERS = ("namespace", "kind", "name", "uid")
"""What a template may name, of the submitted object."""

# Only a word in braces: Grafana's addresses have braces of their own around their JSON.
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_ADDRESS = re.compile(r"https?://[^\s\x00-\x1f\x7f]{1,4000}", re.IGNORECASE)


class _PushedLink(BaseOperatorLink):
    """A link whose address the operator has pushed; empty, and so not shown, before that."""

    def get_link(self, operator: Any, *, ti_key: TaskInstanceKey) -> str:
        """The address, or empty."""
        return XCom.get_value(ti_key=ti_key, key=self.xcom_key) or ""


class RunInStoreLink(_PushedLink):
    """Where the run's log, checkpoints, output and result lie, if the store has a console."""

    name = "Run in the store"


class JobLink(_PushedLink):
    """The submitted object in the cluster's dashboard, by the connection's `dashboard_url`."""

    name = "Job in the cluster"


class LogsLink(_PushedLink):
    """The pods' logs where the platform team collects them, by the connection's `logs_url`."""

    name = "Logs of the pods"


class ReportLink(_PushedLink):
    """The run's report: the `report_url` of the trainer's result, else the result in the store's console."""

    name = "Report"


def fill(template: str, values: Mapping[str, str]) -> str:
    """
    An address from its template, e.g. `https://headlamp/c/gpu/jobs/{namespace}/{name}`.

    Every value is quoted, `/` included. Braces around anything but one word stay as they are. Empty when the
    template is, or when a value that it names is: no link is better than one that leads nowhere.

    :raises SpecError: a placeholder that does not exist, or no http address.
    """
    if not template:
        return ""
    unknown = sorted(set(_PLACEHOLDER.findall(template)) - set(values))
    if unknown:
        known = ", ".join(f"{{{name}}}" for name in values)
        raise SpecError(f"address {template!r}: there is no {{{unknown[0]}}}; use {known}")
    if not all(values[name] for name in _PLACEHOLDER.findall(template)):
        return ""
    filled = _PLACEHOLDER.sub(lambda match: quote(values[match[1]], safe=""), template)
    if not is_address(filled):
        raise SpecError(f"address {template!r}: begin with https://, and write a blank as %20")
    return filled


def is_address(value: Any) -> bool:
    """Whether this may be offered as a link: http or https, one word. A trainer's result is not to be trusted."""
    return isinstance(value, str) and _ADDRESS.fullmatch(value) is not None


def check_templates(**templates: str) -> None:
    """
    For the form's test button and when a connection is read: whether these templates can be filled.

    :param templates: name of the extra → template.
    :raises SpecError: names the extra, and the placeholder that does not exist.
    """
    for name, template in templates.items():
        try:
            fill(template, dict.fromkeys(PLACEHOLDERS, "x"))
        except SpecError as error:
            raise SpecError(f"extra {name}: {error}") from error


def of_submission(handle: Handle, *, run_url: str = "", dashboard_url: str = "", logs_url: str = "") -> dict[str, str]:
    """
    What to push right after the submission: XCom key → address, of every link.

    The empty ones are pushed as well: Airflow asks for each at the end of a task, and a key that is not there is an
    error line in the worker's log (3.3.2). A template that cannot be filled costs its link and a warning, not the run.

    :param run_url: where people see the run's folder in the store (see `store_address`).
    """
    values = {name: getattr(handle, name) for name in PLACEHOLDERS}
    found = {RunInStoreLink().xcom_key: run_url, ReportLink().xcom_key: ""}
    for link, template in ((JobLink(), dashboard_url), (LogsLink(), logs_url)):
        found[link.xcom_key] = ""
        try:
            found[link.xcom_key] = fill(template, values)
        except SpecError as error:
            log.warning("no link %r: %s", link.name, error)
    return found


def of_result(outcome: Mapping[str, Any], console_url: str = "") -> dict[str, str]:
    """
    What to push after the end, if anything: XCom key → address.

    :param outcome: what the operator returns: `result`, `result_key`, …
    """
    result = outcome.get("result")
    report = result.get("report_url") if isinstance(result, Mapping) else None
    address = report if is_address(report) else store_address(console_url, str(outcome.get("result_key") or ""))
    return {ReportLink().xcom_key: str(address)} if address else {}


def store_address(console_url: str, key: str) -> str:
    """
    Where people see a key (or, with a `/` at its end, a folder) of the store; empty without console or key.

    :param console_url: of the store's connection, up to its keys.
    """
    return f"{console_url.rstrip('/')}/{quote(key)}" if console_url and key else ""
