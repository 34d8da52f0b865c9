"""Waiting for a GPU job in the triggerer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import cache, lru_cache
from typing import Any, TypeVar

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_gpu_burst.errors import GpuBurstError
from airflow_gpu_burst.hooks.gpu_cluster import afind_site
from airflow_gpu_burst.runs import Follower, Site, cancel, closed
from airflow_gpu_burst.runs.following import PATIENCE_S
from airflow_gpu_burst.spec import Timeouts
from airflow_gpu_burst.state import Handle
from airflow_gpu_burst.store import Store, StoreConfig, open_store

T = TypeVar("T")

POOL_SIZE = 16
"""Looks at once, over all jobs of this triggerer; a look is a few small requests."""


BREATH_S = 0.1
"""Shortest pause between two looks at one run."""
CONNECTION_EVERY_S = 30.0
"""How often the connection is read again while the cluster refuses its credentials."""


@cache
def _pool() -> ThreadPoolExecutor:
    # Of our own: asyncio's default pool is shared with everything else in the triggerer.
    return ThreadPoolExecutor(POOL_SIZE, thread_name_prefix="gpu-burst")


@lru_cache(maxsize=32)
def _shared_store(config: StoreConfig) -> Store:
    # An S3 client takes 14 MB and 0.25 CPU seconds to make: one for all jobs, as of the cluster. A client renews
    # temporary credentials by itself; a changed connection is another config.
    return open_store(config)


@cache
def _kills() -> ThreadPoolExecutor:
    # Airflow gives a kill 30 s: it must not stand behind looks at a store that hangs.
    return ThreadPoolExecutor(2, thread_name_prefix="gpu-burst-kill")


async def _in_pool(work: Callable[[], T], pool: Callable[[], ThreadPoolExecutor] = _pool) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool(), work)


async def _pause(news: asyncio.Event, seconds: float) -> None:
    """Until there is news, or for so long; never less than BREATH_S, so that a flood comes in few steps."""
    await asyncio.sleep(min(seconds, BREATH_S))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(news.wait(), max(0.0, seconds - BREATH_S))


class GpuJobTrigger(BaseTrigger):
    """
    Follows one run, prints its output, fires once.

    Fires `{"handle", "observation", "timeout"}`, or `{"handle", "error", "message", "retryable"}`. Everything that it
    needs is in its arguments, none of it secret; it may be started again on another triggerer at any time.

    :param handle: a Handle, as JSON.
    :param timeouts: a Timeouts, as a dict of seconds.
    :param submitted_at: wall clock of the submission, seconds since the epoch.
    :param poll_interval: seconds between two looks, where the route does not say by itself that something changed.
    :param ranks: how many pods train together.
    :param logs: whose lines are printed: `all`, `rank0`, `none`, or ranks such as `0,4-7`.
    :param spooled: False: a manifest of the user's own, whose pods need not have the runtime.
    """

    def __init__(
        self,
        handle: str,
        timeouts: dict[str, float | None],
        submitted_at: float,
        poll_interval: float,
        ranks: int = 1,
        logs: str = "all",
        spooled: bool = True,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.handle = handle
        self.timeouts = timeouts
        self.submitted_at = submitted_at
        self.poll_interval = poll_interval
        self.ranks = ranks
        self.logs = logs
        self.spooled = spooled

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Class path and arguments, JSON-safe."""
        return (
            f"{type(self).__module__}.{type(self).__qualname__}",
            {
                "handle": self.handle,
                "timeouts": self.timeouts,
                "submitted_at": self.submitted_at,
                "poll_interval": self.poll_interval,
                "ranks": self.ranks,
                "logs": self.logs,
                "spooled": self.spooled,
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
        # A store that does not answer is no reason to leave GPUs to nobody: `cancel` ends the object all the same.
        with contextlib.suppress(GpuBurstError):
            if await _in_pool(lambda: closed(site, handle), _kills):
                self.log.info("%s has been ended already", handle.name)
                return
        if await self._still_deferred():
            self.log.warning("asked to cancel %s, but the task still waits for it: left alone", handle.name)
            return
        self.log.info("cancelling %s: the task was marked or cleared", handle.name)
        await _in_pool(lambda: cancel(site, handle, "marked or cleared in Airflow"), _kills)

    async def _follow(self) -> dict[str, Any]:
        handle = Handle.from_json(self.handle)
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            # From a thread of the watch, which may outlive this loop by a moment.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(news.set)

        follower = self._follower(await self._site(handle), handle, wake)
        read_at = time.monotonic()
        refused_at: float | None = None
        try:
            while True:
                news.clear()
                step = await _in_pool(follower.step)
                await self._print([*step.notes, *step.lines])
                if step.done:
                    return {"observation": asdict(step.observation), "timeout": step.timeout}
                now = time.monotonic()
                if step.refused:
                    refused_at = refused_at or now
                elif step.observation.submitted is not None:
                    refused_at = None
                # A new follower has new patience: not for ever.
                if refused_at and step.refused and now - refused_at < PATIENCE_S and now - read_at > CONNECTION_EVERY_S:
                    follower.close()
                    follower, read_at = self._follower(await self._site(handle), handle, wake), time.monotonic()
                await _pause(news, step.wait_s)
        finally:
            follower.close()

    def _follower(self, site: Site, handle: Handle, wake: Callable[[], None]) -> Follower:
        return Follower(
            store=site.store,
            route=site.route,
            handle=handle,
            timeouts=Timeouts(**self.timeouts),
            submitted_at=self.submitted_at,
            wake=wake,
            ranks=self.ranks,
            logs=self.logs,
            spooled=self.spooled,
            poll_s=self.poll_interval,
        )

    async def _print(self, lines: list[str]) -> None:
        for number, text in enumerate(lines):
            self.log.info("%s", text)
            if number % 100 == 99:
                await asyncio.sleep(0)  # a flood of lines must not hold up other triggers

    async def _site(self, handle: Handle) -> Site:
        site = await afind_site(handle.connection, handle.store_connection)
        return replace(site, store=_shared_store(site.store_config))

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
            ),
            _kills,
        )
        key = f"{ti.task_id}_{ti.map_index}" if ti.map_index is not None and ti.map_index >= 0 else ti.task_id
        return bool(states.get(ti.run_id, {}).get(key) == "deferred")
