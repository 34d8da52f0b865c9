"""
The measurements of checkpoint.py, each a method that makes rows.

Ours and the peers do the same work by turns, each time in a fresh process, against the same server.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from bench.recording import Row, row
from bench.transfer_clients import ACCESS, REGION, SECRET
from bench.transfer_server import Failed, Run, Sink, run
from bench.transfer_sink import SLOW_S, TICK_S

GB = 1e9
MIB = 1 << 20
HERE = Path(__file__).parent
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """
    How much is done.

    :param file: bytes of the file that is sent; also of a checkpoint that is restored, of a save that stalls.
    :param bulk: how often that file is sent where the rate is measured: connections grow during the first 2 GB.
    :param cap_s: seconds under each cap; the rates are over windows of `window_s`.
    :param each: files sent one by one, of the `small` that are saved.
    :param sparse: bytes of the sparse checkpoint, in 8 shards.
    """

    rounds: int = 5
    file: int = 1 << 30
    bulk: int = 5
    caps: Sequence[float] = (50e6, 100e6, 200e6)
    cap_s: float = 13.0
    window_s: float = 10.0
    small: int = 100_000
    each: int = 10_000
    sparse: int = 50 * 10**9
    saves: int = 6


SMOKE = Scale(
    rounds=1,
    file=96 * MIB,
    bulk=1,
    caps=(40e6, 80e6),
    cap_s=1.2,
    window_s=0.5,
    small=2_000,
    each=200,
    sparse=1 << 30,
    saves=1,
)


class Bench:
    """
    :param folder: in memory, for what is restored and for small files.
    :param disk: on a disk.
    :param peers: folder of the peers.
    """

    def __init__(self, server: Sink, scale: Scale, folder: Path, disk: Path, peers: Path, names: list[str]) -> None:
        self.server, self.scale, self.folder, self.disk = server, scale, folder, disk
        self.peers, self.names = peers, names
        self.notes: list[str] = []
        self.medians: dict[str, dict[str, float]] = {}
        self.data = content(disk / "data", scale.file)

    def note(self, text: str) -> None:
        """Say it now, and in the results."""
        print(f"  {text}", flush=True)
        self.notes.append(text)

    def cpu(self, *, tls: bool) -> list[Row]:
        """CPU seconds per GB of everyone."""
        name = "tls" if tls else "http"
        job = self.server.job(tls=tls, peers=str(self.peers))
        found: dict[str, list[float]] = {}
        tiny = content(self.disk / "tiny", 40 * MIB)
        for client in ["ours", *self.names]:
            try:
                run(self.server, client, replace(job, files=[str(tiny)]))
                found[client] = []
            except Failed as error:
                reason = str(error).splitlines()[-1].replace(str(self.disk), "").replace(str(self.peers), "")
                self.note(f"{client} over {name} left out: {reason[-300:]}")
        # rclone throws what it has read out of the page cache: the others would have to read from the disk.
        own = content(self.disk / "rclone", self.scale.file) if "rclone" in found else self.data
        for number in range(self.scale.rounds):
            for client in turned(list(found), number):
                data = own if client == "rclone" else self.data
                read(data)
                done = run(self.server, client, replace(job, files=[str(data)]))
                if done.seen["received"] < self.scale.file:
                    raise SystemExit(f"{client}: {done.seen['received']} bytes came of {self.scale.file}")
                found[client].append(done.cpu_s / (self.scale.file / GB))
        self.medians[f"cpu {name}"] = {client: round(statistics.median(took), 3) for client, took in found.items()}
        print("  ", self.medians[f"cpu {name}"], flush=True)
        ours = found.pop("ours")
        best = min(found, key=lambda client: statistics.median(found[client]))
        return [
            row(f"cpu {name}", "CPU s/GB", ours, found[best], best, 0.75 if tls else 0.5),
            row(f"cpu {name}, absolute", "CPU s/GB", ours, None, "", 0.8 if tls else 0.3),
        ]

    def upload_rate(self) -> Row:
        """GB/s on loopback beside bare `sendfile`, with as many sockets as suit that best."""
        job = self.server.job(files=[str(self.data)] * self.scale.bulk)
        runs: dict[str, list[Run]] = {"ours": [], "raw 1": [], "raw 2": [], "raw 4": []}
        for number in range(self.scale.rounds):
            for client in turned(list(runs), number):
                kind, _, sockets = client.partition(" ")
                used = replace(job, connections=int(sockets)) if sockets else job
                read(self.data)
                runs[client].append(run(self.server, kind, used))
        size = self.scale.file * self.scale.bulk
        rates = {client: [size / GB / one.wall_s for one in done] for client, done in runs.items()}
        return self._rates("upload, loopback", "sendfile", runs, rates)

    def restore_rate(self) -> Row:
        """GB/s on loopback beside bare receive-and-write of the same object."""
        saved = self._kept(self.data)
        runs: dict[str, list[Run]] = {"ours": [], "raw 1": [], "raw 2": [], "raw 4": []}
        size = self.scale.file
        for number in range(self.scale.rounds):
            for client in turned(list(runs), number):
                sockets = client.partition(" ")[2]
                with tempfile.TemporaryDirectory(dir=self.folder) as target:
                    if sockets:
                        extra = {"object": saved["object"], "size": size}
                        job = self.server.job(target=target, connections=int(sockets), extra=extra)
                        runs[client].append(run(self.server, "raw_receive", job))
                    else:
                        job = self.server.job(
                            target=f"{target}/restored", manifest=saved["manifest"], extra={"bucket": "kept"}
                        )
                        runs[client].append(run(self.server, "ours_restore", job))
        rates = {client: [size / GB / one.told["wall_s"] for one in done] for client, done in runs.items()}
        return self._rates("restore, loopback", "receive and write", runs, rates)

    def _kept(self, data: Path) -> dict[str, Any]:
        """Save one file so that it can be had back; the sink's name of the object that holds it."""
        with tempfile.TemporaryDirectory(dir=self.disk) as folder:
            os.link(data, Path(folder) / "model.bin")
            job = self.server.job(files=[folder], extra={"bucket": "kept"})
            told = run(self.server, "ours_save", job).told
        return {"manifest": tuple(told["manifest"]), "object": self.server.meter()["largest"]}

    def _rates(self, measure: str, what: str, runs: dict[str, list[Run]], rates: dict[str, list[float]]) -> Row:
        raw = max((name for name in rates if name != "ours"), key=lambda name: statistics.median(rates[name]))
        for name in ("ours", raw):
            middle = sorted(runs[name], key=lambda one: one.told["wall_s"])[len(runs[name]) // 2]
            self.note(f"{measure}: {name} is bound by {middle.bound()}")
        peer = f"bare {what}, sockets: {raw.partition(' ')[2]}"
        return row(measure, "GB/s", rates["ours"], rates[raw], peer, 0.7, more_is_better=True)

    def capped(self) -> list[Row]:
        """Whether the cap holds, and whether CPU goes with it."""
        errors, peaks, costs = [], [], []
        for cap in self.scale.caps:
            size = int(cap * self.scale.cap_s)
            data = content(self.disk / "capped", size)
            done = run(self.server, "ours", self.server.job(files=[str(data)], cap=cap))
            rates = windows(done.seen["ticks"], self.scale.window_s)
            errors += [max(abs(rate / cap - 1) for rate in rates) * 100]
            peaks += [max(windows(done.seen["ticks"], 0.1)) / cap]
            costs += [done.cpu_s / (size / GB)]
            self.note(
                f"cap {cap / 1e6:.0f} MB/s: off by {errors[-1]:.2f} % over {self.scale.window_s:.0f} s, fullest 100 ms "
                f"{peaks[-1]:.3f} x cap, {costs[-1] * cap / GB:.4f} CPU s/s = {costs[-1]:.3f} CPU s/GB"
            )
            data.unlink()
        most = f"{max(self.scale.caps) / 1e6:.0f} MB/s"
        return [
            worst(row(f"cap, {self.scale.window_s:.3g} s windows: off by", "%", errors, None, "", 3.0)),
            worst(row("cap, fullest 100 ms", "x cap", peaks, None, "", 1.2)),
            row("CPU s/GB under the lowest cap", "CPU s/GB", costs[:1], costs[-1:], f"ours under {most}", 1.5),
        ]

    def small_files(self) -> list[Row]:
        """Files of 4 KB per second: saved as a checkpoint, and with one PUT each."""
        few, all_ = self._small("few", self.scale.each), self._small("small", self.scale.small)
        found: dict[tuple[str, str], list[float]] = {}
        kinds = [("ours_save", "sink"), ("ours_each", "sink"), ("boto3_each", "sink")]
        kinds += [("ours_save", "slow"), ("ours_each", "slow")]
        for number in range(min(self.scale.rounds, 3)):
            for client, bucket in turned(kinds, number):
                folder, count = (all_, self.scale.small) if client == "ours_save" else (few, self.scale.each)
                done = run(self.server, client, self.server.job(files=[str(folder)], extra={"bucket": bucket}))
                found.setdefault((client, bucket), []).append(count / done.told["wall_s"])
                if number == 0:
                    self.note(
                        f"files of 4 KB, {client} to {bucket}: {done.cpu_s / count * 1e6:.0f} CPU us per file, "
                        f"{done.seen['requests']} requests for {count}, peak memory {done.told['peak_mib']:.0f} MiB"
                    )
        ours, name = found["ours_save", "sink"], "files of 4 KB"
        slow = f"{name}, store answers in {SLOW_S * 1000:.0f} ms"
        each, alone = "one PUT each", "one PUT each, our client"
        more = {"more_is_better": True}
        return [
            row(name, "files/s", ours, found["boto3_each", "sink"], f"{each}, boto3", 10, **more),
            row(slow, "files/s", found["ours_save", "slow"], found["ours_each", "slow"], alone, 10, **more),
            row(f"{name}, store answers at once", "files/s", ours, found["ours_each", "sink"], alone, 10, **more),
        ]

    def _small(self, name: str, count: int) -> Path:
        folder, block = self.folder / name, os.urandom(4000)
        folder.mkdir()
        for number in range(count):
            (folder / f"{number:06d}.bin").write_bytes(number.to_bytes(96, "big") + block)
        return folder

    def memory(self) -> Row:
        """The agent's peak while a checkpoint of 8 sparse shards passes."""
        from airflow_gpu_burst.runtime.agent_process import Agent

        with tempfile.TemporaryDirectory(dir=self.disk) as temporary:
            folder = Path(temporary) / "folder"
            folder.mkdir()
            for number in range(8):
                with (folder / f"shard-{number}.bin").open("wb") as file:
                    file.write(os.urandom(MIB))
                    file.truncate(self.scale.sparse // 8)
            agent = Agent(self.environ())
            state = Path(temporary) / "state"
            state.mkdir()
            self.server.meter("reset")
            agent.save(folder, "data/sparse", state, progress=lambda *_: None, check=lambda: None)
            seen = self.server.meter()
            self.note(
                f"agent: {seen['received'] / GB:.1f} GB sent in {seen['seconds']:.0f} s, {agent.restarts} restarts"
            )
            peak = agent.memory / 1e6
            agent.close()
        return row(f"agent's memory, {self.scale.sparse / GB:.0f} GB in 8 shards", "MB", [peak], None, "", 200)

    def stall(self, torch: Path | None) -> Row:
        """What a save costs the trainer beyond its own write."""
        programs = {"ours": sys.executable, **({"peer": str(torch)} if torch else {})}
        stalls: dict[str, list[float]] = {}
        for which, python in programs.items():
            with tempfile.TemporaryDirectory(dir=self.disk) as folder:
                command = [python, str(HERE / "transfer_stall.py"), which, folder, str(self.scale.file)]
                done = subprocess.run(
                    [*command, str(self.scale.saves)], env=self.environ(), capture_output=True, text=True
                )
            if done.returncode:
                raise SystemExit(f"{' '.join(command)}: {done.stderr[-1500:]}")
            line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
            stalls[which] = [seconds * 1000 for seconds in json.loads(line.removeprefix("RESULT"))["stalls_s"]]
        if not torch:
            self.note("torch: not there, async_save left out")
        made = row("stall per save", "ms", stalls["ours"], stalls.get("peer"), "async_save" if torch else "", 10.0)
        return worst(made)

    def environ(self) -> dict[str, str]:
        """Of a runtime whose store is the sink."""
        told = {
            "GPU_BURST_STORE": "s3://sink/agent",
            "GPU_BURST_S3_ENDPOINT": self.server.job().endpoint,
            "AWS_REGION": REGION,
            "AWS_ACCESS_KEY_ID": ACCESS,
            "AWS_SECRET_ACCESS_KEY": SECRET,
        }
        return {**os.environ, **told}


def worst(made: Row) -> Row:
    """
    With a goal for ours alone, in its own unit, that the worst of all has to keep.

    No ratio: a peer's stall beyond its own write can come out below zero, where the writes differ by more than that.
    """
    return replace(made, ratio=None, met=made.spread[1] <= made.goal)


def content(path: Path, size: int) -> Path:
    """A file of bytes that do not repeat within a MiB, on the disk and in the page cache."""
    if not path.exists() or path.stat().st_size != size:
        block = os.urandom(MIB)
        with path.open("wb") as file:
            for at in range(0, size, MIB):
                file.write(block[: size - at])
            file.flush()
            os.fsync(file.fileno())  # else writing it back would be part of what is measured
    return path


def read(path: Path) -> None:
    """Have a file in the page cache."""
    with path.open("rb", buffering=0) as file:
        while file.read(MIB):
            pass


def turned(names: list[T], by: int) -> list[T]:
    """Another one begins each round."""
    by %= len(names)
    return names[by:] + names[:by]


def windows(ticks: Sequence[int], seconds: float) -> list[float]:
    """Bytes per second of every window of that length."""
    width = round(seconds / TICK_S)
    if len(ticks) < width:
        raise ValueError(f"a window of {seconds} s is longer than the {len(ticks) * TICK_S:.2f} s that were measured")
    total = sum(ticks[:width])
    found = [total]
    for new, old in zip(ticks[width:], ticks, strict=False):
        total += new - old
        found.append(total)
    return [count / (width * TICK_S) for count in found]
