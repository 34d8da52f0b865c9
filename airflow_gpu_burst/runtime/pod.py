"""
`gpu-burst run -- CMD`: one start of the trainer, from contract to result.

read the contract → verify pins → join the run log → restore → train (checkpoints go up meanwhile) → flush →
publish → finish. Whatever happens ends in one exit code and one last word.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from airflow_gpu_burst import contract
from airflow_gpu_burst.checkpoint import save_bytes, save_tree
from airflow_gpu_burst.contract import Artifact, PodContext, PodResult
from airflow_gpu_burst.errors import ContractError, ExitCode, Fenced, GpuBurstError, RunFailed, SpecError
from airflow_gpu_burst.runlog import Epoch, Member, RunLog, begin
from airflow_gpu_burst.runtime.orphans import TrainerLock
from airflow_gpu_burst.runtime.output import Output, Spooler, chunk_key
from airflow_gpu_burst.runtime.process import TrainerProcess, describe_exit
from airflow_gpu_burst.runtime.publication import model_version, publish
from airflow_gpu_burst.runtime.uploads import Uploader, restore
from airflow_gpu_burst.runtime.workspace import ENV_WORKSPACE, Workspace, write_json
from airflow_gpu_burst.store import Store, StoreConfig, open_store

ENV_TRAINER_LOCK = "GPU_BURST_TRAINER_LOCK"
"""Set by the local route: the file whose lock tells that a trainer of this run key lives."""

ENV_KEEP_SCRATCH = "GPU_BURST_KEEP_SCRATCH"
"""Set to keep the scratch folder after the run, to look at what a trainer left."""

FENCE_POLL_S = 2.0
"""How often the log is read for a successor: one small GET."""
FLUSH_S = 600.0
"""How long the last checkpoint may take after the trainer's end."""


