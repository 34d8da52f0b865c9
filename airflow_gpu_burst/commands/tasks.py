"""What Airflow's metadata database says of the task that a run belongs to."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from datetime import UTC, datetime

from airflow_gpu_burst.state import RunKey

FINAL = frozenset({"success", "failed", "skipped", "upstream_failed", "removed"})
"""States after which nobody waits. A clear makes another of them, and a retry is no end."""
SETTLING_S = 300.0
"""How long ago a task must have ended: whoever ends its run (a trigger's `on_kill`) is given time to do so."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """
    One task instance, or that there is none.

    :param known: the database could be asked, and knows the DAG run.
    :param exists: there is such a task instance in it.
    :param ended_s: seconds since its state last changed; None: unknown.
    :param trouble: why the database could not be asked.
    """

    known: bool
    exists: bool = False
    state: str = ""
    ended_s: float | None = None
    trouble: str = ""


def nobody_waits(task: Task) -> tuple[bool, str]:
    """Whether the task is over for good, and why (not), for people. Pure."""
    if task.trouble:
        return False, f"cannot ask Airflow's database: {task.trouble}"
    if not task.known:
        return False, "this Airflow has no such DAG run"
    if not task.exists:
        return True, "its DAG run has no such task instance"
    if task.state not in FINAL:
        return False, f"its task is {task.state or 'not started'}"
    if task.ended_s is None:
        return False, f"its task is {task.state}, and the database does not say since when"
    if task.ended_s <= SETTLING_S:
        return False, f"its task is {task.state} for {task.ended_s:.0f} s only"
    return True, f"its task is {task.state}"


def ask(run_key: RunKey, now: float) -> Task:
    """
    The task instance of a run key, in its newest try.

    :param now: seconds since the epoch.
    """
    try:
        # Airflow logs to standard output.
        with contextlib.redirect_stdout(sys.stderr):
            return _ask(run_key, now)
    except Exception as error:
        # Drivers and Airflow's configuration raise what they like, and it all means the same: nothing is known.
        return Task(known=False, trouble=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


def _ask(run_key: RunKey, now: float) -> Task:
    from airflow.models.dagrun import DagRun
    from airflow.models.taskinstance import TaskInstance
    from airflow.utils.session import create_session
    from sqlalchemy import select

    found = select(TaskInstance.state, TaskInstance.end_date, TaskInstance.updated_at).where(
        TaskInstance.dag_id == run_key.dag_id,
        TaskInstance.task_id == run_key.task_id,
        TaskInstance.run_id == run_key.run_id,
        TaskInstance.map_index == run_key.map_index,
    )
    run = select(DagRun.id).where(DagRun.dag_id == run_key.dag_id, DagRun.run_id == run_key.run_id)
    with create_session() as session:
        if session.execute(run).first() is None:
            return Task(known=False)
        row = session.execute(found).first()
    if row is None:
        return Task(known=True)
    state, ended, updated = row
    # A task that a person marks by hand keeps an earlier end date, if it has one.
    latest = max((stamp for stamp in (ended, updated) if stamp is not None), default=None)
    return Task(known=True, exists=True, state=str(state or ""), ended_s=_since(latest, now))


def _since(stamp: datetime | None, now: float) -> float | None:
    if stamp is None:
        return None
    return now - (stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)).timestamp()
