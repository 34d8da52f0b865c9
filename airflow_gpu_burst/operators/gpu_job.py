"""GpuJobOperator: one GPU step of a DAG."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowTaskTimeout

from airflow_gpu_burst import errors, platforms, runs
from airflow_gpu_burst.compat import airflow_errors, run_key
from airflow_gpu_burst.errors import ClusterUnreachable, GpuBurstError, SpecError
from airflow_gpu_burst.hooks.gpu_cluster import GpuClusterHook
from airflow_gpu_burst.operators.links import RunInStoreLink
from airflow_gpu_burst.spec import Checkpointing, RunSpec, TablePin, Timeouts
from airflow_gpu_burst.state import Handle, Observation, Phase

if TYPE_CHECKING:
    from airflow.sdk import Context

HANDLE_KEY = "gpu_burst_handle"
"""Under this key the handle is kept in Airflow's task_state_store: a cache for people and tools, the run log is the
truth."""


class GpuJobOperator(BaseOperator):
    """
    Run a training command on a GPU cluster and return its result.

    The run survives the worker, the triggerer and the scheduler: a retried try finds the running one. A failed run's
    retry goes on from the last checkpoint; clearing a finished task trains anew; clearing, failing or succeeding a
    running task by hand ends the run.

    :param command: the trainer's argv, e.g. `["python", "-m", "trainers.yield_rca"]`.
    :param image: container image; not used by the local route.
    :param gpus: GPUs in all: up to one node any number, beyond that whole nodes.
    :param inputs: name → what PinSnapshotOperator returned (`pin.output`).
    :param trainer_params: JSON-safe values, the trainer's `context().params`.
    :param env: plain environment of the trainer; never a secret.
    :param working_dir: folder that the command runs in.
    :param checkpoints: how many stay restorable (at least 2); 0: the run keeps none.
    :param publish: name under which the trainer's model is published; empty: not at all.
    :param platform: None: the connection's.
    :param queue_name: Kueue LocalQueue; None: the connection's. (`queue` is Airflow's own: which worker runs the task.)
    :param priority: WorkloadPriorityClass, or empty.
    :param queue_timeout: limit of the wait for admission; None: no limit.
    :param start_timeout: limit from admission to the trainer's start.
    :param run_timeout: limit of the run itself; None: `execution_timeout`, which Airflow does not enforce while a
        task is deferred, or no limit.
    :param gpu_conn_id: connection of the cluster. Another cluster or route is another connection, nothing else.
    :param store_conn_id: connection of the store; None: the one that the cluster's connection names.
    :param deferrable: wait in the triggerer (default) rather than on a worker slot.
    :param poll_interval: seconds between two looks.
    :returns: dict with `run_key`, `generation`, `seconds`, `result`, `result_key`, `model_key`, `model_name`,
        `model_version`.
    """

    template_fields: Sequence[str] = (
        "command",
        "image",
        "gpus",
        "inputs",
        "trainer_params",
        "env",
        "working_dir",
        "publish",
        "platform",
        "queue_name",
        "priority",
        "gpu_conn_id",
        "store_conn_id",
    )
    template_fields_renderers = {"trainer_params": "json", "inputs": "json", "env": "json", "command": "json"}
    operator_extra_links = (RunInStoreLink(),)
    ui_color = "#d8e8c8"

    def __init__(
        self,
        *,
        command: Sequence[str],
        image: str = "",
        gpus: int | str = 0,
        inputs: Mapping[str, Any] | None = None,
        trainer_params: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        working_dir: str = "",
        checkpoints: int = 2,
        publish: str = "",
        platform: str | None = None,
        queue_name: str | None = None,
        priority: str = "",
        queue_timeout: timedelta | None = None,
        start_timeout: timedelta | None = timedelta(minutes=30),
        run_timeout: timedelta | None = None,
        gpu_conn_id: str = GpuClusterHook.default_conn_name,
        store_conn_id: str | None = None,
        deferrable: bool = True,
        poll_interval: float = 2.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.command = command
        self.image = image
        self.gpus = gpus
        self.inputs = inputs or {}
        self.trainer_params = trainer_params or {}
        self.env = env or {}
        self.working_dir = working_dir
        self.checkpoints = checkpoints
        self.publish = publish
        self.platform = platform
        self.queue_name = queue_name
        self.priority = priority
        self.queue_timeout = queue_timeout
        self.start_timeout = start_timeout
        self.run_timeout = run_timeout
        self.gpu_conn_id = gpu_conn_id
        self.store_conn_id = store_conn_id
        self.deferrable = deferrable
        self.poll_interval = poll_interval
        self._ended = threading.Event()

    def execute(self, context: Context) -> Any:
        """Submit or adopt, then wait: in the triggerer, or here when not deferrable."""
        with airflow_errors():
            spec = self._spec()
            site = self._site(spec.inputs)
            ti = context["ti"]
            handle = runs.submit(
                site, spec=spec, run_key=run_key(context), max_tries=ti.max_tries, try_number=ti.try_number
            )
            self._announce(context, site, handle)
            if runs.finished(site, handle):
                for line in runs.unprinted(site.store, handle):
                    self.log.info("%s", line)
                return runs.collect(site, handle).to_dict()
            submitted_at = time.time()
            if self._ended.is_set():
                raise self._told_to_end(context, site, handle)
            if not self.deferrable:
                return self._wait(context, site, handle, spec.timeouts, submitted_at)
        from airflow_gpu_burst.triggers.gpu_job import GpuJobTrigger

        self.defer(
            trigger=GpuJobTrigger(
                handle=handle.to_json(),
                timeouts=asdict(spec.timeouts),
                submitted_at=submitted_at,
                poll_interval=self.poll_interval,
            ),
            method_name="execute_complete",
        )

    def execute_complete(self, context: Context, event: dict[str, Any]) -> Any:
        """After the triggerer: take the result, or raise what went wrong."""
        handle = Handle.from_json(event["handle"])
        with airflow_errors():
            if "error" in event:
                raise _from_event(event)
            site = self._site({})
            observation = Observation(**{**event["observation"], "phase": Phase(event["observation"]["phase"])})
            return self._conclude(site, handle, observation, event["timeout"])

    def on_kill(self) -> None:
        """
        SIGTERM on the worker. A person and a host look the same here, and this is a signal handler: only wake the
        loop, which asks Airflow.
        """
        self._ended.set()

    def _wait(self, context: Context, site: runs.Site, handle: Handle, timeouts: Timeouts, submitted_at: float) -> Any:
        follower = runs.Follower(
            store=site.store, route=site.route, handle=handle, timeouts=timeouts, submitted_at=submitted_at
        )
        try:
            while True:
                step = follower.step()
                for line in [*step.notes, *step.lines]:
                    self.log.info("%s", line)
                if step.done:
                    return self._conclude(site, handle, step.observation, step.timeout)
                if self._ended.wait(self.poll_interval):
                    raise self._told_to_end(context, site, handle)
        except AirflowTaskTimeout:
            runs.cancel(site, handle, "execution_timeout has passed")
            raise

    def _told_to_end(self, context: Context, site: runs.Site, handle: Handle) -> GpuBurstError:
        ti = context["ti"]
        states = ti.get_task_states(
            dag_id=ti.dag_id, task_ids=[ti.task_id], run_ids=[ti.run_id], map_index=ti.map_index
        )
        key = f"{ti.task_id}_{ti.map_index}" if ti.map_index is not None and ti.map_index >= 0 else ti.task_id
        if states.get(ti.run_id, {}).get(key) == "running":
            return ClusterUnreachable(f"this worker was told to end; {handle.name} goes on, and the next try finds it")
        self.log.info("cancelling %s: the task was marked or cleared", handle.name)
        runs.cancel(site, handle, "marked or cleared in Airflow")
        return ClusterUnreachable(f"{handle.name} was cancelled: the task was marked or cleared")

    def _conclude(self, site: runs.Site, handle: Handle, observation: Observation, timeout: str) -> Any:
        result = runs.collect(site, handle, observation, timeout=timeout)
        self.log.info("%s finished in %.1f s %s", handle.name, result.seconds, result.model_key)
        return result.to_dict()

    def _announce(self, context: Context, site: runs.Site, handle: Handle) -> None:
        self.log.info("%s: generation %d of %s", handle.name, handle.generation, handle.run_key)
        self.log.info("its log, checkpoints, output and result: %s/%s/", site.store.uri, handle.run_key.prefix)
        if site.console_url:
            link = f"{site.console_url.rstrip('/')}/{handle.run_key.prefix}/"
            context["ti"].xcom_push(key=RunInStoreLink().xcom_key, value=link)
        if (cache := context.get("task_state_store")) is not None:
            cache.set(HANDLE_KEY, handle.to_json())

    def _site(self, inputs: Mapping[str, TablePin]) -> runs.Site:
        hook = GpuClusterHook(self.gpu_conn_id)
        return hook.site(store_conn_id=self.store_conn_id, catalogs=[pin.catalog for pin in inputs.values()])

    def _spec(self) -> RunSpec:
        """Everything that is templated is read here, after rendering."""
        cluster = GpuClusterHook(self.gpu_conn_id).config()
        gpus = _whole_number("gpus", self.gpus)
        platform = platforms.load(self.platform or cluster.platform)
        platform.check_gpus(gpus)
        return RunSpec(
            command=self.command if isinstance(self.command, str) else tuple(self.command),  # type: ignore[arg-type]
            image=self.image,
            gpus=gpus,
            platform=platform.name,
            queue=cluster.queue if self.queue_name is None else self.queue_name,
            priority=self.priority,
            inputs={name: _pin(name, value) for name, value in self.inputs.items()},
            params=dict(self.trainer_params),
            env=dict(self.env),
            working_dir=self.working_dir,
            checkpoint=Checkpointing(keep=self.checkpoints) if self.checkpoints else None,
            publish=self.publish,
            timeouts=Timeouts(
                queue_s=_seconds(self.queue_timeout),
                start_s=_seconds(self.start_timeout),
                run_s=_seconds(self.run_timeout or self.execution_timeout),
            ),
        )


def _pin(name: str, value: Any) -> TablePin:
    if not isinstance(value, Mapping):
        raise SpecError(
            f"inputs[{name!r}] is {value!r}, not a pin. Pass the output of a PinSnapshotOperator, and see that this "
            "task ran: inputs={'wafers': pin.output}"
        )
    return TablePin.from_dict(value)


def _whole_number(name: str, value: int | str) -> int:
    """A form field arrives as text."""
    try:
        return int(value)
    except (TypeError, ValueError) as error:
        raise SpecError(f"{name}={value!r} is not a whole number") from error


def _seconds(value: timedelta | None) -> float | None:
    return None if value is None else value.total_seconds()


def _from_event(event: Mapping[str, Any]) -> GpuBurstError:
    """The trigger's error again, of its own class where it is one of ours."""
    own = getattr(errors, event["error"], None)
    if isinstance(own, type) and issubclass(own, GpuBurstError):
        return own(event["message"])
    return ClusterUnreachable(f"the wait failed with {event['error']}: {event['message']}")
