"""A real Airflow for tests: api-server, scheduler (LocalExecutor), dag-processor and triggerer.

Each component is a subprocess in a session of its own, so that "this component and its children" is a
question the kernel answers, even for children whose parent was killed. What a task detaches with
``setsid`` is outside every session: the ``kill_*`` methods spare it, and only ``stop`` ends it.
"""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx
import processes

COMPONENTS = ("api-server", "dag-processor", "scheduler", "triggerer")
FINAL_STATES = frozenset({"success", "failed", "upstream_failed", "skipped", "removed"})
POLL_S = 0.2

T = TypeVar("T")


class AirflowStackError(AssertionError):
    """A component died, a wait ran out, or the API refused; the text ends with the components' logs."""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _config(home: Path, dags_folder: Path, port: int) -> dict[str, str]:
    """Airflow options by "section.key": deaths are noticed in seconds, nothing leaves the loopback."""
    return {
        "core.dags_folder": str(dags_folder),
        "core.executor": "LocalExecutor",
        "core.parallelism": "8",  # each is a process
        "core.load_examples": "False",
        "core.dags_are_paused_at_creation": "False",
        "core.fernet_key": "",  # extras and trigger arguments stay readable in the database
        "core.hostname_callable": "socket.gethostname",  # the default asks a name server
        "core.execution_api_server_url": f"http://127.0.0.1:{port}/execution/",
        "core.simple_auth_manager_all_admins": "True",
        "core.min_serialized_dag_update_interval": "0",
        # Writers of SQLite queue up; 5 s, the default, is short on a busy machine.
        "database.sql_alchemy_conn": f"sqlite:///{home}/airflow.db?timeout=30",
        "logging.base_log_folder": str(home / "logs"),
        "logging.colored_console_log": "False",
        # No log servers: the api-server reads the files. It asks for the live rest on these closed ports,
        # and "Could not read served logs" in its log is harmless.
        "logging.worker_log_server_port": "9",
        "logging.trigger_log_server_port": "9",
        "api.base_url": f"http://127.0.0.1:{port}",
        "api.secret_key": secrets.token_hex(16),
        "api_auth.jwt_secret": secrets.token_hex(32),
        "usage_data_collection.enabled": "False",
        "openlineage.disabled": "True",
        "workers.min_heartbeat_interval": "1",
        "workers.execution_api_retry_wait_max": "2",
        "workers.execution_api_timeout": "30",
        "scheduler.job_heartbeat_sec": "1",
        "scheduler.scheduler_heartbeat_sec": "1",
        "scheduler.scheduler_health_check_threshold": "10",
        "scheduler.scheduler_idle_sleep_time": "0.3",
        # A live task on a starved machine must not look dead: ten missed heartbeats, not three.
        "scheduler.task_instance_heartbeat_timeout": "10",
        "scheduler.task_instance_heartbeat_timeout_detection_interval": "1",
        "scheduler.orphaned_tasks_check_interval": "2",
        "scheduler.trigger_timeout_check_interval": "1",
        "triggerer.job_heartbeat_sec": "1",
        # A trigger moves to another triggerer when its own was silent for this long.
        "triggerer.triggerer_health_check_threshold": "5",
        "dag_processor.refresh_interval": "1",
        "dag_processor.bundle_refresh_check_interval": "1",
        "dag_processor.min_file_process_interval": "5",
    }


