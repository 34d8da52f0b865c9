"""
What the killed trainers save: files whose every byte follows from the seed, the step, the rank and the lineage.

The lineage of a checkpoint is the epoch in which each of its steps was trained. Two epochs never write the same bytes,
so that a mix of two saves, or a step that went on from another state than the log says, shows.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PART_SIZE = 5 << 20
"""Bytes of one part of an upload in these tests: as few as S3 takes, so that a small checkpoint has several."""
SPARSE = 2 << 20
SMALL_FILES = 24
STATE = "state.json"


@dataclass(frozen=True)
class Link:
    """A symbolic link."""

    target: str


FOLDER = None
"""An empty folder, in a tree."""
Tree = Mapping[str, bytes | Link | None]


def chain(seed: int, rank: int, lineage: Sequence[int]) -> str:
    """The state after these steps: each is hashed over the one before."""
    state = f"{seed}/{rank}"
    for step, epoch in enumerate(lineage, 1):
        state = hashlib.sha256(f"{state}/{step}/{epoch}".encode()).hexdigest()
    return state


def part(seed: int, rank: int, lineage: Sequence[int]) -> Tree:
    """What one rank saves after these steps, by path; its largest file has two or three parts."""
    state = chain(seed, rank, lineage)
    draw = random.Random(state)
    home = f"rank-{rank}"
    tree: dict[str, bytes | Link | None] = {
        f"{home}/{STATE}": json.dumps({"rank": rank, "lineage": list(lineage), "state": state}).encode(),
        "shared": f"rank {rank} {state}".encode(),
        f"{home}/large.bin": draw.randbytes((1 + len(lineage) % 2) * PART_SIZE + 123_457),
        f"{home}/sparse.bin": _sparse(draw),
        f"{home}/empty": b"",
        f"{home}/empty-folder": FOLDER,
        f"{home}/ünï ☃.txt": state.encode(),
        f"{home}/inside": Link("small/00.bin"),
    }
    for number in range(SMALL_FILES):
        tree[f"{home}/small/{number:02d}.bin"] = draw.randbytes(draw.randrange(4096))
    tree[f"{home}/hard"] = tree[f"{home}/small/01.bin"]
    return tree


def whole(seed: int, world_size: int, lineage: Sequence[int], rank: int = 0) -> Tree:
    """The checkpoint of all ranks as `rank` finds it: what several saved under one name is its own."""
    merged: dict[str, bytes | Link | None] = {}
    for other in [*range(world_size), rank]:
        merged.update(part(seed, other, lineage))
    return merged


def write(tree: Tree, folder: Path) -> None:
    """Write a tree, its zeros as holes."""
    for name, content in tree.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Link):
            path.symlink_to(content.target)
        elif content is FOLDER:
            path.mkdir()
        elif name.endswith("/hard"):
            os.link(path.with_name("small") / "01.bin", path)
        else:
            _write(path, content)


def differences(folder: Path, expected: Tree) -> list[str]:
    """In what a folder is not this tree; empty: bit for bit the same."""
    found = dict(_read(folder))
    said = [f"{name} is missing" for name in expected.keys() - found.keys()]
    said += [f"{name} should not be there" for name in found.keys() - expected.keys()]
    for name in expected.keys() & found.keys():
        if found[name] != expected[name]:
            said.append(f"{name} is {_about(found[name])}, not {_about(expected[name])}")
    return sorted(said)


def lineage_in(folder: Path, rank: int) -> list[int]:
    """The lineage that a restored checkpoint claims."""
    claimed = json.loads((folder / f"rank-{rank}" / STATE).read_text(encoding="utf-8"))
    return [int(epoch) for epoch in claimed["lineage"]]


def _sparse(draw: random.Random) -> bytes:
    data = bytearray(SPARSE)
    for _ in range(3):
        at = draw.randrange(SPARSE // 4096 - 1) * 4096
        data[at : at + 4096] = draw.randbytes(4096)
    return bytes(data)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        for at in range(0, len(content), 4096):
            block = content[at : at + 4096]
            if block.strip(b"\0"):
                file.seek(at)
                file.write(block)
        file.truncate(len(content))


def _read(folder: Path) -> Iterator[tuple[str, bytes | Link | None]]:
    for root, folders, files in os.walk(folder):
        here = Path(root)
        links = [name for name in folders if (here / name).is_symlink()]
        for name in files + links:
            path = here / name
            content = Link(os.readlink(path)) if path.is_symlink() else path.read_bytes()
            yield path.relative_to(folder).as_posix(), content
        if not files and not folders and here != folder:
            yield here.relative_to(folder).as_posix(), FOLDER


def _about(content: bytes | Link | None) -> str:
    if content is FOLDER:
        return "an empty folder"
    if isinstance(content, Link):
        return f"a link to {content.target}"
    return f"{len(content)} bytes with SHA-256 {hashlib.sha256(content).hexdigest()[:12]}"
