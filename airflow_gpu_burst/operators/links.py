"""Links from a task instance in the UI to what it has in the store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperatorLink
from airflow.sdk.execution_time.xcom import XCom

if TYPE_CHECKING:
    from airflow.sdk.types import TaskInstanceKey


class RunInStoreLink(BaseOperatorLink):
    """
    Where the run's log, checkpoints, output and result lie, if the store has a console (its connection's extra
    `console_url`).

    The operator pushes the address right after the submission, under the key that the UI reads, so that a
    waiting and a failed task have the link as well.
    """

    name = "Run in the store"

    def get_link(self, operator: Any, *, ti_key: TaskInstanceKey) -> str:
        """The address, or empty before the submission."""
        return XCom.get_value(ti_key=ti_key, key=self.xcom_key) or ""
