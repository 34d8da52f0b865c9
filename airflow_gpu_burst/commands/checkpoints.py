"""`gpu-burst checkpoints`: what the run log and the manifests say of a run's checkpoints; `ls` and `show`."""

from __future__ import annotations

import json
import os
import time
from argparse import Namespace
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from airflow_gpu_burst.checkpoint import Entries, read_manifest
from airflow_gpu_burst.commands.words import ago, keys_of, seconds_of, table
from airflow_gpu_burst.errors import ChecksumMismatch, ExitCode, ObjectMissing, SpecError
from airflow_gpu_burst.runlog import Commit, History, RunLog
from airflow_gpu_burst.runtime.restoring import rank_of
from airflow_gpu_burst.runtime.telling import size_text
from airflow_gpu_burst.store import Store, StoreConfig, open_store

HEADER = ("SEQ", "STEP", "EPOCH", "GEN", "SIZE", "FILES", "METRICS", "STATE", "AGE")
_READERS = 8


@dataclass(frozen=True, kw_only=True)
class Place:
    """
    A run, as its store has it.

    :param prefix: of all its keys.
    """

    store: Store
    config: StoreConfig
    prefix: str
    log: RunLog

    @property
    def history(self) -> History:
        """What its log says."""
        return self.log.known


def execute(arguments: Namespace) -> int:
    """One of the verbs."""
    place = place_of(arguments)
    if arguments.verb in ("ls", "show"):
        return {"ls": _ls, "show": _show}[arguments.verb](place, arguments)
    from airflow_gpu_burst.commands import checkpoint_data

    return int(getattr(checkpoint_data, arguments.verb)(place, arguments))


def place_of(arguments: Namespace) -> Place:
    """
    The run that was named.

    :raises SpecError: there is none of that name.
    """
    uri = arguments.store or os.environ.get("GPU_BURST_STORE", "")
    if not uri:
        from airflow_gpu_burst.commands.connect import site_of
        from airflow_gpu_burst.commands.find import find

        site = site_of(arguments)
        if not _is_prefix(arguments.run):
            run = find(site, arguments.run)
            return _place(site.store, site.store_config, [run.handle.run_key.prefix], arguments.run)
        return _place(site.store, site.store_config, [arguments.run], arguments.run)
    config = StoreConfig.from_env({**os.environ, "GPU_BURST_STORE": uri})
    prefixes = [key.prefix for key in keys_of(arguments.run)] + [arguments.run] * _is_prefix(arguments.run)
    return _place(open_store(config), config, prefixes, arguments.run)


def _is_prefix(text: str) -> bool:
    return text.startswith("runs/") and text.count("/") >= 3


def _place(store: Store, config: StoreConfig, prefixes: Iterable[str], text: str) -> Place:
    for prefix in prefixes:
        log = RunLog(store, prefix.strip("/"))
        if log.read().generation:
            return Place(store=store, config=config, prefix=prefix.strip("/"), log=log)
    raise SpecError(
        f"there is no run {text!r} in {store.uri}. With --store name it DAG/TASK/RUN_ID (and /MAP_INDEX), or by its "
        "key prefix, runs/…; `gpu-burst status RUN` shows it"
    )


def commit_of(history: History, text: str) -> Commit:
    """
    The commit of that place in the log, or the newest that may be restored.

    :raises SpecError: there is none.
    """
    newest = history.newest_checkpoint(history.generation)
    if text == "newest" and newest is not None:
        return newest
    for commit in history.commits:
        if text == str(commit.seq):
            return commit
    there = ", ".join(str(commit.seq) for commit in history.live) or "none"
    raise SpecError(
        f"there is no checkpoint {text!r} in the log (there: {there}); `gpu-burst checkpoints ls` shows them"
    )


def states_of(history: History, commit: Commit) -> list[str]:
    """What a commit is good for, in words. Pure."""
    newest = history.newest_checkpoint(history.generation)
    restorable = commit in history.restorable(history.generation)
    found = []
    if newest is not None and newest.seq == commit.seq:
        found.append("newest")
    elif commit.seq in history.retired:
        found.append("retired")
    elif commit.seq in history.damaged:
        found.append("damaged")
    else:
        found.append("restorable" if restorable else "earlier")  # of a generation that the present one does not restore
    return found + ["pinned"] * bool(commit.metrics.get("pinned"))


