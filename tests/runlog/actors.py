"""Pods and Airflow tries, as scripts over the production code. What they check, they check like a user would."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from airflow_gpu_burst.errors import (
    Fenced,
    GpuBurstError,
    NotStarted,
    ObjectMissing,
    Renamed,
    StoreForbidden,
    StoreUnavailable,
)
from airflow_gpu_burst.store import Entry
from tests.runlog.judge import Violation, require, sha256
from tests.runlog.world import Env

RESTARTS = 3  # of one pod's trainer, so that every script ends


class Damaged(Exception):
    """A checkpoint cannot be read back."""


def pod(
    owner: str,
    *,
    rank: int = 0,
    uid: str = "",
    nonce: str = "n",
    world: int = 1,
    generation: int = 1,
    steps: int = 1,
    collect: bool = False,
    finish: bool = True,
    damage: bool = False,
    rewind: int = 0,
    again: bool = False,
    looks: int = 3,
) -> Callable[[Env], str]:
    """
    One boot of one pod: begin, restore, train, commit, finish.

    :param damage: checkpoints may be damaged; then the one before is asked for.
    :param rewind: steps that the trainer goes back after it has restored: it may.
    :param looks: how often it looks for the others before it gives up.
    :param again: the trainer dies at once, and is started again by the same boot.
    """

    def body(env: Env) -> str:
        runlog = env.runlog
        member = runlog.Member(owner=owner, rank=rank, pod_uid=uid or f"{owner}{rank}", nonce=nonce)
        try:
            epoch = runlog.begin(
                env.log(),
                generation=generation,
                member=member,
                world_size=world,
                deadline_s=looks - 1,
                poll_s=1,
                clock=env.clock,
                sleep=env.sleep,
            )
            if again:
                epoch = epoch.restart()
            for _ in range(RESTARTS):
                try:
                    first = (restore(env, epoch) if epoch.restore_from else 0) - rewind
                    return _train(env, epoch, rank, world, range(first + 1, first + steps + 1), collect, finish, looks)
                except Renamed:
                    epoch = epoch.restart()
                except Damaged:
                    require(damage, f"{env.name} cannot restore {epoch.restore_from}")
                    epoch = epoch.restart_without(epoch.restore_from.seq)
            return "restarted too often"
        except runlog.Finished:
            return "already finished"
        except NotStarted:
            return "not started"
        except (Fenced, StoreUnavailable, StoreForbidden) as error:
            return type(error).__name__
        except GpuBurstError as error:
            raise Violation(f"{env.name}: {error!r}") from error

    return body


def _train(env: Env, epoch: Any, rank: int, world: int, steps: range, collect: bool, finish: bool, looks: int) -> str:
    for step in steps:
        own = write(env, epoch, step, rank)
        if rank == 0:
            manifests = [own, *(_manifest_of(env, epoch, step, other, looks) for other in range(1, world))]
            if None in manifests:
                return "gave up waiting for a manifest"
            epoch.commit(step, dict(manifests), {"step": step})
            if collect:
                for commit in epoch.retire(keep=2):
                    remove(env, commit)
        check(env, epoch)
    if rank == 0 and finish:
        epoch.finish({"step": steps.stop - 1})
        return "finished"
    return "trained"


def check(env: Env, epoch: Any) -> None:
    """`Epoch.check` must notice what was in the log before it was called."""
    newest = env.oracle("newest start")
    closed = env.oracle("closed")
    epoch.check()
    require(
        newest in (None, epoch.number), f"{env.name}: check passed in epoch {epoch.number}, though {newest} had begun"
    )
    require(not closed or epoch.generation not in closed, f"{env.name}: check passed, though {closed} was closed")


def write(env: Env, epoch: Any, step: int, rank: int) -> tuple[str, str]:
    """A shard and its manifest; both say whose they are."""
    base = f"{epoch.data_prefix}/step-{step}"
    shard = json.dumps({"epoch": epoch.number, "by": env.name, "step": step, "rank": rank}).encode()
    env.put(f"{base}/shard", shard)
    manifest = json.dumps({"epoch": epoch.number, "step": step, "files": {f"{base}/shard": sha256(shard)}}).encode()
    env.put(f"{base}/manifest", manifest)
    return f"{base}/manifest", sha256(manifest)


def _manifest_of(env: Env, epoch: Any, step: int, rank: int, looks: int) -> tuple[str, str] | None:
    key = f"{epoch.data_prefix_of(rank)}/step-{step}/manifest"
    for _ in range(looks):
        try:
            return key, sha256(env.get(key))
        except ObjectMissing:
            check(env, epoch)
            env.sleep(1)
    return None


def restore(env: Env, epoch: Any) -> int:
    """Read a checkpoint back, every byte of it verified. What is missing may have been retired: look first."""
    commit = epoch.restore_from
    step = commit.step
    try:
        for key, digest in commit.manifests.items():
            manifest = _verified(env, key, digest)
            for name, file_digest in json.loads(manifest)["files"].items():
                _verified(env, name, file_digest)
    except (ObjectMissing, Damaged) as error:
        epoch.check()
        raise Damaged from error
    return int(step)


def _verified(env: Env, key: str, digest: str) -> bytes:
    data = env.get(key)
    if sha256(data) != digest:
        raise Damaged(key)
    return data


def remove(env: Env, commit: Any) -> None:
    """Delete a retired checkpoint, its manifests last."""
    for key in commit.manifests:
        try:
            names = json.loads(env.get(key))["files"]
        except ObjectMissing:
            continue
        for name in names:
            env.delete(name)
        env.delete(key)


def airflow(
    *, max_tries: int = 0, try_number: int = 1, digest: str = "spec", close: str = "", stop: bool = False
) -> Callable[[Env], str]:
    """
    One try of the task up to the submission, and, with `close`, from the end of the object on.

    :param stop: only open.
    """

    def body(env: Env) -> str:
        runlog = env.runlog
        log = env.log()
        asked = {"spec_digest": digest, "max_tries": max_tries, "try_number": try_number}
        try:
            todo = runlog.settle_generation(log, **asked)
            if isinstance(todo, runlog.Collect):
                return f"collected {todo.finish.result['step']}"
            if not close:
                return f"submitted {todo.generation}"
            verdict = runlog.close_generation(log, todo.generation, close, "its object ended").verdict
            finish = log.read().finishes.get(todo.generation)
            require((verdict == "succeeded") == (finish is not None), f"{verdict}, result {finish}")
            return verdict
        except (Fenced, StoreUnavailable, StoreForbidden) as error:
            return type(error).__name__
        except GpuBurstError as error:
            raise Violation(f"{env.name}: {error!r}") from error

    return body


def ghost_of_a_deleted_run(started: dict[str, bytes]) -> Callable[[Env], str]:
    """
    A pod that began in `started`, a store that is no more: all it has left is data to write.

    (What it would append is another matter: see the architecture notes on deleting a run key.)
    """

    def body(env: Env) -> str:
        log = env.runlog.RunLog(_Memory(started), "run", new_id=env.new_id, now=lambda: "")
        member = env.runlog.Member(owner="A", rank=0, pod_uid="A0", nonce="ghost")
        write(env, env.runlog.begin(log, generation=1, member=member, world_size=1, deadline_s=1), 1, 0)
        return "wrote"

    return body


class _Memory:
    """A store of which nobody else knows."""

    uri = "memory://"

    def __init__(self, objects: dict[str, bytes]) -> None:
        self._objects = dict(objects)

    def get(self, key: str) -> bytes:
        if key not in self._objects:
            raise ObjectMissing(key)
        return self._objects[key]

    def put(self, key: str, data: bytes) -> None:
        self._objects[key] = data

    create = put

    def list(self, prefix: str) -> Iterator[Entry]:
        return iter([Entry(key, 1) for key in sorted(self._objects) if key.startswith(prefix)])


def reader(env: Env) -> str:
    """Whoever reads sees at least what was acknowledged before; or it is told that nothing can be told."""
    log = env.log()
    try:
        for _ in range(2):
            tail = env.oracle("tail")
            history = log.read()
            require(history.tail >= tail, f"{env.name} read {history.tail} records of {tail}")
    except (StoreUnavailable, StoreForbidden) as error:
        return type(error).__name__
    return "read"
