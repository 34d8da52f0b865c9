"""Processes by session and by AIRFLOW_HOME, from /proc, and their end.

Run as a script with an AIRFLOW_HOME it is a watchdog: when its stdin closes, everything of that home ends.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    pid: int
    ppid: int
    session: int


def live() -> dict[int, Process]:
    """Every live (not zombie) process of the machine, by pid."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            # The name in parentheses may hold anything, so count from its end.
            state, ppid, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            if state not in "ZX":
                found[int(entry.name)] = Process(int(entry.name), int(ppid), int(session))
    return found


def marked(home: Path) -> set[int]:
    """Processes whose environment names this AIRFLOW_HOME: finds what tasks detached with setsid."""
    marker = f"AIRFLOW_HOME={home}".encode()
    found = set()
    for pid in live():
        with contextlib.suppress(OSError):
            if marker in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.add(pid)
    return found - {os.getpid()}


def kill(pid: int, signum: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def kill_until_gone(find: Callable[[], Iterable[int]], timeout_s: float = 15) -> None:
    """SIGKILL what ``find`` returns until it returns nothing: a process may fork while it is hunted."""
    deadline = time.monotonic() + timeout_s
    while left := set(find()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes survived SIGKILL for {timeout_s} s: {sorted(left)}")
        for pid in left:
            kill(pid)
        time.sleep(0.02)


def in_sessions(sessions: Collection[int]) -> set[int]:
    return {p.pid for p in live().values() if p.session in sessions}


def end_everything(home: Path) -> None:
    """End the sessions listed in the home's ``sessions`` file, and what their tasks detached."""
    listed = home / "sessions"
    sessions = {int(line) for line in listed.read_text().split()} if listed.exists() else set()
    kill_until_gone(lambda: in_sessions(sessions))
    kill_until_gone(lambda: marked(home))
    listed.unlink(missing_ok=True)


def _watch(home: Path) -> None:
    """Wait until the process at the other end of our stdin is gone, then clean up after it."""
    sys.stdin.read()
    end_everything(home)


if __name__ == "__main__":
    _watch(Path(sys.argv[1]))
