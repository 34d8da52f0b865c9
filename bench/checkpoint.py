"""
What it costs to bring checkpoints into a store and back: CPU, rates, stalls, the cap, small files, memory.

Everything in one run against one server (transfer_sink.py) on this machine, ours and the peers by turns on the same
files. These lie on a disk and in the page cache, as what a trainer has just written; what is restored is written into
memory. CPU is that of the client's process from its first request on: its start and its imports are not in it, except
for tools that are a process for each run. GB are 1e9 bytes.

    bench/checkpoint.py             all rows; the first time it gets the peers into a folder of their own
    bench/checkpoint.py --offline   with the peers that are there
    bench/checkpoint.py --smoke     in seconds and without peers: does it run at all? Nothing is written
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import transfer_peers
from bench.recording import RESULTS, Row, save
from bench.transfer_rows import SMOKE, Bench, Scale
from bench.transfer_server import sink


@contextmanager
def places() -> Iterator[tuple[Path, Path]]:
    """A folder in memory where there is one, and one on disk."""
    memory = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as fast,
        tempfile.TemporaryDirectory() as disk,
    ):
        yield Path(fast), Path(disk)


def measure(scale: Scale, asked: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """All rows, and what is to be said with them."""
    peers = transfer_peers.folder()
    names, missing = ["boto3"], list[str]()
    torch: Path | None = None
    if not asked.smoke:
        names, missing = transfer_peers.gather(peers, install=not asked.offline)
        torch = asked.torch or transfer_peers.torch(peers, install=not asked.offline)
    with places() as (fast, disk), sink(fast) as server:
        bench = Bench(server, scale, fast, disk, peers, names)
        for text in missing:
            bench.note(text)
        kinds: dict[str, Callable[[], list[Row]]] = {
            "cpu http": lambda: bench.cpu(tls=False),
            "cpu tls": lambda: bench.cpu(tls=True),
            "upload": lambda: [bench.upload_rate()],
            "restore": lambda: [bench.restore_rate()],
            "stall": lambda: [bench.stall(torch)],
            "cap": bench.capped,
            "small": bench.small_files,
            "memory": lambda: [bench.memory()],
        }
        rows: list[Row] = []
        for name, kind in kinds.items():
            if not asked.only or name in asked.only:
                print(f"{name} ...", flush=True)
                rows += kind()
    return rows, {"medians": bench.medians, "notes": bench.notes}


def main() -> int:
    """Exit code 1 when a goal is not met."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--offline", action="store_true")
    parser.add_argument("--torch", type=Path, help="a Python that has torch; else one is made, 3 GB")
    parser.add_argument("--rounds", type=int, default=Scale.rounds)
    parser.add_argument("--only", action="append", help="e.g. 'cpu http'; repeat for more; writes nothing")
    asked = parser.parse_args()
    rows, said = measure(SMOKE if asked.smoke else Scale(rounds=asked.rounds), asked)
    if asked.smoke or asked.only:
        for made in rows:
            print("ROW", json.dumps(asdict(made)))
        return 0
    save("checkpoint", rows)
    path = RESULTS / "checkpoint.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | said, indent=2) + "\n", encoding="utf-8")
    return 0 if all(r.met for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