class AirflowStack:
    """The four components of an Airflow in ``home``; a context manager that leaves no process behind.

    All ``timeout_s`` are seconds of wall time; waits raise AirflowStackError when they run out.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.logs = home / "logs-components"
        self.dags_folder = home / "dags"
        self._port = _free_port()
        self._env: dict[str, str] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{self._port}", timeout=60, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- life ---------------------------------------------------------------------------------------

    def start(
        self,
        dags_folder: Path,
        extra_env: Mapping[str, str] | None = None,
        timeout_s: float = 120,
    ) -> None:
        """Create the database, start all four components and return when all are healthy.

        ``extra_env`` goes to every component, may override any option (``AIRFLOW__SECTION__KEY``), and its
        PYTHONPATH comes before the inherited one.
        """
        self.logs.mkdir(parents=True)
        self.dags_folder = dags_folder
        self._env = self._environment(extra_env or {})
        # Ends everything when this process dies without calling stop(), be it by SIGKILL.
        self._watchdog = subprocess.Popen(
            [sys.executable, processes.__file__, str(self.home)], stdin=subprocess.PIPE, start_new_session=True
        )
        try:
            self._spawn("db-migrate", ["db", "migrate"])
            if self._running.pop("db-migrate").wait(timeout_s):
                raise AirflowStackError(f"airflow db migrate failed\n{self.component_logs()}")
            began = datetime.now(UTC)
            for component in COMPONENTS:
                self._spawn_component(component)
            self._wait_healthy(COMPONENTS, began, timeout_s)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """SIGKILL all that was started, detached processes of tasks included; safe to call twice."""
        self._http.close()
        processes.end_everything(self.home)
        for process in self._running.values():
            process.wait(10)
        self._running.clear()
        if self._watchdog and self._watchdog.stdin:
            self._watchdog.stdin.close()
            self._watchdog.wait(30)
            self._watchdog = None

    def start_component(self, component: str, timeout_s: float = 60) -> None:
        """Start one of COMPONENTS after its kill and return at its first new heartbeat."""
        if component in self._running:
            raise AirflowStackError(f"{component} is running already")
        began = datetime.now(UTC)
        self._spawn_component(component)
        self._wait_healthy((component,), began, timeout_s)

    def kill_component(self, component: str) -> None:
        """SIGKILL one of COMPONENTS with all its children, but for those in a session of their own."""
        process = self._running.pop(component)
        processes.kill_until_gone(lambda: processes.in_sessions({process.pid}))
        process.wait(10)

    def kill_triggerer(self) -> None:
        """SIGKILL the triggerer and the process in which the triggers run."""
        self.kill_component("triggerer")

    def start_triggerer(self, timeout_s: float = 60) -> None:
        """Start a triggerer; it takes over the killed one's triggers within about 5 s."""
        self.start_component("triggerer", timeout_s)

    def kill_scheduler(self, workers: bool = True) -> None:
        """SIGKILL the scheduler: as a dying pod does, with its workers and tasks; or it alone."""
        if workers:
            self.kill_component("scheduler")
        else:
            process = self._running.pop("scheduler")
            process.kill()
            process.wait(10)

    def start_scheduler(self, timeout_s: float = 60) -> None:
        """Start a scheduler; it resets the killed one's queued and running tasks within about 12 s."""
        self.start_component("scheduler", timeout_s)

    def kill_worker(self, dag_id: str, run_id: str, task_id: str, map_index: int = -1) -> tuple[int, int]:
        """SIGKILL the LocalExecutor worker that runs this task and its task runner, and nothing else.

        Return the two pids, worker first. The scheduler notices within about 12 s.
        """
        task = self.task(dag_id, run_id, task_id, map_index)
        ours = processes.in_sessions(self._sessions())
        live = processes.live()
        runner = live.get(task["pid"] or 0)
        if task["state"] != "running" or not runner or not {runner.pid, runner.ppid} <= ours:
            raise AirflowStackError(f"no worker of ours runs {task_id}: state {task['state']}, {runner=}")
        processes.kill(runner.pid, signal.SIGSTOP)  # it must not report the worker's death
        pids = (runner.ppid, runner.pid)
        for pid in pids:
            processes.kill(pid)
        processes.kill_until_gone(lambda: processes.live().keys() & set(pids))
        return pids

    def component_logs(self, lines: int = 30) -> str:
        """The last ``lines`` lines of each component's log."""
        parts = []
        for path in sorted(self.logs.glob("*.log")):
            tail = path.read_text(errors="replace").splitlines()[-lines:]
            parts.append("\n".join([f"--- {path.name} (last {lines} lines)", *tail]))
        return "\n".join(parts)

    # --- DAGs and runs ------------------------------------------------------------------------------

    def wait_parsed(self, dag_id: str, timeout_s: float = 60) -> None:
        """Return when the DAG is known; when it does not become so, the error has all import errors."""

        def describe() -> str:
            errors = self._api("GET", "/importErrors")["import_errors"]
            return "\n".join([f"DAG {dag_id} is not known", *(e["stack_trace"] for e in errors)])

        self._wait(lambda: self._api("GET", f"/dags/{dag_id}", missing_ok=True), timeout_s, describe)

    def trigger(self, dag_id: str, conf: Mapping[str, Any] | None = None, run_id: str | None = None) -> str:
        """Unpause the DAG and start a run; return its run_id."""
        self._api("PATCH", f"/dags/{dag_id}", {"is_paused": False})
        run_id = run_id or f"test__{uuid.uuid4().hex[:12]}"
        body = {"dag_run_id": run_id, "logical_date": None, "conf": dict(conf or {})}
        self._api("POST", f"/dags/{dag_id}/dagRuns", body)
        return run_id

    def run_state(self, dag_id: str, run_id: str) -> str:
        """State of the run."""
        return str(self._api("GET", f"/dags/{dag_id}/dagRuns/{quote(run_id, '')}")["state"])

    def wait_run(self, dag_id: str, run_id: str, states: Collection[str] = ("success",), timeout_s: float = 60) -> str:
        """Wait until the run is in one of ``states`` and return it; success or failure ends the wait."""

        def reached() -> str | None:
            state = self.run_state(dag_id, run_id)
            if state in FINAL_STATES and state not in states:
                raise AirflowStackError(f"{describe()}\n{self.component_logs()}")
            return state if state in states else None

        def describe() -> str:
            tasks = self._api("GET", f"/dags/{dag_id}/dagRuns/{quote(run_id, '')}/taskInstances")
            states_of = {t["task_id"]: t["state"] for t in tasks["task_instances"]}
            return f"{dag_id} {run_id} is {self.run_state(dag_id, run_id)}, not {states}: {states_of}"

        return self._wait(reached, timeout_s, describe)

    # --- task instances -----------------------------------------------------------------------------

    def task(self, dag_id: str, run_id: str, task_id: str, map_index: int = -1) -> dict[str, Any]:
        """The task instance as the API describes it: state, try_number, max_tries, pid, trigger, ..."""
        path = self._task_path(dag_id, run_id, task_id, map_index)
        return dict(self._api("GET", path))

    def task_state(self, dag_id: str, run_id: str, task_id: str, map_index: int = -1) -> str | None:
        """State of the task instance; None is "no status"."""
        state: str | None = self.task(dag_id, run_id, task_id, map_index)["state"]
        return state

    def tries(self, dag_id: str, run_id: str, task_id: str, map_index: int = -1) -> list[dict[str, Any]]:
        """All tries, the oldest first, the current one last."""
        path = self._task_path(dag_id, run_id, task_id, map_index)
        tries = self._api("GET", f"{path}/tries")["task_instances"]
        return sorted(tries, key=lambda one: int(one["try_number"]))

    def wait_task(
        self,
        dag_id: str,
        run_id: str,
        task_id: str,
        states: Collection[str],
        timeout_s: float = 60,
        *,
        map_index: int = -1,
        try_number: int | None = None,
    ) -> dict[str, Any]:
        """Wait until the task is in one of ``states`` (of that try, when given) and return the instance.

        Another final state ends the wait at once; a try later than ``try_number`` does, too.
        """

        def reached() -> dict[str, Any] | None:
            task = self.task(dag_id, run_id, task_id, map_index)
            if try_number is not None and task["try_number"] < try_number:
                return None
            over = task["try_number"] > (try_number or task["try_number"])
            if not over and task["state"] in states:
                return task
            if over or task["state"] in FINAL_STATES:
                raise AirflowStackError(f"{describe()}\n{self.component_logs()}")
            return None

        def describe() -> str:
            task = self.task(dag_id, run_id, task_id, map_index)
            log = self.task_log(dag_id, run_id, task_id, task["try_number"], map_index)
            now = f"{task['state']} in try {task['try_number']} of {task['max_tries'] + 1}"
            wanted = f"{sorted(states)} in try {try_number or 'any'}"
            return f"{dag_id}.{task_id} {run_id} is {now}, not {wanted}\n--- task log\n{log}"

        return self._wait(reached, timeout_s, describe)

    def xcom(self, dag_id: str, run_id: str, task_id: str, key: str = "return_value", map_index: int = -1) -> Any:
        """The XCom value, None when there is none."""
        path = f"{self._task_path(dag_id, run_id, task_id)}/xcomEntries/{quote(key, '')}"
        entry = self._api("GET", f"{path}?map_index={map_index}", missing_ok=True)
        return entry and entry["value"]

    def task_log(self, dag_id: str, run_id: str, task_id: str, try_number: int, map_index: int = -1) -> str:
        """All of a try's log as the UI shows it, worker and triggerer lines merged; "" when there is none."""
        path = f"{self._task_path(dag_id, run_id, task_id)}/logs/{try_number}"
        answer = self._api("GET", f"{path}?full_content=true&map_index={map_index}", missing_ok=True)
        lines = []
        for line in answer["content"] if answer else []:
            if isinstance(line, dict):
                head = f"{line.pop('timestamp', '-')} {line.pop('level', '-')} {line.pop('event')}"
                line = f"{head} {json.dumps(line)}" if line else head
            lines.append(line)
        return "\n".join(lines)

    def wait_log(
        self,
        dag_id: str,
        run_id: str,
        task_id: str,
        try_number: int,
        text: str,
        timeout_s: float = 60,
        map_index: int = -1,
    ) -> str:
        """Wait until the try's log holds ``text`` and return the log."""

        def reached() -> str:
            log = self.task_log(dag_id, run_id, task_id, try_number, map_index)
            return log if text in log else ""

        def describe() -> str:
            log = self.task_log(dag_id, run_id, task_id, try_number, map_index)
            return f"no {text!r} in the log of {dag_id}.{task_id} {run_id} try {try_number}:\n{log}"

        return self._wait(reached, timeout_s, describe)

    def wait_trigger(
        self, dag_id: str, run_id: str, task_id: str, timeout_s: float = 60, *, try_number: int = 1
    ) -> None:
        """Wait until a triggerer runs the deferred task's trigger.

        The task is "deferred" up to seconds before, and its trigger's on_kill is not called in between.
        """
        self.wait_task(dag_id, run_id, task_id, {"deferred"}, timeout_s, try_number=try_number)
        self.wait_log(dag_id, run_id, task_id, try_number, " starting", timeout_s)

    def clear(self, dag_id: str, run_id: str, task_id: str, *, map_index: int = -1, downstream: bool = False) -> None:
        """Clear a task in any state, as the UI's button does."""
        body = {
            "dry_run": False,
            "dag_run_id": run_id,
            "task_ids": [task_id if map_index < 0 else [task_id, map_index]],
            "only_failed": False,
            "include_downstream": downstream,
        }
        answer = self._api("POST", f"/dags/{dag_id}/clearTaskInstances", body)
        if not answer["total_entries"]:
            raise AirflowStackError(f"nothing to clear: {dag_id}.{task_id} {run_id}")

    def mark(self, dag_id: str, run_id: str, task_id: str, state: str, map_index: int = -1) -> None:
        """Mark a task "success", "failed" or "skipped", as the UI does."""
        self._api("PATCH", self._task_path(dag_id, run_id, task_id, map_index), {"new_state": state})

    # --- insides ------------------------------------------------------------------------------------

    def _environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        options = _config(self.home, self.dags_folder, self._port)
        env = {k: v for k, v in os.environ.items() if not k.startswith("AIRFLOW_")}
        env |= {f"AIRFLOW__{k.replace('.', '__').upper()}": v for k, v in options.items()}
        paths = [p for p in (extra.get("PYTHONPATH"), env.get("PYTHONPATH")) if p]
        env |= {"NO_PROXY": "127.0.0.1,localhost", "PYTHONUNBUFFERED": "1"}
        return env | dict(extra) | {"AIRFLOW_HOME": str(self.home), "PYTHONPATH": os.pathsep.join(paths)}

    def _spawn(self, name: str, arguments: list[str]) -> None:
        with (self.logs / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "airflow", *arguments],
                cwd=self.home,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running[name] = process
        with (self.home / "sessions").open("a") as listed:
            listed.write(f"{process.pid}\n")

    def _spawn_component(self, component: str) -> None:
        options = {
            "api-server": ["--host", "127.0.0.1", "--port", str(self._port), "--workers", "1"],
            "scheduler": ["--skip-serve-logs"],
            "triggerer": ["--skip-serve-logs"],
        }
        self._spawn(component, [component, *options.get(component, [])])

    def _sessions(self) -> set[int]:
        return {int(line) for line in (self.home / "sessions").read_text().split()}

    def _wait_healthy(self, components: Collection[str], since: datetime, timeout_s: float) -> None:
        names = {c.replace("-", "_") for c in components} - {"api_server"}

        def healthy() -> bool:
            for component in components:
                if (code := self._running[component].poll()) is not None:
                    raise AirflowStackError(f"{component} exited with {code}\n{self.component_logs()}")
            with contextlib.suppress(httpx.HTTPError):
                if "Authorization" not in self._http.headers:
                    token = self._http.get("/auth/token").raise_for_status().json()["access_token"]
                    self._http.headers["Authorization"] = f"Bearer {token}"
                health = self._http.get("/api/v2/monitor/health").raise_for_status().json()
                beats = [health[n][f"latest_{n}_heartbeat"] for n in names]
                return all(b and datetime.fromisoformat(b) > since for b in beats)
            return False

        self._wait(healthy, timeout_s, lambda: f"not healthy: {sorted(components)}")

    def _wait(self, reached: Callable[[], T | None], timeout_s: float, describe: Callable[[], str]) -> T:
        deadline = time.monotonic() + timeout_s
        while not (result := reached()):
            if time.monotonic() > deadline:
                raise AirflowStackError(f"after {timeout_s} s: {describe()}\n{self.component_logs()}")
            time.sleep(POLL_S)
        return result

    @staticmethod
    def _task_path(dag_id: str, run_id: str, task_id: str, map_index: int = -1) -> str:
        path = f"/dags/{dag_id}/dagRuns/{quote(run_id, '')}/taskInstances/{quote(task_id, '')}"
        return path if map_index < 0 else f"{path}/{map_index}"

    def _api(self, method: str, path: str, body: Any = None, *, missing_ok: bool = False) -> Any:
        response = self._http.request(method, f"/api/v2{path}", json=body)
        if response.status_code == 404 and missing_ok:
            return None
        if response.is_error:
            raise AirflowStackError(f"{method} {path}: {response.status_code} {response.text}")
        return response.json()