class Terminated(RunFailed):
    """The runtime was told to end (preempted, drained, cancelled)."""

    exit_code = ExitCode.RETRY_MAY_HELP


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Who this pod is, from its environment."""

    owner: str
    pod_uid: str
    rank: int
    grace_s: float

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Identity:
        """Defaults fit a single pod."""
        owner = _required(env, contract.ENV_OWNER)
        return cls(
            owner=owner,
            pod_uid=env.get(contract.ENV_POD_UID) or owner,
            rank=int(env.get(contract.ENV_RANK) or 0),
            grace_s=float(env.get(contract.ENV_GRACE) or 30),
        )


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


def run(command: Sequence[str], env: Mapping[str, str]) -> ExitCode:
    """
    Run one trainer to its end. Never raises; the exit code and the termination file tell.

    :param command: the trainer's argv.
    :param env: the environment that carries the contract, see `airflow_gpu_burst.contract`.
    """
    stop = Stop()
    before = {s: signal.signal(s, stop.on_signal) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        _run(command, env, stop)
        return _last_word(env, ExitCode.OK, "Succeeded", "")
    except GpuBurstError as error:
        reason = error.reason if isinstance(error, RunFailed) and error.reason else type(error).__name__
        return _last_word(env, error.exit_code, reason, str(error))
    except Exception as error:  # the border of the process: anything must become a last word
        import traceback

        traceback.print_exc()
        return _last_word(env, ExitCode.UNCATEGORISED, type(error).__name__, f"{type(error).__name__}: {error}")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def load_context(env: Mapping[str, str], store: Store) -> PodContext:
    """
    The context that the environment names.

    :raises ContractError: not this version, or not what was submitted.
    """
    data = store.get(_required(env, contract.ENV_CONTEXT))
    return PodContext.from_bytes(data, _required(env, contract.ENV_CONTEXT_SHA256))


def _run(command: Sequence[str], env: Mapping[str, str], stop: Stop) -> None:
    began = time.monotonic()
    identity = Identity.from_env(env)
    store = open_store(StoreConfig.from_env(env))
    context = load_context(env, store)
    if context.world_size != 1:
        raise ContractError(f"world_size={context.world_size}: this release trains on one rank; ask for one node")
    workspace = Workspace(Path(env.get(contract.ENV_SCRATCH) or tempfile.mkdtemp(prefix="gpu-burst-")))
    workspace.root.mkdir(parents=True, exist_ok=True)
    workspace.prepare()
    nonce = uuid.uuid4().hex
    with ExitStack() as closing:
        output = Output(workspace.output_file, sys.stdout.buffer)
        if not env.get(ENV_KEEP_SCRATCH):
            closing.callback(shutil.rmtree, workspace.root, ignore_errors=True)
        closing.callback(output.close)
        stream = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{identity.rank:05d}-{nonce[:8]}"
        spooler = Spooler(
            store,
            workspace.output_file,
            lambda offset: chunk_key(context.prefix, context.generation, stream, offset),
        )
        spooler.start()
        closing.callback(spooler.finish)
        try:
            _train(command, env, context, identity, nonce, store, workspace, output, stop, began)
        except GpuBurstError as error:
            output.say(f"{type(error).__name__}: {error}")
            raise


def _train(
    command: Sequence[str],
    env: Mapping[str, str],
    context: PodContext,
    identity: Identity,
    nonce: str,
    store: Store,
    workspace: Workspace,
    output: Output,
    stop: Stop,
    began: float,
) -> None:
    _verify_pins(context, env)
    lock = _trainer_lock(env, output)
    log = RunLog(store, context.prefix)
    member = Member(owner=identity.owner, rank=identity.rank, pod_uid=identity.pod_uid, nonce=nonce)
    epoch = begin(
        log,
        generation=context.generation,
        member=member,
        world_size=context.world_size,
        deadline_s=context.join_deadline_s,
        restore=context.checkpoint is not None,
    )
    epoch, step = restore(store, epoch, workspace.restored, output)
    output.say(
        f"epoch {epoch.number} of generation {context.generation} starts" + ("" if step else " from the beginning")
    )
    _write_trainer_file(context, identity, epoch, step, workspace)
    uploader = Uploader(
        store=store,
        workspace=workspace,
        epoch=epoch,
        keep=context.checkpoint.keep if context.checkpoint else 2,
        output=output,
    )
    uploader.step = step
    trainer = TrainerProcess(
        command,
        cwd=Path(context.working_dir) if context.working_dir else workspace.root,
        env={**env, **context.env, ENV_WORKSPACE: str(workspace.root)},
        output=output,
        pass_fds=[lock.fd] if lock else [],
    )
    if lock:
        lock.record(trainer.pid, identity.owner)
    uploader.start()
    try:
        _watch(trainer, epoch, uploader, stop, context.run_s, identity.grace_s)
    finally:
        trainer.close()
        uploader.finish(identity.grace_s if stop.reason else FLUSH_S)
    _finish(context, store, workspace, epoch, uploader, output, began)


def _verify_pins(context: PodContext, env: Mapping[str, str]) -> None:
    if not context.inputs:
        return
    from airflow_gpu_burst.lake.catalog import CatalogConfig
    from airflow_gpu_burst.lake.pins import verify

    secrets = json.loads(env.get(contract.ENV_CATALOG_SECRETS) or "{}")
    for pin in context.inputs.values():
        config = CatalogConfig(
            name=pin.catalog,
            properties=context.catalogs.get(pin.catalog, {}),
            secrets=secrets.get(pin.catalog, {}),
        )
        verify(config, pin)


def _trainer_lock(env: Mapping[str, str], output: Output) -> TrainerLock | None:
    path = env.get(ENV_TRAINER_LOCK)
    if not path:
        return None
    lock = TrainerLock(Path(path))
    if lock.acquire():
        output.say("a trainer that an earlier start left behind was ended")
    return lock


def _write_trainer_file(
    context: PodContext, identity: Identity, epoch: Epoch, step: int | None, workspace: Workspace
) -> None:
    write_json(
        workspace.trainer_file,
        {
            "params": dict(context.params),
            "inputs": {name: pin.to_dict() for name, pin in context.inputs.items()},
            "catalogs": {name: dict(values) for name, values in context.catalogs.items()},
            "rank": identity.rank,
            "world_size": context.world_size,
            "restored_step": step,
            "run": {**context.run_key.to_dict(), "generation": context.generation, "epoch": epoch.number},
        },
    )


def _watch(
    trainer: TrainerProcess, epoch: Epoch, uploader: Uploader, stop: Stop, run_s: float | None, grace_s: float
) -> None:
    """
    Until the trainer exits with 0.

    :raises GpuBurstError: it failed, or had to be ended.
    """
    deadline = None if run_s is None else time.monotonic() + run_s
    fence = threading.Thread(target=_poll_fence, args=(epoch, stop), name="gpu-burst-fence", daemon=True)
    fence.start()
    while (status := trainer.wait(0.1)) is None:
        if uploader.error is not None:
            stop.because(uploader.error)
        if deadline is not None and time.monotonic() > deadline:
            stop.because(RunFailed(f"the run timeout of {run_s:.0f} s has passed", reason="RunTimeout"))
        if stop.reason is not None:
            # Fenced: a successor trains already, every second of ours is waste.
            trainer.end(1.0 if isinstance(stop.reason, Fenced) else grace_s)
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
        except GpuBurstError:
            continue  # cannot tell; the next look may


def _finish(
    context: PodContext,
    store: Store,
    workspace: Workspace,
    epoch: Epoch,
    uploader: Uploader,
    output: Output,
    began: float,
) -> None:
    """The trainer is done: what it made becomes the run's one result."""
    result = model = None
    if workspace.result_file.is_file():
        data = workspace.result_file.read_bytes()
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
        seconds=round(time.monotonic() - began, 3),
        result=result,
        model=model,
        model_name=context.publish if model else "",
        model_version=model_version(context.run_key, context.generation) if model else "",
        step=uploader.step,
    )
    epoch.finish(pod_result.to_dict(), (model.key, model.sha256) if model else None)
    key = publish(store, context.run_key, context.generation, pod_result)
    output.say(f"finished in {pod_result.seconds:.1f} s" + (f", model published as {key}" if key else ""))


def _last_word(env: Mapping[str, str], code: ExitCode, reason: str, message: str) -> ExitCode:
    path = env.get(contract.ENV_TERMINATION_FILE)
    if path:
        # A kubelet takes at most 4096 bytes of a termination message. On a full disk the exit code remains.
        with suppress(OSError):
            write_json(
                Path(path),
                {"code": int(code), "reason": reason, "message": message[:3000], "at": time.time()},
            )
    if message:
        os.write(2, f"gpu-burst: {reason}: {message}\n".encode())
    return code


def _required(env: Mapping[str, str], name: str) -> str:
    try:
        return env[name]
    except KeyError:
        raise ContractError(
            f"{name} is not set: `gpu-burst run` is started by a route, which sets it. Submit through GpuJobOperator"
        ) from None
