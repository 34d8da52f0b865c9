"""Waiting for a GPU job in the triggerer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache
from typing import Any, TypeVar

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_gpu_burst.errors import GpuBurstError
from airflow_gpu_burst.hooks.gpu_cluster import afind_site
from airflow_gpu_burst.runs import Follower, Site, cancel, closed
from airflow_gpu_burst.spec import Timeouts
from airflow_gpu_burst.state import Handle

T = TypeVar("T")

POOL_SIZE = 16
"""Looks at once, over all jobs of this triggerer; a look is a few small requests."""


@cache
def _pool() -> ThreadPoolExecutor:
    # Of our own: asyncio's default pool is shared with everything else in the triggerer.
    return ThreadPoolExecutor(POOL_SIZE, thread_name_prefix="gpu-burst")


async def _in_pool(work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(_pool(), work)


class GpuJobTrigger(BaseTrigger):
    """
    Follows one run, prints its output, fires once.

    Fires `{"handle", "observation", "timeout"}`, or `{"handle", "error", "message", "retryable"}`. Everything that it
    needs is in its arguments, none of it secret; it may be started again on another triggerer at any time.

    :param handle: a Handle, as JSON.
    :param timeouts: a Timeouts, as a dict of seconds.
    :param submitted_at: wall clock of the submission, seconds since the epoch.
    :param poll_interval: seconds between two looks.
    """

    def __init__(
        self, handle: str, timeouts: dict[str, float | None], submitted_at: float, poll_interval: float
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.handle = handle
        self.timeouts = timeouts
        self.submitted_at = submitted_at
        self.poll_interval = poll_interval

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Class path and arguments, JSON-safe."""
        return (
            f"{type(self).__module__}.{type(self).__qualname__}",
            {
                "handle": self.handle,
                "timeouts": self.timeouts,
                "submitted_at": self.submitted_at,
                "poll_interval": self.poll_interval,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Until the run has ended or a timeout has passed. An error becomes the event, never a lost trigger."""
        try:
            event = await self._follow()
        except GpuBurstError as error:
            event = {"error": type(error).__name__, "message": str(error), "retryable": error.retryable}
        except Exception as error:  # a trigger that raises is started again and again
            self.log.exception("the wait for a GPU job failed")
            event = {"error": type(error).__name__, "message": str(error), "retryable": True}
        yield TriggerEvent({"handle": self.handle, **event})  # type: ignore[no-untyped-call]

    async def on_kill(self) -> None:
        """A person marked or cleared the task: end the run. Not called when the triggerer merely restarts."""
        handle = Handle.from_json(self.handle)
        site = await self._site(handle)
        if await _in_pool(lambda: closed(site, handle)):
            self.log.info("%s has been ended already", handle.name)
            return
        if await self._still_deferred():
            self.log.warning("asked to cancel %s, but the task still waits for it: left alone", handle.name)
            return
        self.log.info("cancelling %s: the task was marked or cleared", handle.name)
        await _in_pool(lambda: cancel(site, handle, "marked or cleared in Airflow"))

    async def _follow(self) -> dict[str, Any]:
        handle = Handle.from_json(self.handle)
        site = await self._site(handle)
        follower = Follower(
            store=site.store,
            route=site.route,
            handle=handle,
            timeouts=Timeouts(**self.timeouts),
            submitted_at=self.submitted_at,
            wall=time.time,
        )
        while True:
            step = await _in_pool(follower.step)
            for number, text in enumerate([*step.notes, *step.lines]):
                self.log.info("%s", text)
                if number % 100 == 99:
                    await asyncio.sleep(0)  # a flood of lines must not hold up other triggers
            if step.done:
                return {"observation": asdict(step.observation), "timeout": step.timeout}
            await asyncio.sleep(self.poll_interval)

    async def _site(self, handle: Handle) -> Site:
        return await afind_site(handle.connection, handle.store_connection)

    async def _still_deferred(self) -> bool:
        """
        Whether the task of this trigger waits in this very deferral.

        A trigger that moves to another triggerer is cancelled just as by a person (apache/airflow#73454); what tells
        them apart is the state of the task.
        """
        ti = self.task_instance
        if ti is None:
            return False
        from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

        states = await _in_pool(
            lambda: RuntimeTaskInstance.get_task_states(
                dag_id=ti.dag_id, task_ids=[ti.task_id], run_ids=[ti.run_id], map_index=ti.map_index
            )
        )
        key = f"{ti.task_id}_{ti.map_index}" if ti.map_index is not None and ti.map_index >= 0 else ti.task_id
        return bool(states.get(ti.run_id, {}).get(key) == "deferred")
