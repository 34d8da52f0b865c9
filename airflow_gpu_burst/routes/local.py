"""
The local route: the in-pod runtime as a process in a session of its own, which outlives the Airflow worker.

One folder per submitted object under `work_dir`: `<run digest>/<name>/`. `job.json` is the object and holds its UID;
`process.json` says which process runs it; `exit.json` is its last word. Liveness is a lock that the runtime
inherits (`alive.lock`), not a process id. Everything of a run key shares `trainer.lock`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from airflow_gpu_burst import contract
from airflow_gpu_burst.errors import ClusterUnreachable, ExitCode, RouteError, SpecError
from airflow_gpu_burst.routes import ClusterConfig, Job
from airflow_gpu_burst.runtime.orphans import end_orphan
from airflow_gpu_burst.runtime.process import boot_id, kill_group, start_ticks
from airflow_gpu_burst.runtime.training import ENV_TRAINER_LOCK
from airflow_gpu_burst.runtime.workspace import write_json
from airflow_gpu_burst.state import Handle, Observation, Phase

INHERITED = (
    "PATH",
    "HOME",
    "USER",
    "LANG",
    "LC_ALL",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "OMP_NUM_THREADS",
)
"""What a job gets of the worker's environment, beside CUDA_* and NVIDIA_*. The rest (the worker's keys to
Airflow's database among it) is not the trainer's business."""


class LocalRoute:
    """See the module."""

    name = "local"
    kind = "Process"
    namespace = ""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._root = Path(config.work_dir or default_work_dir()).expanduser()

    def submit(self, job: Job) -> str:
        """Create-or-adopt, under a lock of the object, so that two tries never start two processes."""
        folder = self._root / job.run_key.digest[:32] / job.name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RouteError(
                f"cannot make {folder}: {error.strerror}. Give the worker a folder it can write to: "
                f"extra work_dir of connection {self._config.connection!r}"
            ) from error
        with _locked(folder / "submit.lock"):
            uid = self._object(folder, job)
            if not _alive(folder) and not (folder / "process.json").exists() and not (folder / "exit.json").exists():
                self._start(folder, job, uid)
            return uid

    def observe(self, handle: Handle) -> Observation:
        """Alive by the lock; otherwise by its last word; otherwise killed or lost."""
        folder = self._folder(handle)
        if not (folder / "job.json").exists():
            return Observation(
                phase=Phase.LOST,
                reason="Deleted",
                message=f"the folder of {handle.name} is gone from this machine",
            )
        process = _read(folder / "process.json")
        self._same_host(process)
        if _alive(folder):
            trainer = _read(folder.parent / "trainer.json")
            running = bool(trainer) and trainer["owner"] == _read(folder / "job.json")["uid"]
            return Observation(
                phase=Phase.RUNNING if running else Phase.STARTING,
                since=float(trainer["at"]) if running else None,
                cluster=self._config.connection,
            )
        return self._ended(_read(folder / "exit.json"), process)

    def cancel(self, handle: Handle) -> None:
        """SIGTERM, the grace time, SIGKILL; then whatever trainer the runtime left behind."""
        folder = self._folder(handle)
        process = _read(folder / "process.json")
        if process and process["host"] != socket.gethostname():
            self._same_host(process)
        if process and process["boot"] == boot_id():
            pid, ticks = int(process["pid"]), int(process["ticks"])
            if start_ticks(pid) == ticks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
                # The runtime gives the trainer its grace time and then flushes; a second more for each.
                _wait_dead(folder, self._config.grace_s + 2)
            kill_group(pid, ticks)
        if job := _read(folder / "job.json"):
            end_orphan(folder.parent / "trainer.lock", job["uid"])
            shutil.rmtree(folder / "scratch", ignore_errors=True)

    def _folder(self, handle: Handle) -> Path:
        return self._root / handle.run_key.digest[:32] / handle.name

    def _same_host(self, process: Mapping[str, Any]) -> None:
        host = socket.gethostname()
        if process and process["host"] != host:
            raise ClusterUnreachable(
                f"the local run was started on host {process['host']!r}, and this is {host!r}. The local route needs "
                "worker and triggerer on one machine; use a connection to a cluster otherwise"
            )

    def _object(self, folder: Path, job: Job) -> str:
        identity = {"run_key": job.run_key.to_dict(), "generation": job.generation}
        found = _read(folder / "job.json")
        if not found:
            found = {**identity, "spec_digest": job.spec.digest, "uid": str(uuid.uuid4())}
            write_json(folder / "job.json", found)
        if {name: found[name] for name in identity} != identity:
            raise SpecError(
                f"{job.name} exists and belongs to {found['run_key']}, not to {identity['run_key']}; "
                "give one of the two tasks another name"
            )
        return str(found["uid"])

    def _start(self, folder: Path, job: Job, uid: str) -> None:
        env = {
            name: os.environ[name] for name in os.environ if name in INHERITED or name.startswith(("CUDA_", "NVIDIA_"))
        }
        # `python` in the command is the worker's own interpreter, as it would be the image's own in a pod.
        env["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), env.get("PATH", os.defpath)])
        env["PYTHONUNBUFFERED"] = "1"  # lines when they are printed, not 8 KiB later
        env |= job.env
        env |= {
            contract.ENV_OWNER: uid,
            contract.ENV_POD_UID: uid,
            contract.ENV_RANK: "0",
            contract.ENV_SCRATCH: str(folder / "scratch"),
            contract.ENV_TERMINATION_FILE: str(folder / "exit.json"),
            contract.ENV_GRACE: str(self._config.grace_s),
            ENV_TRAINER_LOCK: str(folder.parent / "trainer.lock"),
        }
        began = time.time()
        lock = os.open(folder / "alive.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.set_inheritable(lock, True)
            argv = [sys.executable, "-m", "airflow_gpu_burst.cli", "run", "--", *job.spec.command]
            pid = os.posix_spawn(
                sys.executable,
                argv,
                env,
                setsid=True,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (
                        os.POSIX_SPAWN_OPEN,
                        1,
                        str(folder / "runtime.log"),
                        os.O_WRONLY | os.O_CREAT | os.O_APPEND,
                        0o600,
                    ),
                    (os.POSIX_SPAWN_DUP2, 1, 2),
                ],
                # A worker that was asked to end must not pass its blocked or ignored signals on.
                setsigmask=[],
                setsigdef=[signal.SIGTERM, signal.SIGINT, signal.SIGPIPE],
            )
        finally:
            os.close(lock)
        write_json(
            folder / "process.json",
            {
                "pid": pid,
                "ticks": start_ticks(pid),
                "boot": boot_id(),
                "host": socket.gethostname(),
                "at": began,
            },
        )

    def _ended(self, last_word: Mapping[str, Any], process: Mapping[str, Any]) -> Observation:
        if last_word:
            code = int(last_word["code"])
            return Observation(
                phase=Phase.SUCCEEDED if code == ExitCode.OK else Phase.FAILED,
                reason=last_word["reason"],
                message=last_word["message"],
                since=float(last_word["at"]),
                code=code,
                cluster=self._config.connection,
            )
        if process and process["boot"] != boot_id():
            return Observation(phase=Phase.LOST, reason="Rebooted", message="the machine was restarted during the run")
        if not process:
            return Observation(phase=Phase.SUBMITTED)
        return Observation(
            phase=Phase.FAILED,
            reason="Killed",
            message="the runtime was killed without a last word; the machine may be out of memory (see `dmesg`)",
        )


def default_work_dir() -> str:
    """`$XDG_STATE_HOME/airflow-gpu-burst`, `~/.local/state/…`; per user in the temporary folder without a home."""
    if state := os.environ.get("XDG_STATE_HOME"):
        return str(Path(state) / "airflow-gpu-burst")
    if os.environ.get("HOME"):
        return "~/.local/state/airflow-gpu-burst"
    return str(Path(tempfile.gettempdir()) / f"airflow-gpu-burst-{os.getuid()}")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _alive(folder: Path) -> bool:
    try:
        descriptor = os.open(folder / "alive.lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # Shared: two lookers never take each other for the runtime, which holds it exclusively.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _wait_dead(folder: Path, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while _alive(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _read(path: Path) -> Mapping[str, Any]:
    try:
        data: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return data
