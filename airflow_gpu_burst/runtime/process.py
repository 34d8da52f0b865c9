"""The trainer as a process: started in a group of its own, its output drained, ended with all it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from airflow_gpu_burst.errors import SpecError
from airflow_gpu_burst.runtime.output import Output


class TrainerProcess:
    """
    One trainer.

    :param pass_fds: descriptors that it inherits (the local route's trainer lock).
    :raises SpecError: the command or its working folder does not exist.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        output: Output,
        pass_fds: Sequence[int] = (),
    ) -> None:
        if not cwd.is_dir():
            raise SpecError(f"working_dir {str(cwd)!r} is not a folder here; correct working_dir of the operator")
        try:
            self._process = subprocess.Popen(
                list(command),
                cwd=cwd,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=0,
                pass_fds=tuple(pass_fds),
            )
        except (OSError, ValueError) as error:
            raise SpecError(
                f"cannot start {command[0]!r}: {error}. It must be in the image's PATH, executable, and a script must "
                "begin with a line like #!/bin/sh"
            ) from error
        self._pump = threading.Thread(target=self._drain, args=(output,), name="gpu-burst-output", daemon=True)
        self._pump.start()

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its group."""
        return self._process.pid

    def wait(self, timeout_s: float) -> int | None:
        """Exit status (negative: the signal that killed it), or None when it still runs after the time."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def signal(self, number: signal.Signals) -> None:
        """Signal the whole group; nothing happens when it is gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def end(self, grace_s: float) -> int:
        """SIGTERM, wait `grace_s` seconds, SIGKILL. Returns the exit status."""
        self.signal(signal.SIGTERM)
        status = self.wait(grace_s)
        if status is None:
            self.signal(signal.SIGKILL)
            status = self._process.wait()
        return status

    def close(self) -> None:
        """End what the trainer left behind and take the last of its output."""
        self.signal(signal.SIGKILL)
        # A child in a session of its own may hold the pipe open; its lines are not waited for.
        self._pump.join(timeout=2.0)

    def _drain(self, output: Output) -> None:
        # Bytes, not lines: a line can be a megabyte, and a progress bar never ends one.
        stream = self._process.stdout
        if stream is None:
            return
        with stream:
            while data := os.read(stream.fileno(), 65536):
                output.write(data)


def describe_exit(status: int) -> str:
    """What an exit status means, for people."""
    if status >= 0:
        return f"exited with {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = "; the machine may be out of memory: see `dmesg`, ask for more memory" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def boot_id() -> str:
    """Identity of this boot of the machine; empty where the kernel does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot: with the pid, its identity. None: no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def kill_group(pid: int, ticks: int, *, wait_s: float = 10.0) -> None:
    """
    SIGKILL what is left of the group led by `pid`, provided that it is the process that started at `ticks`.

    When the leader is gone its number still names its group: the kernel gives it to nobody else as
    long as a member lives.
    """
    if start_ticks(pid) not in (ticks, None):
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    deadline = time.monotonic() + wait_s
    while start_ticks(pid) == ticks and time.monotonic() < deadline:
        time.sleep(0.02)