def manifests_of(store: Store, commit: Commit) -> dict[str, Entries | Exception]:
    """Manifest keys and what they name, or why that cannot be read."""

    def read(item: tuple[str, str]) -> Entries | Exception:
        try:
            return read_manifest(store, *item)
        except (ObjectMissing, ChecksumMismatch) as error:
            return error

    with ThreadPoolExecutor(_READERS) as pool:
        return dict(zip(commit.manifests, pool.map(read, commit.manifests.items()), strict=True))


def _ls(place: Place, arguments: Namespace) -> int:
    now = time.time()
    rows = [_row(place, commit) for commit in place.history.commits]
    if arguments.output == "json":
        print(json.dumps(rows, ensure_ascii=False))
    elif not rows:
        print(f"no checkpoint was ever committed under {place.store.uri}/{place.prefix}/")
    else:
        print(*table([HEADER, *(_cells(row, now) for row in rows)]), sep="\n")
    return 0


def _show(place: Place, arguments: Namespace) -> int:
    commit = commit_of(place.history, arguments.seq)
    row = _row(place, commit)
    files, damage = _files(manifests_of(place.store, commit))
    if arguments.output == "json":
        print(json.dumps({**row, "manifests": dict(commit.manifests), "files": files, "damage": damage}))
    else:
        print(f"checkpoint {commit.seq}, step {commit.step}: {', '.join(row['state'])}, committed {commit.at}")
        lines = [(str(file["rank"]), str(file["size"]), file["path"] + file["note"]) for file in files]
        print(*table([("RANK", "BYTES", "FILE"), *lines]), *damage, sep="\n")
    return ExitCode.DATA_MISSING if damage else ExitCode.OK


def _files(trees: Mapping[str, Entries | Exception]) -> tuple[list[dict[str, Any]], list[str]]:
    files: list[dict[str, Any]] = []
    for manifest, tree in trees.items():
        if isinstance(tree, Exception):
            continue
        rank = rank_of(manifest)
        lines = [(file.path, file.size, f"{file.crc64nvme:016x}", "") for file in tree.files]
        lines += [(path, 0, "", "/") for path in tree.folders]
        lines += [(link.path, 0, "", f" -> {link.target}") for link in tree.links]
        lines += [(same.path, 0, "", f" = {same.same_as}") for same in tree.same]
        files += [
            {"rank": rank, "path": path, "size": size, "crc64nvme": crc, "note": note}
            for path, size, crc, note in sorted(lines)
        ]
    return files, [str(error) for error in trees.values() if isinstance(error, Exception)]


def _row(place: Place, commit: Commit) -> dict[str, Any]:
    states = states_of(place.history, commit)
    sizes: dict[str, Any] = {"size": None, "files": None}
    if "retired" not in states:  # its data may be gone already
        found = list(manifests_of(place.store, commit).values())
        trees = [entries for entries in found if isinstance(entries, Entries)]
        if len(trees) < len(found):
            states.append("damaged")
        sizes = {"size": sum(tree.size for tree in trees), "files": sum(len(tree.files) for tree in trees)}
    return {
        "seq": commit.seq,
        "step": commit.step,
        "epoch": commit.epoch,
        "generation": commit.generation,
        **sizes,
        "ranks": len(commit.manifests),
        "metrics": {name: value for name, value in commit.metrics.items() if name != "pinned"},
        "state": list(dict.fromkeys(states)),
        "at": commit.at,
    }


def _cells(row: Mapping[str, Any], now: float) -> tuple[str, ...]:
    def text(value: Any) -> str:
        return f"{value:.6g}" if isinstance(value, float) else str(value)

    return (
        str(row["seq"]),
        str(row["step"]),
        str(row["epoch"]),
        str(row["generation"]),
        "-" if row["size"] is None else size_text(row["size"]),
        "-" if row["files"] is None else str(row["files"]),
        " ".join(f"{name}={text(value)}" for name, value in row["metrics"].items()) or "-",
        ", ".join(row["state"]),
        ago(now - seconds_of(row["at"])),
    )
