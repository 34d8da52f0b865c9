"""
One submission in a fresh process, as of a task that has just begun on a worker: Airflow's task SDK is there, the DAG's
imports are yet to come.

`python bench/submitter.py ours|peer|bare ARGUMENT` prints as JSON the job's name, when it began (before the import of
the operator, or of the bare client) and when `execute` did (wall clock, seconds). ARGUMENT is a run id; for `bare` a
file with kubeconfig's path, namespace and manifest.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

IMAGE, COMMAND = "lab.local/gpu-burst:1", ["true"]


def context(run_id: str) -> dict[str, Any]:
    """What the operators read of a task's context."""
    ti = SimpleNamespace(
        dag_id="bench", task_id="submit", run_id=run_id, map_index=-1, try_number=1, max_tries=1, pushed={},
        xcom_push=lambda key, value: None,
    )  # fmt: skip
    dag = SimpleNamespace(dag_id="bench", parent_dag=None)
    return {"ti": ti, "run_id": run_id, "dag": dag, "dag_run": SimpleNamespace(run_id=run_id)}


def ours(run_id: str) -> Callable[[], str]:
    """GpuJobOperator.execute, to its deferral."""
    from airflow.sdk.exceptions import TaskDeferred

    from airflow_gpu_burst.operators.gpu_job import GpuJobOperator

    operator = GpuJobOperator(task_id="submit", command=COMMAND, image=IMAGE, checkpoints=0, gpu_conn_id="gpu")

    def submit() -> str:
        try:
            operator.execute(context(run_id))  # type: ignore[arg-type]
        except TaskDeferred as deferred:
            return str(json.loads(deferred.trigger.handle)["name"])
        raise SystemExit("not deferred")

    return submit


def peer(run_id: str) -> Callable[[], str]:
    """KubernetesJobOperator.execute, to its deferral (or to its failure when the pod is not there yet)."""
    from airflow.providers.cncf.kubernetes.operators.job import KubernetesJobOperator
    from airflow.sdk.exceptions import AirflowException, TaskDeferred

    operator = KubernetesJobOperator(
        task_id="submit",
        name=run_id,
        random_name_suffix=False,
        image=IMAGE,
        cmds=COMMAND,
        image_pull_policy="IfNotPresent",
        kubernetes_conn_id="kubernetes",
        deferrable=True,
        wait_until_job_complete=True,
        parallelism=1,
        get_logs=False,
    )

    def submit() -> str:
        try:
            operator.execute(context(run_id))  # type: ignore[arg-type]
        except (TaskDeferred, AirflowException) as end:
            print("ended by", type(end).__name__, end, flush=True)
        return str(operator.job.metadata.name)  # type: ignore[union-attr]

    return submit


def bare(file: str) -> Callable[[], str]:
    """A client that posts a manifest."""
    from kubernetes import client, config

    plan = json.loads(Path(file).read_text())

    def submit() -> str:
        api = client.BatchV1Api(config.new_client_from_config(plan["kubeconfig"]))
        api.create_namespaced_job(plan["namespace"], plan["manifest"])
        return str(plan["manifest"]["metadata"]["name"])

    return submit


def main() -> int:
    """See the module."""
    import_module("airflow.sdk")  # a worker's task process has it before the task begins
    began = time.time()
    submit = {"ours": ours, "peer": peer, "bare": bare}[sys.argv[1]](sys.argv[2])
    executed = time.time()
    name = submit()
    print("RESULT", json.dumps({"name": name, "began": began, "executed": executed}))
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    sys.exit(main())
