"""
Saved trees back into a folder: what this node still has is used after its CRC was checked, the rest is fetched.

All is built in a hidden folder beside the target, which then becomes the target by one rename: it is there whole, or
not at all. Nothing is synced to the disk: whoever loses power reads the target only after it was restored anew. A
restore that was killed is gone on with by the same call; what it left is verified like any other copy of this node.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

from airflow_gpu_burst.checkpoint.choosing import Chosen, Placed, choose
from airflow_gpu_burst.checkpoint.fetching import Fetcher, data_of
from airflow_gpu_burst.checkpoint.placing import Placer
from airflow_gpu_burst.checkpoint.reading import read_manifest
from airflow_gpu_burst.checkpoint.reusing import reuse
from airflow_gpu_burst.checkpoint.space import Kept, held
from airflow_gpu_burst.checkpoint.together import Meter, Progress, Task, silent, together
from airflow_gpu_burst.errors import CheckpointError, GpuBurstError, StoreFull
from airflow_gpu_burst.store.files import local_error
from airflow_gpu_burst.transfer.interface import Mover

AT_ONCE = 4
"""Objects under way together; the mover decides how many requests that are."""
_READERS = 2  # of files on the NVMe: two checksum faster than it reads
_CHUNK = 256  # files per task


@dataclass(frozen=True, kw_only=True)
class Restored:
    """
    :param fetched: bytes from the store.
    :param reused: bytes that lay on this node.
    """

    fetched: int
    reused: int
    files: int


def restore(
    mover: Mover,
    manifests: Sequence[tuple[str, str]],
    target: Path,
    *,
    local: Sequence[Path] = (),
    kept: Path | None = None,
    progress: Progress = silent,
) -> Restored:
    """
    Bring saved trees back into one folder, verified. Of what two of them have, the earlier one's is restored.

    :param manifests: (key, SHA-256), the most important one first.
    :param target: a folder that does not exist yet, or is empty.
    :param local: folders of kept copies (`Kept.folders`): of these only what belongs to the very manifests, with the
        right size and CRC, is taken. It is copied, since a trainer may write into what it has restored; a file system
        with reflinks (XFS, Btrfs) copies nothing.
    :param kept: where the node keeps copies, of this run and of others: they go when there is no room; None: where
        those of `local` are.
    :param progress: told bytes done and bytes in all, a few times a second, in this thread.
    :raises ChecksumMismatch: a manifest or file is not what was saved; said with its key.
    :raises ObjectMissing: the store has lost one of them.
    :raises StoreFull: no room on the node, also after kept copies have gone.
    :raises CheckpointError: `target` holds files, or a manifest leads out of its folder.
    """
    target = target.absolute()
    if target.is_symlink() or (target.exists() and not (target.is_dir() and not any(target.iterdir()))):
        raise CheckpointError(f"{target} is there already, with files in it; name a folder that is new or empty")
    chosen = choose([read_manifest(mover, key, sha256) for key, sha256 in manifests])
    staging = _Staging.of(target, [sha256 for _, sha256 in manifests])
    try:
        restored = _build(mover, manifests, chosen, staging, local, kept, progress)
        staging.become(target)
        return restored
    except OSError as error:
        staging.remove()
        raise local_error(error, f"restore into {target}", "name another folder") from error
    except GpuBurstError as error:
        if not error.retryable:
            staging.remove()
        raise


@dataclass(frozen=True)
class _Staging:
    """Where the target is built. Its name says of what, so that only the same restore goes on with it."""

    root: Path

    @classmethod
    def of(cls, target: Path, sha256s: Sequence[str]) -> _Staging:
        mark = f".landing-{target.name}-"
        staging = cls(target.with_name(mark + hashlib.sha256("\n".join(sha256s).encode()).hexdigest()[:16]))
        if target.parent.is_dir():
            for other in target.parent.iterdir():
                ours = re.fullmatch(re.escape(mark) + "[0-9a-f]{16}", other.name)
                if ours and other != staging.root:
                    shutil.rmtree(other, ignore_errors=True)
        return staging

    @property
    def tree(self) -> Path:
        return self.root / "tree"

    @property
    def parts(self) -> Path:
        """Files that are being fetched, by number."""
        return self.root / "parts"

    def prepare(self) -> bool:
        """Whether an earlier restore has left something to go on with."""
        left = self.tree.is_dir()
        shutil.rmtree(self.parts, ignore_errors=True)
        self.tree.mkdir(parents=True, exist_ok=True)
        self.parts.mkdir()
        return left

    def become(self, target: Path) -> None:
        os.rename(self.tree, target)  # takes the place of an empty folder
        self.remove()

    def remove(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


def _build(
    mover: Mover,
    manifests: Sequence[tuple[str, str]],
    chosen: Chosen,
    staging: _Staging,
    local: Sequence[Path],
    kept: Path | None,
    progress: Progress,
) -> Restored:
    files = sorted(chosen.files)
    total = sum(data_of(placed.file) for placed in files)
    room = kept or (local[0].parent if local else None)
    with ExitStack() as holding:
        copies = [_copies(holding, local, sha256) for _, sha256 in manifests]
        try:
            _make_room(room, total, staging)
        except StoreFull:
            # A copy and what is made of it do not both fit: fetch instead.
            holding.close()
            copies = [[] for _ in manifests]
            _make_room(room, total, staging)
        left = staging.prepare()
        meter = Meter(mover, total, progress)
        missing = _reuse(files, copies, staging, meter) if left or any(copies) else files
    _fetch(mover, missing, staging, meter)
    _place_rest(chosen, staging.tree)
    fetched = sum(data_of(placed.file) for placed in missing)
    meter.whole()
    return Restored(fetched=fetched, reused=total - fetched, files=len(files))


def _copies(holding: ExitStack, local: Sequence[Path], sha256: str) -> list[Path]:
    return [copy for folder in local if holding.enter_context(held(copy := folder / sha256))]


def _make_room(kept: Path | None, total: int, staging: _Staging) -> None:
    there = sum(path.stat().st_blocks * 512 for path in staging.root.rglob("*") if path.is_file())
    Kept(kept or staging.root / "none").make_room(max(total - there, 0), staging.root.parent)


def _reuse(files: list[Placed], copies: list[list[Path]], staging: _Staging, meter: Meter) -> list[Placed]:
    """What this node does not have."""
    missing: list[Placed] = []

    def take(some: Sequence[Placed]) -> None:
        with Placer(staging.tree) as placer:
            for placed in some:
                if reuse(placer, placed.file, copies[placed.tree]):
                    meter.free += data_of(placed.file)  # several threads: a lost count only delays the display
                else:
                    missing.append(placed)

    together([(_READERS, [partial(take, files[at : at + _CHUNK]) for at in range(0, len(files), _CHUNK)])], meter.tell)
    return sorted(missing)


def _fetch(mover: Mover, files: list[Placed], staging: _Staging, meter: Meter) -> None:
    fetcher = Fetcher(mover, staging.tree, staging.parts)
    together([(AT_ONCE, list(_fetches(fetcher, files)))], meter.tell)


def _fetches(fetcher: Fetcher, files: list[Placed]) -> Iterator[Task]:
    """One task for each object, the largest first."""
    by_key = sorted((placed.file for placed in files), key=lambda file: file.key)
    groups = [list(group) for _, group in groupby(by_key, key=lambda file: file.key)]
    for number, group in enumerate(sorted(groups, key=lambda group: -sum(file.size for file in group))):
        yield partial(fetcher.fetch, group, number)


def _place_rest(chosen: Chosen, tree: Path) -> None:
    """What needs no bytes, symbolic links last: while files are placed there is none that could lead astray."""
    with Placer(tree) as placer, Placer(tree) as other:
        for path in chosen.folders:
            placer.folder(path)
        for path, same_as in chosen.same:
            placer.link(path, other, same_as)
        for path, target in chosen.links:
            placer.symlink(path, target)
