"""`make demo`: the yield root-cause DAG once, on this machine, with embedded defaults. Ends with findings and report.

SQL catalog on sqlite, a folder as object store, the `local` route; all of it under `.demo/`. Airflow runs the DAG in
this process (`dag.test`); the training step is a process of its own, as always.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".demo"


def environment(home: Path = HOME) -> dict[str, str]:
    """Environment for an Airflow of its own under `home`, with the three connections that the DAG needs."""
    lake, store = home / "lake", home / "store"
    connections = {
        "GPU_CLUSTER_DEFAULT": {
            "conn_type": "gpu_cluster",
            "extra": {"route": "local", "work_dir": str(home / "work")},
        },
        "OBJECT_STORE_DEFAULT": {"conn_type": "object_store", "extra": {"uri": f"file://{store}"}},
        "ICEBERG_LAKE_DEFAULT": {
            "conn_type": "iceberg_lake",
            "extra": {"type": "sql", "uri": f"sqlite:///{lake}/catalog.db", "warehouse": f"file://{lake}"},
        },
    }
    for folder in (lake, store, home / "work"):
        folder.mkdir(parents=True, exist_ok=True)
    return {
        "AIRFLOW_HOME": str(home / "airflow"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "30",
        "AIRFLOW__LOGGING__LOGGING_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore",
        "NO_PROXY": "*",
        **{f"AIRFLOW_CONN_{name}": json.dumps(value) for name, value in connections.items()},
    }


def main() -> int:
    """Set up, run, show."""
    began = time.monotonic()
    os.environ.update(environment())
    say("setting up Airflow under .demo/ ...")
    migrate = subprocess.run(
        [sys.executable, "-m", "airflow", "db", "migrate"], capture_output=True, text=True, check=False
    )
    if migrate.returncode:
        print(migrate.stdout[-3000:], migrate.stderr[-3000:], file=sys.stderr)
        return 1
    say("running the DAG yield_rca: features, pins, training, findings, report ...")
    outcome = run_dag()
    if outcome["state"] != "success":
        print(f"the DAG run ended as {outcome['state']}; its output is above", file=sys.stderr)
        return 1
    summary = summarise(outcome, round(time.monotonic() - began, 1))
    (HOME / "summary.json").write_text(json.dumps(summary, indent=2), encoding="utf-8")
    show(summary)
    return 0


def run_dag() -> dict[str, Any]:
    """One run of the DAG in this process; its state and what its tasks returned."""
    sys.path.insert(0, str(ROOT / "dags"))
    import yield_rca

    run = yield_rca.yield_rca_dag.test(use_executor=False)
    returned = {}
    for instance in run.get_task_instances():
        returned[instance.task_id] = instance.xcom_pull(task_ids=instance.task_id)
    return {"state": str(run.state), **returned}


def summarise(outcome: dict[str, Any], seconds: float) -> dict[str, Any]:
    """What `.demo/summary.json` holds."""
    store = HOME / "store"
    result = json.loads((store / outcome["train"]["result_key"]).read_text(encoding="utf-8"))
    report = HOME / "report.html"
    shutil.copyfile(store / outcome["report"], report)
    variance = result["variance"]
    names = ("rank", "factor", "step", "kind", "verdict", "odds_ratio", "q", "effect_points", "synthetic")
    return {
        "pin": outcome["pin_wafers"],
        "findings": [{name: finding[name] for name in names} for finding in result["findings"]],
        "variance": {part: variance[f"{part}_sd"] for part in ("lot", "wafer", "site")},
        "model": outcome["train"]["model_key"],
        "report": str(report),
        "seconds": seconds,
    }


def show(summary: dict[str, Any]) -> None:
    """The findings as a table, and where the report is."""
    print(f"\n{summary['pin']['table']} at snapshot {summary['pin']['snapshot_id']} (synthetic fab, planted cause)\n")
    print(f"{'':>2}  {'factor':<16} {'step':<8} {'kind':<8} {'verdict':<15} {'odds ratio':>10} {'q':>7} {'points':>7}")
    for finding in [f for f in summary["findings"] if f["kind"] != "sensor"][:8]:
        print(
            f"{finding['rank']:>2}  {finding['factor']:<16} {finding['step']:<8} {finding['kind']:<8} "
            f"{finding['verdict'].replace('_', ' '):<15} {number(finding['odds_ratio'], '.1f'):>10} "
            f"{number(finding['q'], '.4f'):>7} "
            f"{number(finding['effect_points'], '+.1f'):>7}"
        )
    split = summary["variance"]
    print(
        f"\noxide thickness (real data, nlme): standard deviation between lots {split['lot']:.3f}, "
        f"wafers {split['wafer']:.3f}, sites {split['site']:.3f}"
    )
    print(f"\nreport: {summary['report']}\nsummary: {HOME / 'summary.json'}\n{summary['seconds']} s")


def number(value: float | None, form: str) -> str:
    """A number, or a dash."""
    return "-" if value is None else format(value, form)


def say(text: str) -> None:
    """A line of progress."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
