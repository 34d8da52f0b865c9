"""One start of the trainer: verify pins → join the run log → restore → train → flush → publish → finish."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from airflow_gpu_burst import contract
from airflow_gpu_burst.checkpoint import save_bytes, save_tree
from airflow_gpu_burst.contract import Artifact, PodContext, PodResult
from airflow_gpu_burst.errors import CheckpointError, ExitCode, Fenced, GpuBurstError, RunFailed, SpecError
from airflow_gpu_burst.runlog import Epoch, Member, RunLog, begin
from airflow_gpu_burst.runtime.orphans import ENV_TRAINER_LOCK, TrainerLock, end_trainers
from airflow_gpu_burst.runtime.output import Output
from airflow_gpu_burst.runtime.process import TrainerProcess, describe_exit
from airflow_gpu_burst.runtime.publication import model_version, publish
from airflow_gpu_burst.runtime.uploads import Uploader, restore
from airflow_gpu_burst.runtime.workspace import ENV_WORKSPACE, Workspace, write_json
from airflow_gpu_burst.store import Store

FENCE_POLL_S = 2.0
"""How often the log is read for a successor: one small GET."""
FLUSH_S = 600.0
"""How long the last checkpoint may take after the trainer's end."""


class Terminated(RunFailed):
    """The runtime was told to end (preempted, drained, cancelled)."""

    exit_code = ExitCode.RETRY_MAY_HELP


@dataclass(frozen=True, kw_only=True)
class Identity:
    """
    Who this pod is.

    :param nonce: of this boot: a restarted container keeps its pod's UID.
    """

    owner: str
    pod_uid: str
    rank: int
    nonce: str


@dataclass
class Stop:
    """Why the trainer must end, set from signal handlers and threads; the first reason counts."""

    reason: GpuBurstError | None = None
    event: threading.Event = field(default_factory=threading.Event)

    def because(self, reason: GpuBurstError) -> None:
        """Ask the main loop to end the trainer."""
        if self.reason is None:
            self.reason = reason
        self.event.set()

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """SIGTERM and SIGINT: what a kubelet, a host or a person sends."""
        name = signal.Signals(number).name
        self.because(Terminated(f"the run was told to end ({name})", reason="Terminated"))


@dataclass(frozen=True, kw_only=True)
class Pod:
    """
    Everything that one start works with.

    :param began: monotonic seconds of the process's start.
    """

    command: Sequence[str]
    env: Mapping[str, str]
    context: PodContext
    identity: Identity
    store: Store
    workspace: Workspace
    output: Output
    stop: Stop
    began: float

    @property
    def grace_s(self) -> float:
        """Seconds between SIGTERM and SIGKILL for the trainer."""
        return float(self.env.get(contract.ENV_GRACE) or 30)


def train(pod: Pod) -> None:
    """
    Until the run has its result.

    :raises GpuBurstError: it has none; the class says why and whether a retry may help.
    """
    _verify_pins(pod)
    context, identity = pod.context, pod.identity
    epoch = begin(
        RunLog(pod.store, context.prefix),
        generation=context.generation,
        member=Member(owner=identity.owner, rank=identity.rank, pod_uid=identity.pod_uid, nonce=identity.nonce),
        world_size=context.world_size,
        deadline_s=context.join_deadline_s,
        restore=context.checkpoint is not None,
    )
    # Only now: this is the present epoch, so whatever trainer there is belongs to one that is over.
    lock = _trainer_lock(pod)
    epoch, step = restore(pod.store, epoch, pod.workspace.restored, pod.output)
    where = "from the beginning" if step is None else f"from checkpoint {step}"
    pod.output.say(f"training starts {where} (generation {context.generation}, log record {epoch.number})")
    _write_trainer_file(pod, epoch, step)
    uploader = Uploader(
        store=pod.store,
        workspace=pod.workspace,
        epoch=epoch,
        keep=context.checkpoint.keep if context.checkpoint else 2,
        output=pod.output,
    )
    uploader.step = step
    trainer = TrainerProcess(
        pod.command,
        cwd=Path(context.working_dir) if context.working_dir else pod.workspace.root,
        env={**pod.env, **context.env, **_variables(pod, step)},
        output=pod.output,
        pass_fds=[lock.fd] if lock else [],
    )
    write_json(pod.workspace.started_file, {"pid": trainer.pid, "at": time.time()})
    uploader.start()
    try:
        _watch(pod, trainer, epoch, uploader)
    finally:
        trainer.close()
        if lock:
            end_trainers(lock.path, identity.owner)
        uploader.finish(pod.grace_s if pod.stop.reason else FLUSH_S)
    _finish(pod, epoch, uploader.step)


def _verify_pins(pod: Pod) -> None:
    if not pod.context.inputs:
        return
    from airflow_gpu_burst.lake.catalog import CatalogConfig
    from airflow_gpu_burst.lake.pins import verify

    secrets = json.loads(pod.env.get(contract.ENV_CATALOG_SECRETS) or "{}")
    for pin in pod.context.inputs.values():
        config = CatalogConfig(
            name=pin.catalog,
            properties=pod.context.catalogs.get(pin.catalog, {}),
            secrets=secrets.get(pin.catalog, {}),
        )
        verify(config, pin)


