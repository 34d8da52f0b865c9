"""
From the pins to the result: verify pins → join the run log → restore → train → flush → publish → finish.

With several ranks all do the same, each for its part. Rank 0 alone writes to the log, and it finishes the run once the
trainers of all ranks have exited with 0. The others wait for that: a rank that is replaced before needs them again.
When one is, every rank ends its trainer, restores the last checkpoint and starts anew, in the same process (`Renamed`).
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from airflow_gpu_burst import contract
from airflow_gpu_burst.errors import GpuBurstError, Renamed
from airflow_gpu_burst.runlog import Epoch, Member, RunLog, begin
from airflow_gpu_burst.runtime.finishing import finish
from airflow_gpu_burst.runtime.keeping import forget_copies
from airflow_gpu_burst.runtime.kit import Kit, agent_of
from airflow_gpu_burst.runtime.orphans import ENV_TRAINER_LOCK, TrainerLock, end_trainers, end_workspace
from airflow_gpu_burst.runtime.peers import Peers
from airflow_gpu_burst.runtime.process import TrainerProcess, describe_exit
from airflow_gpu_burst.runtime.rendezvous import await_name
from airflow_gpu_burst.runtime.start import Pod
from airflow_gpu_burst.runtime.supervision import Fence, Watch
from airflow_gpu_burst.runtime.told import environment, write_trainer_file
from airflow_gpu_burst.runtime.totals import Totals
from airflow_gpu_burst.runtime.workspace import write_json

FLUSH_S = 600.0
"""How long the last checkpoint may stand still after the trainer's end. It is waited for as long as it moves."""


def train(pod: Pod) -> None:
    """
    Until the run has its result.

    :raises GpuBurstError: it has none; the class says why and whether a retry may help.
    """
    _verify_pins(pod)
    context, identity = pod.context, pod.identity
    log = RunLog(pod.store, context.prefix)
    epoch = begin(
        log,
        generation=context.generation,
        member=Member(owner=identity.owner, rank=identity.rank, pod_uid=identity.pod_uid, nonce=identity.nonce),
        world_size=context.world_size,
        deadline_s=context.join_deadline_s,
        restore=context.checkpoint is not None,
        sleep=pod.stop.sleep,
    )
    # Only now: this is the present epoch, so whatever trainer there is belongs to one that is over.
    kit = Kit(pod=pod, log=log, agent=agent_of(pod), totals=Totals(), lock=_trainer_lock(pod))
    first_start: float | None = None
    try:
        while True:
            try:
                epoch, step = kit.restore(epoch)
                pod.stop.check()
                first_start = first_start or time.monotonic()
                _train_in(kit, epoch, step, first_start)
                return
            except Renamed as news:
                pod.output.say(f"training is interrupted: {news}")
                kit.totals.stalled(pod.workspace.stalls())
                epoch = epoch.restart()
                pod.workspace.prepare()
    finally:
        kit.agent.close()


def _train_in(kit: Kit, epoch: Epoch, step: int | None, start: float) -> None:
    """
    One epoch, to the end of the run.

    :raises Renamed: to the end of the epoch only.
    """
    pod, lock = kit.pod, kit.lock
    context = pod.context
    where = "from the beginning" if step is None else f"from checkpoint {step}"
    pod.output.say(f"training starts {where} (generation {context.generation}, log record {epoch.number})")
    write_trainer_file(pod, epoch, step)
    peers = Peers(pod.store, epoch, context.world_size)
    keeping = kit.keeping(epoch)
    uploader = kit.uploader(epoch, peers, keeping)
    uploader.step = step
    fence = Fence(epoch, pod.stop)
    watch = Watch(stop=pod.stop, fence=fence, uploader=uploader, run_s=context.run_s, first_start=start)
    if context.checkpoint is not None:
        kit.agent.start()
    trainer = _start_trainer(pod, step, lock)
    uploader.start()
    fence.start()
    try:
        try:
            _run_trainer(pod, trainer, watch, peers, lock)
            _await_others(pod, watch, peers)
        except Renamed:
            uploader.abandon()
            raise
        except BaseException:
            hurry = pod.stop.reason is not None
            uploader.finish(pod.grace_s if hurry else FLUSH_S, peers_s=pod.grace_s, hurry=hurry)
            if context.world_size > 1:
                with suppress(GpuBurstError):  # it says less than what is raised
                    peers.flushed(succeeded=False)
            raise
        uploader.finish(FLUSH_S, hurry=False)
        if uploader.error is not None:
            raise uploader.error
        kit.totals.stalled(pod.workspace.stalls())
        if pod.leads:
            keeping.finish()
            finish(kit, epoch, uploader.step)
        else:
            _await_result(pod, watch, peers, kit.log)
        forget_copies(pod.kept, context.run_key)
    finally:
        fence.end()
        keeping.close()


def _await_others(pod: Pod, watch: Watch, peers: Peers) -> None:
    """On rank 0: until the other ranks have ended well, and all their parts of checkpoints are in the store."""
    if pod.leads and pod.others:
        pod.output.say("the trainer is done on rank 0, waiting for the other ranks")
        watch.until(lambda: peers.all_succeeded(pod.others))


def _await_result(pod: Pod, watch: Watch, peers: Peers, log: RunLog) -> None:
    """On the other ranks: until rank 0 has finished the run, since a replaced rank 0 would need this one again."""
    pod.output.say(f"the trainer is done on rank {pod.identity.rank}, waiting for rank 0")
    watch = replace(watch, uploader=None)

    def tell() -> bool:
        peers.flushed(succeeded=True)
        return True

    watch.until(tell)
    watch.until(lambda: pod.context.generation in log.read().finishes)


def _start_trainer(pod: Pod, step: int | None, lock: TrainerLock | None) -> TrainerProcess:
    working_dir = pod.context.working_dir
    env = environment(pod, step)
    if pod.others and (name := env.get("MASTER_ADDR")) and not await_name(name, pod.stop.sleep):
        pod.output.say(f"the name of rank 0's pod, {name}, does not resolve: look at the cluster's DNS")
    trainer = TrainerProcess(
        pod.command,
        cwd=Path(working_dir) if working_dir else pod.workspace.root,
        env=env,
        output=pod.output,
        pass_fds=[lock.fd] if lock else [],
    )
    write_json(pod.workspace.started_file, {"pid": trainer.pid, "at": time.time()})
    return trainer


def _run_trainer(pod: Pod, trainer: TrainerProcess, watch: Watch, peers: Peers, lock: TrainerLock | None) -> None:
    """
    Until it exits with 0; then nothing of it is left.

    :raises GpuBurstError: it failed, or had to be ended.
    """
    several = pod.context.world_size > 1
    try:
        status = watch.until_exit(trainer, pod.grace_s)
    finally:
        trainer.close()
        if lock:
            end_trainers(lock.path, pod.identity.owner)
        elif several:
            end_workspace(pod.workspace.root)  # torchrun's workers lead sessions of their own, and hold the GPUs
    if several:
        with suppress(GpuBurstError):  # it only saves the others a minute
            peers.exited(status)
    if status == 0:
        return
    if several:
        pod.output.say(f"the trainer {describe_exit(status)}; is it because another rank was lost?")
    raise watch.failure(status, lambda: peers.all_exited(peers.others(pod.identity.rank)))


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
    # Whether it was ended or came to its end by itself: what it has left since our first look belongs to no epoch.
    pod.workspace.prepare()
    return lock
