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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from airflow_gpu_burst import contract
from airflow_gpu_burst.contract import PodContext
from airflow_gpu_burst.errors import ContractError, ExitCode, GpuBurstError, RunFailed
from airflow_gpu_burst.runtime.output import Output, Spooler, chunk_key, stream_prefix
from airflow_gpu_burst.runtime.process import start_ticks
from airflow_gpu_burst.runtime.training import Identity, Pod, Stop, train
from airflow_gpu_burst.runtime.workspace import Workspace, write_json
from airflow_gpu_burst.store import Store, StoreConfig, open_store

ENV_PROCESS_FILE = "GPU_BURST_PROCESS_FILE"
"""Set by the local route: where the runtime says which process it is."""
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
        _announce(env)
        _run(command, env, stop)
        return _last_word(env, ExitCode.OK, "Succeeded", "")
    except GpuBurstError as error:
        reason = error.reason if isinstance(error, RunFailed) and error.reason else type(error).__name__
        return _last_word(env, error.exit_code, reason, str(error))
    except Exception as error:  # the border of the process: anything must become a last word
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
    identity = Identity(
        owner=(owner := _required(env, contract.ENV_OWNER)),
        pod_uid=env.get(contract.ENV_POD_UID) or owner,
        rank=int(env.get(contract.ENV_RANK) or 0),
        nonce=uuid.uuid4().hex,
    )
    store = open_store(StoreConfig.from_env(env))
    context = load_context(env, store)
    if context.world_size != 1:
        raise ContractError(f"world_size={context.world_size}: this release trains on one rank; ask for one node")
    workspace = Workspace(Path(env.get(contract.ENV_SCRATCH) or tempfile.mkdtemp(prefix="gpu-burst-")))
    workspace.root.mkdir(parents=True, exist_ok=True)
    workspace.prepare()
    output = Output(workspace.output_file, sys.stdout.buffer)
    stream = _stream(context, identity)
    write_json(workspace.spool_file, stream)
    spooler = Spooler(store, workspace.output_file, lambda offset: chunk_key(stream, offset))
    spooler.start()
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
    try:
        train(pod)
    except GpuBurstError as error:
        output.say(f"{type(error).__name__}: {error}")
        raise
    finally:
        spooled = spooler.finish()
        output.close()
        # What the store did not take is left for whoever concludes the run.
        if spooled and not env.get(ENV_KEEP_SCRATCH):
            shutil.rmtree(workspace.root, ignore_errors=True)


def _stream(context: PodContext, identity: Identity) -> str:
    name = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{identity.rank:05d}-{identity.nonce[:8]}"
    return f"{stream_prefix(context.prefix, context.generation)}{name}"


def _announce(env: Mapping[str, str]) -> None:
    path = env.get(ENV_PROCESS_FILE)
    if path:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        write_json(Path(path), {**found, "pid": os.getpid(), "ticks": start_ticks(os.getpid())})


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
