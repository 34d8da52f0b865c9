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
from airflow_gpu_burst.operators import lineage, links, metrics
from airflow_gpu_burst.operators.links import JobLink, LogsLink, ReportLink, RunInStoreLink
from airflow_gpu_burst.runs.output import ranks_wanted
from airflow_gpu_burst.spec import Checkpointing, RunSpec, TablePin, Timeouts
from airflow_gpu_burst.state import Handle, Observation, Phase
from airflow_gpu_burst.workloads import parse_manifest

if TYPE_CHECKING:
    from airflow.sdk import Context

MANIFEST_FILES = (".yaml", ".yml", ".json")
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
    :param manifest: instead of command and image, a Job or JobSet of your own: a dict, YAML text, or the name of a
        `.yaml`, `.yml` or `.json` file in the DAG's folder (a template). It is submitted as it is, but for its name and
        the labels and annotations that mark it as this run's.
    :param image: container image; empty: the connection's. Not used by the local route.
    :param gpus: GPUs in all: up to one node any number, beyond that whole nodes.
    :param inputs: name → what PinSnapshotOperator returned (`pin.output`).
    :param trainer_params: JSON-safe values, the trainer's `context().params`.
    :param env: plain environment of the trainer; never a secret.
    :param working_dir: folder that the command runs in; a connection's own (where its image keeps the trainers) wins.
    :param checkpoints: how many stay restorable (at least 2), or all that `spec.Checkpointing` knows, as one or as a
        dict: `{"keep": 2, "best": "loss", "bandwidth": "2GB/s"}`; 0: the run keeps none.
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
    :param logs: whose lines go into the task's log: `all` pods', `rank0`, `none`, or ranks such as `0,4-7`.
    :param poll_interval: seconds between two looks, where the route does not say by itself that something changed.
    :returns: dict with `run_key`, `generation`, `seconds`, `result`, `result_key`, `model_key`, `model_name`,
        `model_version`.
    """

    template_fields: Sequence[str] = (
        "command",
        "manifest",
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
    operator_extra_links = (RunInStoreLink(), JobLink(), LogsLink(), ReportLink())
    ui_color = "#d8e8c8"

    def __init__(
        self,
        *,
        command: Sequence[str] = (),
        manifest: Mapping[str, Any] | str | None = None,
        image: str = "",
        gpus: int | str = 0,
        inputs: Mapping[str, Any] | None = None,
        trainer_params: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        working_dir: str = "",
        checkpoints: int | Mapping[str, Any] | Checkpointing = 2,
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
        logs: str = "all",
        poll_interval: float = 2.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.command = command
        self.manifest = manifest
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
        self.logs = logs
        self.poll_interval = poll_interval
        self._ended = threading.Event()
        self._news: threading.Event | None = None
        self._made: Mapping[str, Any] | None = None
        self._store_uri = ""

    def resolve_template_files(self) -> None:
        """Only `manifest` may name a template file: an argument of the command that ends in `.yaml` is none."""
        if isinstance(self.manifest, str) and self.manifest.endswith(MANIFEST_FILES) and "\n" not in self.manifest:
            environment = self.get_template_env()
            assert environment.loader is not None
            self.manifest = environment.loader.get_source(environment, self.manifest)[0]

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
            ranks = site.route.ranks_of(spec)
            if runs.finished(site, handle):
                for line in runs.unprinted(site.store, handle, ranks=ranks, logs=self.logs):
                    self.log.info("%s", line)
                return self._outcome(context, site, handle, runs.collect(site, handle))
            wait: dict[str, Any] = {
                "submitted_at": time.time(),
                "ranks": ranks,
                "logs": self.logs,
                "spooled": spec.manifest is None,
            }
            if self._ended.is_set():
                raise self._told_to_end(context, site, handle)
            if not self.deferrable:
                return self._wait(context, site, handle, spec.timeouts, wait)
        from airflow_gpu_burst.triggers.gpu_job import GpuJobTrigger

        self.defer(
            trigger=GpuJobTrigger(
                handle=handle.to_json(), timeouts=asdict(spec.timeouts), poll_interval=self.poll_interval, **wait
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
            return self._conclude(context, site, handle, observation, event["timeout"])

    def on_kill(self) -> None:
        """
        SIGTERM on the worker. A person and a host look the same here, and this is a signal handler: only wake the
        loop, which asks Airflow.
        """
        self._ended.set()
        if self._news is not None:
            self._news.set()

    def get_openlineage_facets_on_start(self) -> Any:
        """For the OpenLineage provider: the pinned tables, with their snapshots as versions."""
        return lineage.facets(self.inputs.values())

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> Any:
        """The same, and the model that was published."""
        return lineage.facets(self.inputs.values(), outcome=self._made, store_uri=self._store_uri)

    def _wait(
        self, context: Context, site: runs.Site, handle: Handle, timeouts: Timeouts, wait: Mapping[str, Any]
    ) -> Any:
        news = threading.Event()
        self._news = news
        follower = runs.Follower(
            store=site.store,
            route=site.route,
            handle=handle,
            timeouts=timeouts,
            wake=news.set,
            poll_s=self.poll_interval,
            **wait,
        )
        try:
            while True:
                news.clear()
                step = follower.step()
                for line in [*step.notes, *step.lines]:
                    self.log.info("%s", line)
                if step.done:
                    return self._conclude(context, site, handle, step.observation, step.timeout)
                news.wait(max(step.wait_s, 0.1))
                if self._ended.is_set():
                    raise self._told_to_end(context, site, handle)
        except AirflowTaskTimeout:
            runs.cancel(site, handle, "execution_timeout has passed")
            raise
        finally:
            follower.close()

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

    def _conclude(
        self, context: Context, site: runs.Site, handle: Handle, observation: Observation, timeout: str
    ) -> Any:
        try:
            result = runs.collect(site, handle, observation, timeout=timeout)
        except GpuBurstError:
            self._report_phases(context, site, handle)
            raise
        return self._outcome(context, site, handle, result)

    def _outcome(self, context: Context, site: runs.Site, handle: Handle, result: runs.RunResult) -> Any:
        self.log.info("%s finished in %.1f s %s", handle.name, result.seconds, result.model_key)
        self._made = outcome = result.to_dict()
        self._store_uri = site.store.uri
        for key, address in links.of_result(outcome, site.console_url).items():
            context["ti"].xcom_push(key=key, value=address)
        self._report_phases(context, site, handle, result.checkpoints)
        return outcome

    def _report_phases(
        self, context: Context, site: runs.Site, handle: Handle, checkpoints: Mapping[str, float] | None = None
    ) -> None:
        status = runs.read_status(site.store, handle)
        if status is not None:
            metrics.report_phases(
                context["ti"],
                status.durations(time.time()),
                cluster=status.cluster or handle.connection,
                queue=status.queue,
                checkpoints=checkpoints,
            )

    def _announce(self, context: Context, site: runs.Site, handle: Handle) -> None:
        self.log.info("%s: generation %d of %s", handle.name, handle.generation, handle.run_key)
        if handle.namespace:
            self.log.info("kubectl -n %s describe %s %s", handle.namespace, handle.kind.lower(), handle.name)
        self.log.info("its log, checkpoints, output and result: %s/%s/", site.store.uri, handle.run_key.prefix)
        found = links.of_submission(
            handle,
            run_url=links.store_address(site.console_url, f"{handle.run_key.prefix}/"),
            dashboard_url=site.dashboard_url,
            logs_url=site.logs_url,
        )
        for key, address in found.items():
            context["ti"].xcom_push(key=key, value=address)
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
        ranks_wanted(self.logs)
        manifest = None if self.manifest is None else parse_manifest(self.manifest)
        return RunSpec(
            command=self.command if isinstance(self.command, str) else tuple(self.command),  # type: ignore[arg-type]
            manifest=manifest,
            image=self.image or (cluster.image if manifest is None else ""),
            gpus=gpus,
            platform=platform.name,
            queue=cluster.queue if self.queue_name is None else self.queue_name,
            priority=self.priority,
            inputs={name: _pin(name, value) for name, value in self.inputs.items()},
            params=dict(self.trainer_params),
            env=dict(self.env),
            working_dir=cluster.working_dir or self.working_dir,
            checkpoint=Checkpointing.of(self.checkpoints),
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
