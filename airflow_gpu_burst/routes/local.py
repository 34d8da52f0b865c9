"""
The local route: the in-pod runtime as a process in a session of its own, which outlives the Airflow worker.

One folder per submitted object under `work_dir`: `<run digest>/<name>/`. `job.json` is the object and holds its UID;
`process.json` says that it was started, and by which process it runs; `exit.json` is its last word. Liveness is a
lock (`alive.lock`) that the submitter takes, the runtime inherits and the kernel releases. Everything of a run
key shares `trainer.lock`.
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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from airflow_gpu_burst import contract
from airflow_gpu_burst.errors import ClusterUnreachable, ExitCode, RouteError, SpecError
from airflow_gpu_burst.routes import ClusterConfig, Found, Job, Piece
from airflow_gpu_burst.runtime.orphans import ENV_TRAINER_LOCK, end_trainers
from airflow_gpu_burst.runtime.output import send_rest
from airflow_gpu_burst.runtime.process import boot_id, kill_group, start_ticks
from airflow_gpu_burst.runtime.start import ENV_PROCESS_FILE
from airflow_gpu_burst.runtime.workspace import Workspace, write_json
from airflow_gpu_burst.spec import RunSpec
from airflow_gpu_burst.state import Handle, Observation, Phase, RunKey
from airflow_gpu_burst.store import Store

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
    namespace = ""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._root = Path(config.work_dir or default_work_dir()).expanduser()

    def kind_of(self, spec: RunSpec) -> str:
        """
        A process.

        :raises SpecError: a Kubernetes manifest, or several nodes.
        """
        if spec.manifest is not None:
            raise SpecError(
                f"a manifest needs a cluster, and connection {self._config.connection!r} has the local route; "
                'its extra {"route": "direct"} and a kubeconfig make it one'
            )
        return "Process"

    def ranks_of(self, spec: RunSpec) -> int:
        """One: a single process, whatever number of GPUs is asked for."""
        return 1

    def check(self, job: Job) -> None:
        """Only the kind can be wrong."""
        self.kind_of(job.spec)

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
        self._same_machine(folder, process)
        if _alive(folder):
            started = _read(self._workspace(handle).started_file)
            return Observation(
                phase=Phase.RUNNING if started else Phase.STARTING,
                since=float(started["at"]) if started else None,
                cluster=self._config.connection,
            )
        return self._ended(_last_word(folder), process)

    def follow(
        self, handle: Handle, wake: Callable[[], None], *, resume: bool = False, since: Mapping[str, str] | None = None
    ) -> LocalLive:
        """By looking at it; the spool has its output."""
        return LocalLive(self, handle)

    def report(self, handle: Handle) -> str:
        """Nothing beyond the observation."""
        return ""

    def settle(self, handle: Handle, store: Store) -> None:
        """End what is left of it, and leave nothing on the machine."""
        self.cancel(handle)
        self.salvage(handle, store)

    def find(self) -> Iterator[Found]:
        """Every run with a folder here."""
        for path in sorted(self._root.glob("*/*/job.json")):
            job = _read(path)
            yield Found(
                handle=Handle(
                    connection=self._config.connection,
                    route=self.name,
                    kind="Process",
                    namespace="",
                    name=path.parent.name,
                    uid=str(job["uid"]),
                    run_key=RunKey.from_dict(job["run_key"]),
                    generation=int(job["generation"]),
                    store_connection="",
                ),
                store_uri=str(job.get("store_uri", "")),
                created=path.stat().st_mtime,
            )

    def salvage(self, handle: Handle, store: Store) -> None:
        """A killed runtime leaves the last seconds of output in its scratch folder; then the folder goes."""
        if _alive(self._folder(handle)):
            return
        workspace = self._workspace(handle)
        with contextlib.suppress(FileNotFoundError, ValueError):
            stream = str(json.loads(workspace.spool_file.read_text(encoding="utf-8")))
            send_rest(store, workspace.output_file, stream)
        shutil.rmtree(workspace.root, ignore_errors=True)

    def cancel(self, handle: Handle) -> None:
        """SIGTERM, the grace time, SIGKILL; then whatever trainer the runtime left behind."""
        folder = self._folder(handle)
        job = _read(folder / "job.json")
        if not job:
            return
        self._same_machine(folder, _read(folder / "process.json"))
        if _alive(folder):
            process = _wait_pid(folder)
            pid, ticks = int(process.get("pid", 0)), int(process.get("ticks", 0))
            if pid and start_ticks(pid) == ticks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
                # The runtime gives the trainer its grace time and then flushes: some seconds more.
                _wait_dead(folder, self._config.grace_s + 2)
                kill_group(pid, ticks)
        end_trainers(folder.parent / "trainer.lock", job["uid"])

    def _workspace(self, handle: Handle) -> Workspace:
        return Workspace(self._folder(handle) / "scratch")

    def _folder(self, handle: Handle) -> Path:
        return self._root / handle.run_key.digest[:32] / handle.name

    def _same_machine(self, folder: Path, process: Mapping[str, Any]) -> None:
        """The same boot is the same machine, whatever its name; the same name after another boot as well."""
        if not process or process.get("boot") == boot_id() or process.get("host") == socket.gethostname():
            return
        raise ClusterUnreachable(
            f"the local run was started on host {process.get('host')!r}, and this is {socket.gethostname()!r}. "
            "The local route needs worker and triggerer on one machine; a connection to a cluster does not. "
            f"If that machine is gone for good, delete {folder}"
        )

    def _object(self, folder: Path, job: Job) -> str:
        identity = {"run_key": job.run_key.to_dict(), "generation": job.generation}
        found = _read(folder / "job.json")
        if not found:
            uid = str(uuid.uuid4())
            found = {**identity, "spec_digest": job.spec.digest, "store_uri": job.store_uri, "uid": uid}
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
            ENV_PROCESS_FILE: str(folder / "process.json"),
            contract.ENV_GRACE: str(self._config.grace_s),
            ENV_TRAINER_LOCK: str(folder.parent / "trainer.lock"),
        }
        log_flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        lock = os.open(folder / "alive.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # From here on it counts as started, whoever dies: the lock is held, then released by the kernel.
            write_json(folder / "process.json", {"boot": boot_id(), "host": socket.gethostname(), "at": time.time()})
            os.posix_spawn(
                sys.executable,
                [sys.executable, "-m", "airflow_gpu_burst.cli", "run", "--", *job.spec.command],
                env,
                setsid=True,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (
                        os.POSIX_SPAWN_OPEN,
                        1,
                        str(folder / "runtime.log"),
                        log_flags,
                        0o600,
                    ),
                    (os.POSIX_SPAWN_DUP2, 1, 2),
                    # Only this child gets the lock: an inheritable descriptor would go to whatever another thread
                    # starts at the same time, and the run would never look dead.
                    (os.POSIX_SPAWN_DUP2, lock, _another(lock)),
                ],
                # A worker that was asked to end must not pass its blocked or ignored signals on.
                setsigmask=[],
                setsigdef=[signal.SIGTERM, signal.SIGINT, signal.SIGPIPE],
            )
        finally:
            os.close(lock)

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
        if process and process.get("boot") != boot_id():
            return Observation(phase=Phase.LOST, reason="Rebooted", message="the machine was restarted during the run")
        if not process:
            return Observation(phase=Phase.SUBMITTED)
        return Observation(
            phase=Phase.FAILED,
            reason="Killed",
            message="the runtime was killed without a last word; the machine may be out of memory (see `dmesg`)",
        )


class LocalLive:
    """A process of this machine: whoever looks asks the kernel, which costs nothing."""

    pushes = False

    def __init__(self, route: LocalRoute, handle: Handle) -> None:
        self._route, self._handle = route, handle

    def observe(self) -> Observation:
        """Alive by its lock, or its last word."""
        return self._route.observe(self._handle)

    def output(self) -> list[Piece]:
        """Nothing: the spool has it."""
        return []

    def reading(self) -> bool:
        """Never."""
        return False

    def notes(self) -> list[str]:
        """Nothing happens to a process that its phase does not say."""
        return []

    def close(self) -> None:
        """Nothing to close."""


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
    except PermissionError as error:
        raise _not_ours(folder / "alive.lock") from error
    try:
        # Shared: two lookers never take each other for the runtime, which holds it exclusively.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _another(descriptor: int) -> int:
    """A number that is not this one: duplicating a descriptor onto itself would leave it closed on exec."""
    return 100 if descriptor != 100 else 101


def _wait_pid(folder: Path, timeout_s: float = 10.0) -> Mapping[str, Any]:
    """`process.json` once the runtime has written its pid, a moment after its start."""
    deadline = time.monotonic() + timeout_s
    while "pid" not in (process := _read(folder / "process.json")):
        if not _alive(folder) or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return process


def _wait_dead(folder: Path, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while _alive(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _read(path: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except PermissionError as error:
        raise _not_ours(path) from error
    except ValueError as error:
        raise RouteError(f"{path} is damaged ({error}). End what runs there, then delete {path.parent}") from error
    if not isinstance(data, dict):
        raise RouteError(f"{path} is damaged. End what runs there, then delete {path.parent}")
    return data


def _last_word(folder: Path) -> Mapping[str, Any]:
    """`exit.json`; a damaged one is none."""
    try:
        word = _read(folder / "exit.json")
        return {"code": int(word["code"]), "at": float(word["at"]), **word} if word else {}
    except (RouteError, KeyError, TypeError, ValueError):
        return {}


def _not_ours(path: Path) -> RouteError:
    return RouteError(
        f"{path} belongs to another user. The local route needs Airflow's worker and triggerer to run as the same user"
    )
