"""What every part of the lab shares: where things live, how a server is started, watched and stopped."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOG_LINES = 15
MARK = "LAB_PROCESS"
"""In the environment of every process that belongs to a lab: its folder. How `down` finds those without a pid file."""


class LabError(Exception):
    """Something a person has to act on; printed without a traceback."""


def default_cache() -> Path:
    """$LAB_CACHE; else a folder that does not depend on HOME for root, and the user's cache for anybody else."""
    if named := os.environ.get("LAB_CACHE"):
        return Path(named)
    if os.geteuid() == 0:
        return Path("/var/cache/gpu-burst-lab")
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "gpu-burst-lab"


@dataclass(frozen=True)
class Lab:
    """One lab: a folder for everything that `down` deletes, and a cache that survives it."""

    dir: Path
    cache: Path = field(default_factory=default_cache)

    @property
    def bin(self) -> Path:
        return self.cache / "bin"

    @property
    def images(self) -> Path:
        return self.cache / "images"

    @property
    def tmp(self) -> Path:
        """What servers and tools leave in a temporary folder or a home goes here, and away with the lab."""
        folder = self.dir / "tmp"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def run_dir(self) -> Path:
        """Pid files and logs of every process this lab started."""
        return self.dir / "run"

    def binary(self, name: str) -> str:
        path = self.bin / name
        if not path.exists():
            raise LabError(f"{name} is not built: run `lab.py build` first (looked in {self.bin})")
        return str(path)


def sh(
    *argv: str | Path,
    stdin: str | None = None,
    check: bool = True,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> str:
    """Run a command to its end and return its standard output; a failure carries its standard error."""
    done = subprocess.run(
        [str(a) for a in argv], input=stdin, text=True, capture_output=True, env=dict(env) if env else None, cwd=cwd
    )
    if check and done.returncode:
        raise LabError(
            f"`{' '.join(map(str, argv))[:200]}` exited {done.returncode}:\n"
            + (done.stderr or done.stdout).strip()[-2000:]
        )
    return done.stdout


def require(*programs: str) -> None:
    missing = [p for p in programs if not shutil.which(p)]
    if missing:
        raise LabError(f"not installed: {', '.join(missing)} (`lab.py build` installs the Debian packages)")


# --- processes -----------------------------------------------------------------------------------------------------


def birth(pid: int) -> str | None:
    """Start time of a process in clock ticks; with the pid it names one process for good. None when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rsplit(")", 1)[1].split()
    return None if fields[0] == "Z" else fields[19]


def send(pid: int, number: signal.Signals) -> None:
    """Signal a process that may be gone already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@dataclass(frozen=True)
class Server:
    """A process with a pid file and a log, known by a name such as `gpu/kubelet`."""

    lab: Lab
    name: str

    @property
    def log(self) -> Path:
        return self.lab.run_dir / f"{self.name}.log"

    @property
    def pid_file(self) -> Path:
        return self.lab.run_dir / f"{self.name}.pid"

    def pid(self) -> int | None:
        """The pid while the process runs; a pid that now belongs to somebody else does not count."""
        try:
            known = json.loads(self.pid_file.read_text())
        except (FileNotFoundError, ValueError):
            return None
        return known["pid"] if birth(known["pid"]) == known["birth"] else None

    def tail(self, lines: int = LOG_LINES) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""

    def start(self, *argv: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Server:
        if self.pid():
            return self
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if self.log.exists():
            self.log.replace(self.log.with_suffix(".log.1"))
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                [str(a) for a in argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **(env or {}), MARK: str(self.lab.dir)},
                cwd=cwd,
                start_new_session=True,
            )
        known = {"pid": process.pid, "birth": birth(process.pid), "argv": [str(a) for a in argv]}
        self.pid_file.write_text(json.dumps(known))
        return self

    def ready(self, probe: Callable[[], bool], timeout: float = 60) -> None:
        """Wait until `probe` is true; fail at once, with the last log lines, when the process dies before."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if self.pid() is None:
                raise LabError(f"{self.name} died while starting. Last lines of {self.log}:\n{self.tail()}")
            try:
                if probe():
                    return
            except (OSError, LabError, subprocess.SubprocessError):
                pass
            time.sleep(0.2)
        raise LabError(f"{self.name} was not ready after {timeout:.0f} s. Last lines of {self.log}:\n{self.tail()}")

    def stop(self, grace: float = 10) -> bool:
        """
        SIGTERM, then SIGKILL to its whole group after `grace` seconds: a script does not always take its child along.
        True when there was something to stop.
        """
        pid = self.pid()
        if pid is not None:
            send(pid, signal.SIGTERM)
            end = time.monotonic() + grace
            while self.pid() is not None and time.monotonic() < end:
                time.sleep(0.05)
            if self.pid() is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                while self.pid() is not None:
                    time.sleep(0.05)
        self.pid_file.unlink(missing_ok=True)
        return pid is not None


def servers(lab: Lab) -> Sequence[Server]:
    """Every process this lab ever started and has not cleaned up, oldest first."""
    files = sorted(lab.run_dir.rglob("*.pid"), key=lambda p: p.stat().st_mtime_ns) if lab.run_dir.exists() else []
    return [Server(lab, str(p.relative_to(lab.run_dir).with_suffix(""))) for p in files]
