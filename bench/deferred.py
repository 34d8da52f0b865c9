"""
Many deferred jobs in one process, as a triggerer runs them: an event loop with a trigger each, ours or the peer's.

`python bench/deferred.py ours|peer FILE` reads jobs and settings from a JSON file, and prints as JSON what it used:
requests to the cluster's API, CPU seconds, memory, how late the loop was. Connections come from the environment, where
a triggerer would ask its supervisor for them. With `seconds` 0 it goes on until all have fired, and prints each event
with its time.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.meters import cpu_s, rss_mib

START_S = 10.0
"""Triggers begin one after the other over so long: a triggerer does not get 1,000 at once either."""
TICK_S = 0.05
requests: dict[str, int] = {}


def count_requests() -> None:
    """Of every HTTP client in this process, by host and port."""
    import aiohttp
    import urllib3
    from yarl import URL

    def counted(host: str) -> None:
        requests[host] = requests.get(host, 0) + 1

    ask, aask = urllib3.HTTPConnectionPool.urlopen, aiohttp.ClientSession._request

    def urlopen(self: Any, *args: Any, **kwargs: Any) -> Any:
        counted(f"{self.host}:{self.port}")
        return ask(self, *args, **kwargs)

    async def request(self: Any, method: str, url: Any, **kwargs: Any) -> Any:
        found = URL(url)
        counted(f"{found.host}:{found.port}")
        return await aask(self, method, url, **kwargs)

    urllib3.HTTPConnectionPool.urlopen = urlopen  # type: ignore[method-assign]
    aiohttp.ClientSession._request = request  # type: ignore[method-assign,assignment]


def ours(job: dict[str, Any], poll_s: float) -> Any:
    """GpuJobTrigger, as the operator makes it."""
    from airflow_gpu_burst.triggers.gpu_job import GpuJobTrigger

    return GpuJobTrigger(**job)


def peer(job: dict[str, Any], poll_s: float) -> Any:
    """KubernetesJobTrigger, as KubernetesJobOperator makes it; logs are no matter of the trigger there."""
    from airflow.providers.cncf.kubernetes.triggers.job import KubernetesJobTrigger

    handle = json.loads(job["handle"])
    return KubernetesJobTrigger(
        job_name=handle["name"],
        job_namespace=handle["namespace"],
        pod_names=["unknown"],
        pod_namespace=handle["namespace"],
        base_container_name="trainer",
        kubernetes_conn_id="kubernetes",
        poll_interval=poll_s,
    )


async def fire(trigger: Any, name: str, after_s: float) -> None:
    """Until its event."""
    await asyncio.sleep(after_s)
    async for event in trigger.run():
        at, payload = time.time(), event.payload
        how = payload.get("observation", {}).get("phase") or payload.get("status") or payload.get("message")
        print("EVENT", json.dumps({"name": name, "at": at, "how": how}), flush=True)


async def lateness(found: list[float]) -> None:
    """How much later than asked for the loop comes round, again and again."""
    while True:
        began = time.perf_counter()
        await asyncio.sleep(TICK_S)
        found.append(time.perf_counter() - began - TICK_S)


async def defer(make: Callable[[dict[str, Any], float], Any], plan: dict[str, Any]) -> dict[str, Any]:
    """Run the triggers of a plan, and measure."""
    jobs, late, early = plan["jobs"], [], []  # type: ignore[var-annotated]
    spread = START_S if plan["seconds"] else 0.0
    gc.collect()
    empty = rss_mib()
    tasks = [
        asyncio.create_task(
            fire(make(job, plan["poll_s"]), json.loads(job["handle"])["name"], number * spread / len(jobs))
        )
        for number, job in enumerate(jobs)
    ]
    if not plan["seconds"]:
        await asyncio.gather(*tasks)
        return {}
    watch = asyncio.create_task(lateness(early))
    await asyncio.sleep(START_S + plan["settle_s"])
    watch.cancel()
    at_start = {**requests}
    start_cpu, cpu = cpu_s(), cpu_s()
    watch = asyncio.create_task(lateness(late))
    began = time.monotonic()
    await asyncio.sleep(plan["seconds"])
    lasted, used = time.monotonic() - began, cpu_s() - cpu
    watch.cancel()
    gc.collect()
    host = plan["host"]
    result = {
        "requests_per_s": (requests.get(host, 0) - at_start.get(host, 0)) / lasted,
        "start_requests": at_start.get(host, 0),
        "cpu_s_per_minute": used / lasted * 60,
        "start_cpu_s": start_cpu,
        "mib_per_job": (rss_mib() - empty) / len(jobs),  # the clients included
        "late_p99_s": percentile(late, 0.99),
        "late_max_s": max(late),
        "start_late_p99_s": percentile(early, 0.99),
        "fired": sum(task.done() for task in tasks),
        "all_requests": requests,
    }
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return result


def percentile(values: list[float], share: float) -> float:
    """The value that so many are not above."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def main() -> int:
    """See the module."""
    make = {"ours": ours, "peer": peer}[sys.argv[1]]
    plan = json.loads(Path(sys.argv[2]).read_text())
    count_requests()
    make({**plan["jobs"][0]}, 10.0)  # imports
    print("RESULT", json.dumps(asyncio.run(defer(make, plan))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
