"""
`gpu-burst run -- CMD`: the process of the pod, from its environment to its exit code.

read the contract → `training` (verify pins → join the run log → restore → train → flush → publish → finish).
Whatever happens ends in one exit code and one last word.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from airflow_gpu_burst import contract
from airflow_gpu_burst.contract import PodContext
from airflow_gpu_burst.errors import ContractError, ExitCode, GpuBurstError, RunFailed
from airflow_gpu_burst.runtime.orphans import ENV_TRAINER_LOCK, end_workspace
from airflow_gpu_burst.runtime.output import ENDED, Output, Spooler, chunk_key, end_key, stream_name, stream_prefix
from airflow_gpu_burst.runtime.process import start_ticks
from airflow_gpu_burst.runtime.scratch import PodFolder
from airflow_gpu_burst.runtime.start import ENV_PROCESS_FILE, Identity, Pod, Stop
from airflow_gpu_burst.runtime.training import train
from airflow_gpu_burst.runtime.workspace import Workspace, write_json
from airflow_gpu_burst.store import Store, StoreConfig, open_store

ENV_KEEP_SCRATCH = "GPU_BURST_KEEP_SCRATCH"
"""Set to keep the scratch folder after the run, to look at what a trainer left."""


def run(command: Sequence[str], env: Mapping[str, str]) -> ExitCode:
    """
    Run one trainer to its end. Never raises; the exit code and the termination file tell.

    :param command: the trainer's argv.
    :param env: the environment that carries the contract, see `airflow_gpu_burst.contract`.
    """
    stop = Stop()
    before = {s: signal.signal(s, stop.on_signal) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        word = _run(command, env, stop)
        _leave(env, word)
        return word.code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Word:
    """The last one of a run."""

    code: ExitCode
    reason: str
    message: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        # A kubelet takes at most 4096 bytes of a termination message.
        return {"code": int(self.code), "reason": self.reason, "message": self.message[:3000]}

    @classmethod
    def of(cls, error: Exception) -> Self:
        """What an error of the run leaves behind."""
        if not isinstance(error, GpuBurstError):
            return cls(ExitCode.UNCATEGORISED, type(error).__name__, f"{type(error).__name__}: {error}")
        reason = error.reason if isinstance(error, RunFailed) and error.reason else type(error).__name__
        return cls(error.exit_code, reason, str(error))


def load_context(env: Mapping[str, str], store: Store) -> PodContext:
    """
    The context that the environment names.

    :raises ContractError: not this version, or not what was submitted.
    """
    data = store.get(_required(env, contract.ENV_CONTEXT))
    return PodContext.from_bytes(data, _required(env, contract.ENV_CONTEXT_SHA256))


def _run(command: Sequence[str], env: Mapping[str, str], stop: Stop) -> Word:
    began = time.monotonic()
    try:
        _announce(env)
        identity = _identity(env)
        store = open_store(StoreConfig.from_env(env))
        context = load_context(env, store)
        if identity.rank >= context.world_size:
            raise ContractError(
                f"{contract.ENV_RANK}={identity.rank} in a world of {context.world_size}: ranks count from 0; the "
                "object has more pods than the request has nodes, submit again"
            )
        with _scratch(env, identity) as root:
            workspace = Workspace(root)
            if ENV_TRAINER_LOCK not in env:
                # What outlived its runtime in this pod would go on saving into what is this start's now.
                end_workspace(root)
            workspace.prepare()
            stream = stream_name(identity.rank, identity.nonce)
            output = Output(
                workspace.output_file, sys.stdout.buffer, contract.header(stream, identity.rank, context.world_size)
            )
            pod = Pod(
                command=command,
                env=env,
                context=context,
                identity=identity,
                store=store,
                workspace=workspace,
                output=output,
                stop=stop,
                began=began,
            )
            return _spooled(pod, f"{stream_prefix(context.prefix, context.generation)}{stream}")
    except Exception as error:  # the border of the process: anything must become a last word
        if not isinstance(error, GpuBurstError):
            traceback.print_exc()
        word = Word.of(error)
        os.write(2, f"gpu-burst: {word.reason}: {word.message}\n".encode(errors="backslashreplace"))
        return word


def _spooled(pod: Pod, stream: str) -> Word:
    """Train, with everything that is said in the spool and on stdout, the last word included."""
    write_json(pod.workspace.spool_file, stream)
    spooler = Spooler(pod.store, pod.workspace.output_file, lambda offset: chunk_key(stream, offset))
    spooler.start()
    with pod.output.capture_stderr():
        try:
            train(pod)
            word = Word(ExitCode.OK, "Succeeded")
        except Exception as error:
            if not isinstance(error, GpuBurstError):
                traceback.print_exc()
            word = Word.of(error)
            pod.output.say(f"{type(error).__name__}: {error}")
            _note_end(pod, stream, word)
    # What the store does not take stays in the scratch folder, for whoever concludes the run.
    if spooler.finish():
        pod.workspace.spool_file.unlink(missing_ok=True)
    pod.output.close()
    return word


def _note_end(pod: Pod, stream: str, word: Word) -> None:
    """
    Whoever follows the log finds the word in the store, two seconds before the cluster tells of it; the line says when
    to look, since anybody can print a line.
    """
    with suppress(GpuBurstError):  # the cluster tells as well
        pod.store.put(end_key(stream), json.dumps(word.to_dict()).encode())
    pod.output.say(f"{ENDED} {int(word.code)} ({word.reason})")


def _identity(env: Mapping[str, str]) -> Identity:
    owner = _required(env, contract.ENV_OWNER)
    rank = env.get(contract.ENV_RANK) or "0"
    if not rank.isdecimal():
        raise ContractError(f"{contract.ENV_RANK}={rank!r} is no number: the route sets it; submit again")
    return Identity(owner=owner, pod_uid=env.get(contract.ENV_POD_UID) or owner, rank=int(rank), nonce=uuid.uuid4().hex)


@contextmanager
def _scratch(env: Mapping[str, str], identity: Identity) -> Iterator[Path]:
    """
    The folder that this start works in; gone afterwards, unless it holds output that the store did not take.

    The local route names a folder that is the run's own, and looks into it. Any other scratch folder may be shared with
    other pods of the node.
    """
    named = env.get(contract.ENV_SCRATCH)
    folder = None
    if named and ENV_PROCESS_FILE in env:
        root = Path(named)
    else:
        folder = PodFolder(Path(named or Path(tempfile.gettempdir()) / "gpu-burst"), identity.pod_uid)
        root = folder.path
    try:
        yield root
    finally:
        unsent = Workspace(root).spool_file.exists()
        if folder:
            folder.close(keep=bool(env.get(ENV_KEEP_SCRATCH)), unsent=unsent)
        elif not unsent and not env.get(ENV_KEEP_SCRATCH):
            shutil.rmtree(root, ignore_errors=True)


def _announce(env: Mapping[str, str]) -> None:
    path = env.get(ENV_PROCESS_FILE)
    if path:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        write_json(Path(path), {**found, "pid": os.getpid(), "ticks": start_ticks(os.getpid())})


def _leave(env: Mapping[str, str], word: Word) -> None:
    path = env.get(contract.ENV_TERMINATION_FILE)
    if not path:
        return
    values = {**word.to_dict(), "at": time.time()}
    try:
        write_json(Path(path), values)
    except OSError:  # on a full disk the exit code remains
        # A kubelet mounts this file into the container: nothing can be renamed over it.
        with suppress(OSError):
            Path(path).write_text(json.dumps(values), encoding="utf-8")


def _required(env: Mapping[str, str], name: str) -> str:
    try:
        return env[name]
    except KeyError:
        raise ContractError(
            f"{name} is not set: `gpu-burst run` is started by a route, which sets it. Submit through GpuJobOperator"
        ) from None
