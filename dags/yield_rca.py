"""
# Yield root-cause analysis

Which tool or chamber do the low-yield lots have in common? Prepare features → pin the snapshot → train on the GPU
cluster → write the findings → report. The training step runs wherever the connection `gpu_cluster_default` leads;
nothing else in this file knows.

The wafers are **synthetic**, with a planted cause; the oxide thickness readings are real (`Oxide` of the R package
nlme).

For a table of your own, copy this folder (`yield_rca.py`, `rca/`, `trainers/`) and in this file

1. rename the DAG, and `MODEL`, under which its models are published;
2. let `WAFERS` name your table; its columns are described in `rca/wafers.py`;
3. delete `prepare_features` with the loop that puts it before the pins, or replace it by what fills your table
   (`write_once(..., replace="everything")` here replaces the table's rows: not for a table that others fill);
4. delete `oxide` from the pins, and the parameters `seed`, `lots` and `cause`.
"""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import Param, dag, get_current_context, task
from airflow.sdk.exceptions import AirflowFailException

from airflow_gpu_burst.operators.gpu_job import GpuJobOperator
from airflow_gpu_burst.operators.pin import PinSnapshotOperator

DAGS = Path(__file__).parent
WAFERS, OXIDE, FINDINGS = "demo_fab.wafers", "demo_fab.oxide", "demo_fab.findings"
MODEL = "yield-rca"


@dag(
    schedule=None,
    catchup=False,
    doc_md=__doc__,
    tags=["gpu", "yield"],
    default_args={"retries": 3, "retry_delay": timedelta(seconds=5)},
    params={
        "seed": Param(7, type="integer", minimum=0, title="Seed", description="Of the synthetic fab."),
        "lots": Param(60, type="integer", minimum=6, maximum=2000, title="Lots", description="In the synthetic fab."),
        "cause": Param(
            "ETCH-03/B", type=["string", "null"], title="Planted cause", description="A chamber; empty: no cause."
        ),
        "rounds": Param(
            60, type="integer", minimum=1, maximum=10000, title="Boosting rounds", description="More fit finer."
        ),
        "checkpoint_every": Param(
            10, type="integer", minimum=1, title="Checkpoint every", description="So many rounds."
        ),
        "gpus": Param(
            1, type="integer", minimum=0, title="GPUs", description="In all. The local route takes what is there."
        ),
        "pause_s": Param(
            0,
            type="number",
            minimum=0,
            title="Pause (s)",
            description="Seconds after each checkpoint: time to kill something.",
        ),
    },
)
def yield_rca() -> None:
    @task
    def prepare_features() -> None:
        """On a real fab a Spark job; here a synthetic fab and a public data set, each written once per run."""
        import pyarrow as pa
        from rca.synthetic import make_fab
        from rca.variance import oxide

        from airflow_gpu_burst.compat import run_key
        from airflow_gpu_burst.hooks.lake import LakeHook
        from airflow_gpu_burst.lake.write import write_once

        context = get_current_context()
        params, lake = context["params"], LakeHook().config()
        try:
            fab = make_fab(params["seed"], lots=params["lots"], cause=params["cause"] or None)
        except ValueError as error:  # the form's fault: no retry mends it
            raise AirflowFailException(str(error)) from error
        for table, frame in ((WAFERS, fab.frame), (OXIDE, oxide())):
            rows = pa.Table.from_pandas(frame, preserve_index=False)
            write_once(lake, table, rows, run_key(context), replace="everything")

    pins = {
        name: PinSnapshotOperator(task_id=f"pin_{name}", table=table)
        for name, table in (("wafers", WAFERS), ("oxide", OXIDE))
    }

    train = GpuJobOperator(
        task_id="train",
        command=["python", "-m", "trainers.yield_rca"],
        working_dir=str(DAGS),
        gpus="{{ params.gpus }}",
        inputs={name: pin.output for name, pin in pins.items()},
        trainer_params={
            "rounds": "{{ params.rounds }}",
            "checkpoint_every": "{{ params.checkpoint_every }}",
            "pause_s": "{{ params.pause_s }}",
        },
        publish=MODEL,
        run_timeout=timedelta(hours=2),
    )

    @task
    def write_findings(trained: Any) -> None:
        """One set per run, however often it is retried or trained anew."""
        from rca import findings

        from airflow_gpu_burst.hooks.lake import LakeHook
        from airflow_gpu_burst.hooks.store import StoreHook
        from airflow_gpu_burst.lake.write import write_once
        from airflow_gpu_burst.state import RunKey

        found = findings.from_json(
            json.dumps(json.loads(StoreHook().get_conn().get(trained["result_key"]))["findings"])
        )
        key = RunKey.from_dict(trained["run_key"])
        write_once(
            LakeHook().config(),
            FINDINGS,
            findings.to_table(found),
            key,
            part=f"generation {trained['generation']}",
            replace={"run_key": str(key)},
        )

    @task
    def report(trained: Any, pin: Any) -> str:
        """One HTML file in the store; returns its key."""
        from datetime import UTC, datetime

        from rca import findings
        from rca.report import ReportInput, render
        from rca.variance import VarianceSplit

        from airflow_gpu_burst.hooks.lake import LakeHook
        from airflow_gpu_burst.hooks.store import StoreHook
        from airflow_gpu_burst.lake.read import table
        from airflow_gpu_burst.spec import TablePin
        from airflow_gpu_burst.state import RunKey

        store = StoreHook().get_conn()
        result = json.loads(store.get(trained["result_key"]))
        pinned, key = TablePin.from_dict(pin), RunKey.from_dict(trained["run_key"])
        html = render(
            ReportInput(
                run_key=str(key),
                table=pinned.table,
                snapshot_id=pinned.snapshot_id,
                created_at=datetime.now(UTC),
                findings=findings.from_json(json.dumps(result["findings"])),
                wafers=table(LakeHook().config(), pinned).to_pandas(),
                oxide=VarianceSplit(**result["variance"]) if result["variance"] else None,
                facts={**result["facts"], "Published as": trained["model_key"]},
            )
        )
        where = f"{key.prefix}/report/g{trained['generation']}.html"
        store.put(where, html.encode())
        return where

    prepared = prepare_features()
    for pin in pins.values():
        prepared >> pin
    write_findings(train.output) >> report(train.output, pins["wafers"].output)


yield_rca_dag = yield_rca()