def _trainer_lock(pod: Pod) -> TrainerLock | None:
    path = pod.env.get(ENV_TRAINER_LOCK)
    if not path:
        return None
    lock = TrainerLock(Path(path))
    if lock.acquire():
        pod.output.say("a trainer that an earlier start left behind was ended")
    return lock


def _variables(pod: Pod, step: int | None) -> dict[str, str]:
    """What a trainer that is no Python finds in its environment; `context()` has the same and more."""
    variables = {
        ENV_WORKSPACE: str(pod.workspace.root),
        "GPU_BURST_MODEL_DIR": str(pod.workspace.model),
        "GPU_BURST_RESULT_FILE": str(pod.workspace.result_file),
        "GPU_BURST_PARAMS": json.dumps(dict(pod.context.params)),
        "RANK": str(pod.identity.rank),
        "WORLD_SIZE": str(pod.context.world_size),
    }
    if step is not None:
        variables |= {"GPU_BURST_RESTORED_DIR": str(pod.workspace.restored), "GPU_BURST_RESTORED_STEP": str(step)}
    for name, pin in pod.context.inputs.items():
        variables |= {
            f"GPU_BURST_INPUT_{name.upper()}_TABLE": pin.table,
            f"GPU_BURST_INPUT_{name.upper()}_SNAPSHOT_ID": pin.snapshot_id,
        }
    return variables


def _write_trainer_file(pod: Pod, epoch: Epoch, step: int | None) -> None:
    context = pod.context
    write_json(
        pod.workspace.trainer_file,
        {
            "params": dict(context.params),
            "inputs": {name: pin.to_dict() for name, pin in context.inputs.items()},
            "catalogs": {name: dict(values) for name, values in context.catalogs.items()},
            "rank": pod.identity.rank,
            "world_size": context.world_size,
            "restored_step": step,
            "run": {**context.run_key.to_dict(), "generation": context.generation, "epoch": epoch.number},
        },
    )


def _watch(pod: Pod, trainer: TrainerProcess, epoch: Epoch, uploader: Uploader) -> None:
    """
    Until the trainer exits with 0.

    :raises GpuBurstError: it failed, or had to be ended.
    """
    stop, run_s = pod.stop, pod.context.run_s
    deadline = None if run_s is None else time.monotonic() + run_s
    fence = threading.Thread(target=_poll_fence, args=(epoch, stop), name="gpu-burst-fence", daemon=True)
    fence.start()
    while (status := trainer.wait(0.1)) is None:
        if uploader.error is not None:
            stop.because(uploader.error)
        elif not uploader.is_alive():
            stop.because(CheckpointError("the upload of checkpoints ended unexpectedly; see the run's output"))
        if deadline is not None and time.monotonic() > deadline:
            stop.because(RunFailed(f"the run timeout of {run_s:.0f} s has passed", reason="RunTimeout"))
        if stop.reason is not None:
            # Fenced: a successor trains already, every second of ours is waste.
            trainer.end(1.0 if isinstance(stop.reason, Fenced) else pod.grace_s)
            raise stop.reason
    if stop.reason is not None:
        raise stop.reason
    stop.event.set()
    if status != 0:
        raise RunFailed(
            f"the trainer {describe_exit(status)}", code=int(ExitCode.TRAINER_FAILED), reason="TrainerFailed"
        )


def _poll_fence(epoch: Epoch, stop: Stop) -> None:
    while not stop.event.wait(FENCE_POLL_S):
        try:
            epoch.check()
        except Fenced as error:
            stop.because(error)
        except Exception:
            continue  # cannot tell; the next look may


def _check_result(data: bytes) -> None:
    try:
        json.loads(data)
    except ValueError as error:
        raise SpecError(f"the trainer's result is no JSON ({error}); write it with context().result(...)") from error


def _finish(pod: Pod, epoch: Epoch, step: int | None) -> None:
    """The trainer is done: what it made becomes the run's one result."""
    context, store, workspace = pod.context, pod.store, pod.workspace
    result = model = None
    if workspace.result_file.is_file():
        data = workspace.result_file.read_bytes()
        _check_result(data)
        saved = save_bytes(store, data, f"{epoch.data_prefix}/result", "result.json")
        result = Artifact(key=saved.key, sha256=saved.sha256)
    if context.publish:
        if not any(workspace.model.iterdir()):
            raise SpecError(
                f"publish={context.publish!r}, but the trainer left no file in context().model_dir; "
                "write the model there, or drop publish"
            )
        tree = save_tree(store, workspace.model, f"{epoch.data_prefix}/model")
        model = Artifact(key=tree.key, sha256=tree.sha256)
    pod_result = PodResult(
        seconds=round(time.monotonic() - pod.began, 3),
        result=result,
        model=model,
        model_name=context.publish if model else "",
        model_version=model_version(context.run_key, context.generation) if model else "",
        step=step,
    )
    epoch.finish(pod_result.to_dict(), (model.key, model.sha256) if model else None)
    key = publish(store, context.run_key, context.generation, pod_result)
    pod.output.say(f"finished in {pod_result.seconds:.1f} s" + (f", model published as {key}" if key else ""))
