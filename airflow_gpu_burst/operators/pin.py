"""PinSnapshotOperator: what a run reads is decided once."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from airflow.sdk import BaseOperator

from airflow_gpu_burst.compat import airflow_errors, run_key
from airflow_gpu_burst.errors import SpecError
from airflow_gpu_burst.hooks.lake import LakeHook
from airflow_gpu_burst.lake import pins
from airflow_gpu_burst.operators import lineage
from airflow_gpu_burst.spec import TablePin


class PinSnapshotOperator(BaseOperator):
    """
    Pin one snapshot of an Iceberg table and return the pin.

    All later steps read exactly this snapshot, and so does every retry: the pin is a tag in the table, named
    by the run. Pass the output on: `GpuJobOperator(inputs={"wafers": pin.output}, ...)`.

    :param table: `namespace.name`.
    :param lake_conn_id: connection of type `iceberg_lake`.
    :param snapshot_id: this snapshot, as text.
    :param ref: what this tag or branch is now.
    :param as_of: what was current then: a datetime or ISO 8601 text with a time zone, e.g.
        `"{{ data_interval_end }}"`.
    :param retention: how long the snapshot is to be held, from now; None: no end.
    """

    template_fields: Sequence[str] = ("table", "lake_conn_id", "snapshot_id", "ref", "as_of")
    ui_color = "#d7ecf7"

    def __init__(
        self,
        *,
        table: str,
        lake_conn_id: str = LakeHook.default_conn_name,
        snapshot_id: str | int | None = None,
        ref: str | None = None,
        as_of: datetime | str | None = None,
        retention: timedelta | None = timedelta(seconds=pins.DEFAULT_RETENTION_S),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.table = table
        self.lake_conn_id = lake_conn_id
        self.snapshot_id = snapshot_id
        self.ref = ref
        self.as_of = as_of
        self.retention = retention
        self._pin: TablePin | None = None
        literal = [n for n in ("snapshot_id", "ref", "as_of") if _is_literal(getattr(self, n))]
        if len(literal) > 1:
            raise SpecError(
                f"task {self.task_id!r}: {' and '.join(literal)} are both given. Give one, or none for the "
                "current snapshot"
            )

    def execute(self, context: Any) -> dict[str, Any]:
        """Pin, or find what an earlier try has pinned."""
        with airflow_errors():
            request = pins.PinRequest(
                table=self.table,
                snapshot_id=_given(self.snapshot_id),
                ref=_given(self.ref),
                as_of=_given(self.as_of),
                retention_s=None if self.retention is None else self.retention.total_seconds(),
            )
            self._pin = pin = pins.pin(LakeHook(self.lake_conn_id).config(), request, run_key(context))
        self.log.info(
            "Pinned %s at snapshot %s of %s (tag %s, held until %s)",
            pin.table,
            pin.snapshot_id,
            pin.committed_at,
            pin.ref,
            pin.expires_at or "released",
        )
        return pin.to_dict()

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> Any:
        """For the OpenLineage provider: the table, with its snapshot as version."""
        return lineage.facets([self._pin])


def _given(value: Any) -> Any:
    """None for what a rendered template or an empty form field leaves: "", blanks, "None", "null"."""
    if isinstance(value, str) and value.strip() in ("", "None", "null"):
        return None
    return value


def _is_literal(value: Any) -> bool:
    """True for a value that is there when the DAG is parsed and says something."""
    if isinstance(value, str):
        return _given(value) is not None and "{{" not in value and "{%" not in value
    return isinstance(value, int | datetime)
