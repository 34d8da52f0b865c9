"""`gpu-burst checkpoints verify`, `restore` and `gc`: the verbs that move bytes or delete them."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from contextlib import closing
from pathlib import Path

from airflow_gpu_burst.checkpoint import restore as restore_trees
from airflow_gpu_burst.checkpoint.collecting import fenced
from airflow_gpu_burst.checkpoint.verifying import verify as damage_of
from airflow_gpu_burst.commands.checkpoints import Place, commit_of
from airflow_gpu_burst.errors import ExitCode, SpecError
from airflow_gpu_burst.runlog import History, Start
from airflow_gpu_burst.runtime.restoring import rank_of
from airflow_gpu_burst.runtime.telling import Telling, moved, size_text
from airflow_gpu_burst.transfer import open_mover


def verify(place: Place, arguments: Namespace) -> int:
    """Read every byte of one checkpoint, or of all that are not retired, against its checksum."""
    history = place.history
    commits = [commit_of(history, arguments.seq)] if arguments.seq else list(history.live)
    began, rows, size = time.monotonic(), [], 0
    with closing(open_mover(place.config)) as mover:
        for commit in commits:
            before = mover.tally.bytes_received
            telling = Telling(f"checkpoint {commit.seq}, step {commit.step}", _say)
            damage = damage_of(mover, list(commit.manifests.items()), progress=telling.progress)
            read = mover.tally.bytes_received - before
            size += read
            rows.append({"seq": commit.seq, "step": commit.step, "bytes": read, "damage": damage})
            if arguments.output == "text":
                print(f"{commit.seq}  step {commit.step}: {'DAMAGED' if damage else f'{size_text(read)}, whole'}")
                print(*(f"    {line}" for line in damage), sep="\n", end="\n" * bool(damage), flush=True)
    damaged = sum(bool(row["damage"]) for row in rows)
    if arguments.output == "json":
        print(json.dumps(rows, ensure_ascii=False))
    else:
        print(f"{len(rows)} checkpoints, {size_text(size)} read in {time.monotonic() - began:.1f} s, {damaged} damaged")
    return ExitCode.DATA_MISSING if damaged else ExitCode.OK


def restore(place: Place, arguments: Namespace) -> int:
    """Bring one back, as a pod would."""
    commit, target = commit_of(place.history, arguments.seq), Path(arguments.target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise SpecError(f"{target} is not empty: name a new folder")
    telling = Telling(f"checkpoint {commit.seq}, step {commit.step}", _say)
    own = arguments.rank
    manifests = sorted(commit.manifests.items(), key=lambda item: (rank_of(item[0]) != own, rank_of(item[0])))
    with closing(open_mover(place.config)) as mover:
        restored = restore_trees(mover, manifests, target, progress=telling.progress)
    if arguments.output == "json":
        print(json.dumps({"seq": commit.seq, "step": commit.step, "bytes": restored.fetched, "folder": str(target)}))
    else:
        print(f"checkpoint {commit.seq}, step {commit.step}: {moved(restored.fetched, telling.seconds)}, in {target}")
    return 0


def gc(place: Place, arguments: Namespace) -> int:
    """What no commit, result or model names; deleted only when nobody may be writing any more."""
    history = place.history
    over = history.generation in history.finishes or history.generation in history.closes
    start = history.last_start(history.generation)
    if arguments.yes and not over:
        raise SpecError(_live(history, start))
    # An epoch's number is its place in the log: one that begins from now on is not looked at.
    before = history.tail + 1 if over or start is None else start.seq
    garbage = fenced(place.store, history, place.prefix, before=before)
    if arguments.yes:
        with closing(open_mover(place.config)) as mover:
            for key in garbage.uploads:
                mover.abandon(key)
            mover.delete(garbage.keys)
    if arguments.output == "json":
        found = {"keys": garbage.keys, "bytes": garbage.size, "left": garbage.left, "deleted": arguments.yes}
        print(json.dumps(found, ensure_ascii=False))
        return 0
    if not arguments.yes:
        print(*garbage.keys, sep="\n", end="\n" * bool(garbage.keys))
    for reason in garbage.left:
        print(f"left alone, it cannot be judged: {reason}")
    count = len(garbage.keys)
    done = "deleted" if arguments.yes else "would go; delete them with --yes" if count else "would go"
    print(f"{count} object{'' if count == 1 else 's'}, {size_text(garbage.size)} {done}")
    return 0


def _live(history: History, start: Start | None) -> str:
    owner = f"owner {start.owner}, log record {start.seq} of {start.at}" if start else "its owner, who has yet to start"
    return (
        f"generation {history.generation} is open: {owner}, may be writing, and deletes by itself what nobody needs. "
        "Wait for its end, or end it with `gpu-burst cancel`; without --yes you see what earlier starts have left"
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
