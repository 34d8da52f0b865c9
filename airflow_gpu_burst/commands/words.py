"""Runs, times and tables in words. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from airflow_gpu_burst.spec import RunSpec
from airflow_gpu_burst.state import Handle, RunKey


def path_of(run_key: RunKey) -> str:
    """As every command takes it: DAG/TASK/RUN_ID, with /MAP_INDEX for a mapped task."""
    mapped = f"/{run_key.map_index}" if run_key.map_index >= 0 else ""
    return f"{run_key.dag_id}/{run_key.task_id}/{run_key.run_id}{mapped}"


def keys_of(path: str) -> list[RunKey]:
    """
    What a path may mean, the likelier first; empty when it has fewer than three parts.

    A run id may hold slashes, ids of DAGs and tasks may not: whatever follows the second slash is the run id. Digits
    at its end may be a map index, or belong to it.
    """
    dag_id, _, rest = path.partition("/")
    task_id, _, run_id = rest.partition("/")
    if not (dag_id and task_id and run_id):
        return []
    whole = RunKey(dag_id=dag_id, task_id=task_id, run_id=run_id)
    head, _, last = run_id.rpartition("/")
    if not head or not (last.isascii() and last.isdecimal()):
        return [whole]
    return [RunKey(dag_id=dag_id, task_id=task_id, run_id=head, map_index=int(last)), whole]


def ago(seconds: float) -> str:
    """`42s`, `3m07s`, `5h12m`, `8d3h`."""
    left = max(0, round(seconds))
    if left < 60:
        return f"{left}s"
    if left < 3600:
        return f"{left // 60}m{left % 60:02}s"
    if left < 86400:
        return f"{left // 3600}h{left % 3600 // 60:02}m"
    return f"{left // 86400}d{left % 86400 // 3600}h"


def clock(seconds: float) -> str:
    """A time as people of all time zones read it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def seconds_of(stamp: str) -> float:
    """Seconds since the epoch of an ISO 8601 time; 0 of what is none."""
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except ValueError:
        return 0.0


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns, as wide as they need to be."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def size_of(spec: RunSpec, ranks: int) -> str:
    """GPUs and nodes of a request."""
    return f"{spec.gpus} GPU{'' if spec.gpus == 1 else 's'} on {ranks} node{'' if ranks == 1 else 's'}"


def options(connection: str, store_connection: str, asked: str) -> str:
    """What to add to a command so that it goes to the same place."""
    found = "" if connection == "gpu_cluster_default" else f" --conn {connection}"
    return found + (f" --store-conn {store_connection}" if asked else "")


def next_steps(handle: Handle, where: str) -> list[str]:
    """
    What to type next.

    :param where: what `options` gave.
    """
    return [
        f"follow it:   gpu-burst logs -f {handle.name}{where}",
        f"look at it:  gpu-burst status {handle.name}{where}",
        f"end it:      gpu-burst cancel {handle.name}{where}",
    ]
