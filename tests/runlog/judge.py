"""
What must always hold, written from the protocol's text and from nothing of the production code.

It sees raw JSON and raw keys. Every write and every deletion passes here before it takes effect.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from typing import Any

Record = dict[str, Any]

_parsed = lru_cache(maxsize=None)(json.loads)  # the same bytes come again in thousands of states


class Violation(AssertionError):
    """The protocol was broken."""


def require(condition: object, text: str) -> None:
    if not condition:
        raise Violation(text)


def records(objects: dict[str, bytes], prefix: str = "run") -> list[Record]:
    """The log, in order; a gap is a violation."""
    found = {}
    for key, data in objects.items():
        if key.startswith(f"{prefix}/log/"):
            found[int(key[-17:-5])] = _parsed(data)
    require(sorted(found) == list(range(1, len(found) + 1)), f"the log has gaps: {sorted(found)}")
    return [found[seq] for seq in sorted(found)]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Judge:
    """Stateless: all it needs is what is in the store."""

    def written(self, key: str, data: bytes, objects: dict[str, bytes]) -> None:
        if "/log/" in key:
            require(key not in objects, f"{key} was overwritten")
            log = records(objects)
            new = _parsed(data)
            require(int(key[-17:-5]) == len(log) + 1, f"{key} leaves a gap")
            _appended(log, new)
            if new["kind"] == "commit":
                _complete(new, objects)
        elif "/data/" in key:
            require(objects.get(key, data) == data and key not in objects, f"two writers share {key}")

    def deleted(self, key: str, objects: dict[str, bytes]) -> None:
        require("/log/" not in key, f"{key}: a log goes only as a whole")
        if "/data/" not in key:
            return
        log = records(objects)
        retired = _retired(log)
        for commit in (r for r in log if r["kind"] == "commit" and r["seq"] not in retired):
            names = key in commit["manifests"] or any(
                key in _parsed(objects[m])["files"] for m in commit["manifests"] if m in objects
            )
            require(not names, f"{key} was deleted, though commit {commit['seq']} is not retired")

    def answer(self, question: str, objects: dict[str, bytes]) -> Any:
        log = records(objects)
        starts = [r["seq"] for r in log if r["kind"] == "start"]
        if question == "tail":
            return len(log)
        if question == "newest start":
            return starts[-1] if starts else 0
        if question == "closed":
            return tuple(r["generation"] for r in log if r["kind"] == "close")
        raise ValueError(question)


def _retired(log: list[Record]) -> set[int]:
    return {seq for r in log if r["kind"] == "retire" for seq in r["seqs"]}


def _complete(commit: Record, objects: dict[str, bytes]) -> None:
    """All files of a checkpoint are there, whole, and of one epoch."""
    for key, digest in commit["manifests"].items():
        require(key in objects and sha256(objects[key]) == digest, f"commit {commit['seq']}: {key} is not there")
        manifest = _parsed(objects[key])
        require(manifest["epoch"] == commit["epoch"], f"commit {commit['seq']} mixes epochs: {key}")
        for name, file_digest in manifest["files"].items():
            there = name in objects and sha256(objects[name]) == file_digest
            require(there, f"commit {commit['seq']}: {name} is not what {key} says")
            require(_parsed(objects[name])["epoch"] == commit["epoch"], f"{name} is of another epoch")


def _appended(log: list[Record], new: Record) -> None:
    seq = len(log) + 1
    require(new["seq"] == seq, f"record at {seq} says {new['seq']}")
    require(new["id"] not in {r["id"] for r in log}, f"{new['id']} is in the log twice")
    opened = [r["generation"] for r in log if r["kind"] == "open"]
    closed = {r["generation"]: r["verdict"] for r in log if r["kind"] == "close"}
    generation = new["generation"]
    if new["kind"] == "open":
        require(generation == len(opened) + 1, f"generation {generation} after {opened}")
        require(set(opened) == set(closed), f"generation {generation} opened while one is open")
        return
    require(opened and generation == opened[-1], f"{new['kind']} of generation {generation}, not the last")
    require(generation not in closed, f"{new['kind']} after close of generation {generation}")
    here = [r for r in log if r["generation"] == generation]
    finished = [r for r in here if r["kind"] == "finish"]
    starts = [r for r in here if r["kind"] == "start"]
    if new["kind"] == "close":
        require((new["verdict"] == "succeeded") == bool(finished), f"{new['verdict']}, results: {len(finished)}")
        return
    require(not finished, f"{new['kind']} after the result of generation {generation}")
    if new["kind"] == "start":
        _started(log, starts, new)
        return
    require(starts, f"{new['kind']} before any start")
    require(starts[-1]["seq"] == new["epoch"], f"{new['kind']} of epoch {new['epoch']}, newest {starts[-1]['seq']}")
    require(starts[-1]["owner"] == new["owner"], f"{new['kind']} by {new['owner']}")
    if new["kind"] == "retire":
        _retires(log, starts[-1], new)


def _restorable(log: list[Record], generation: int) -> list[int]:
    since = next(r["restore_since"] for r in log if r["kind"] == "open" and r["generation"] == generation)
    gone = _retired(log)
    return [
        r["seq"]
        for r in log
        if r["kind"] == "commit" and since <= r["generation"] <= generation and r["seq"] not in gone
    ]


def _damaged(log: list[Record]) -> set[int]:
    return {seq for r in log if r["kind"] == "start" for seq in r["damaged"]}


def _started(log: list[Record], starts: list[Record], new: Record) -> None:
    owners = [r["owner"] for r in starts]
    require(new["owner"] not in owners or owners[-1] == new["owner"], f"superseded owner {new['owner']} starts again")
    pods: dict[str, int] = {}
    boots: dict[tuple[str, str], int] = {}
    for position, start in enumerate(starts):
        if start["owner"] == new["owner"]:
            for pod, nonce in start["members"]:
                pods[pod] = boots[pod, nonce] = position
    last = len(starts) - 1
    for pod, nonce in new["members"]:
        require(pods.get(pod, last) == last, f"superseded pod {pod} starts again")
        require(boots.get((pod, nonce), last) == last, f"superseded boot {nonce} starts again")
    sound = [s for s in _restorable(log, new["generation"]) if s not in _damaged(log) | set(new["damaged"])]
    expected = sound[-1] if sound else None
    require(new["restore_from"] == expected, f"start restores {new['restore_from']}, newest is {expected}")


def _retires(log: list[Record], start: Record, new: Record) -> None:
    restorable = _restorable(log, new["generation"])
    left = [seq for seq in restorable if seq not in new["seqs"] and seq not in _damaged(log)]
    sound = [seq for seq in restorable if seq not in _damaged(log)]
    require(set(new["seqs"]) <= set(restorable), f"retires {new['seqs']} of {restorable}")
    require(sound[-2:] == left[-2:], f"retires one of the last two: {new['seqs']} of {sound}")
    require(start["restore_from"] not in new["seqs"], f"retires what epoch {start['seq']} restores")
