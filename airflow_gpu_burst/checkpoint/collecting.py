"""
Deleting what nobody will restore. Never within a save; only by the present epoch, after `retire` (protocol, rule 8).

Two kinds: trees of which one knows that they are over (retired commits, attempts that were dropped), by what their
manifests name; and what fenced epochs have left, by a listing below `data/`. What is not certain stays: a manifest that
cannot be read, an epoch with such a one, whatever a listing does not show.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from airflow_gpu_burst.checkpoint.reading import read_manifest
from airflow_gpu_burst.contract import PodResult
from airflow_gpu_burst.errors import GpuBurstError, ObjectMissing
from airflow_gpu_burst.runlog import Commit, History
from airflow_gpu_burst.store import Entry, Store
from airflow_gpu_burst.transfer.interface import Mover

UPLOAD = ".upload"
"""End of the keys that name uploads that are under way; the key before it is the upload's."""


@dataclass
class Garbage:
    """
    What may go, or has gone.

    :param keys: of objects.
    :param uploads: keys of uploads that were left half way.
    :param size: bytes, as far as a listing has told.
    :param left: what stays because it could not be judged, and why.
    """

    keys: list[str] = field(default_factory=list)
    uploads: list[str] = field(default_factory=list)
    size: int = 0
    left: list[str] = field(default_factory=list)


def delete_trees(store: Store, mover: Mover, manifests: Iterable[tuple[str, str]]) -> Garbage:
    """
    Delete trees of which the caller knows that no commit names them any more. What is gone already is fine.

    :param manifests: (key, SHA-256).
    """
    garbage = Garbage()
    for key, sha256 in manifests:
        try:
            keys = read_manifest(store, key, sha256).keys
        except ObjectMissing:
            continue  # somebody else has deleted it, the manifest last
        except GpuBurstError as error:
            garbage.left.append(f"{key}: {error}")
            continue
        # The manifest last: if this is cut off, the next one still knows what there is.
        mover.delete(sorted(keys))
        mover.delete([key])
        garbage.keys += [*sorted(keys), key]
    return garbage


def delete_retired(store: Store, mover: Mover, commits: Iterable[Commit]) -> Garbage:
    """Delete the data of commits that a `retire` in the log names: what `Epoch.retire` hands out."""
    return delete_trees(store, mover, [item for commit in commits for item in commit.manifests.items()])


def delete_fenced(store: Store, mover: Mover, history: History, prefix: str, *, generation: int, epoch: int) -> Garbage:
    """
    Delete what earlier epochs have left and no commit, result or model names.

    :param history: the log as it was last read. It may be behind: what has come since concerns later epochs only, or
        has made more of this garbage, never less.
    :param prefix: of the run key.
    :param epoch: the present one, in whose name this is done.
    :raises Fenced: it is not the present one.
    """
    history.check_epoch(epoch, generation)
    garbage = fenced(store, history, prefix, before=epoch)
    for key in garbage.uploads:
        mover.abandon(key)
    mover.delete(garbage.keys)
    return garbage


def fenced(store: Store, history: History, prefix: str, *, before: int) -> Garbage:
    """
    What earlier epochs have left; deletes nothing.

    :param before: the first epoch whose data is not looked at. May be beyond all: then nobody may be writing.
    """
    garbage = Garbage()
    named = _named(history)
    for epoch, entries in _by_epoch(store, prefix).items():
        if epoch >= before:
            continue
        try:
            staying = _kept_in(store, named, f"{prefix}/data/{epoch:012d}/")
        except GpuBurstError as error:
            garbage.left.append(f"epoch {epoch}: {error}")
            continue
        for entry in entries:
            if entry.key in staying:
                continue
            garbage.keys.append(entry.key)
            garbage.size += entry.size
            if entry.key.endswith(UPLOAD):
                garbage.uploads.append(entry.key.removesuffix(UPLOAD))
    return garbage


def _by_epoch(store: Store, prefix: str) -> Mapping[int, list[Entry]]:
    """The whole listing before anything is judged: one that breaks off deletes nothing."""
    found: dict[int, list[Entry]] = {}
    for entry in store.list(f"{prefix}/data/"):
        number, slash, _ = entry.key.removeprefix(f"{prefix}/data/").partition("/")
        if slash and number.isascii() and number.isdecimal() and len(number) == 12:
            found.setdefault(int(number), []).append(entry)
    return found


def _named(history: History) -> list[tuple[str, str]]:
    """Manifests of what stays: of commits that are not retired, and of results and models."""
    named = [item for commit in history.live for item in commit.manifests.items()]
    for finish in history.finishes.values():
        if finish.model is not None:
            named.append(finish.model)
        result = PodResult.from_dict(finish.result)
        named += [(artifact.key, artifact.sha256) for artifact in (result.result, result.model) if artifact]
    return named


def _kept_in(store: Store, named: Iterable[tuple[str, str]], below: str) -> Collection[str]:
    """:raises GpuBurstError: what stays there cannot be told."""
    keys: set[str] = set()
    for key, sha256 in named:
        if key.startswith(below):
            keys |= {key, *read_manifest(store, key, sha256).keys}
    return keys
