"""The runtime's end of the checkpoint agent: starts it, asks it, starts it again when it dies."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import airflow_gpu_burst
from airflow_gpu_burst import contract, errors
from airflow_gpu_burst.checkpoint import Manifest, Restored
from airflow_gpu_burst.checkpoint.agent import ENV_SETTINGS
from airflow_gpu_burst.errors import AgentLost, GpuBurstError
from airflow_gpu_burst.runtime.process import describe_exit

RESTARTS = 3
"""For one request. A process that dies four times over the same files will die a fifth time."""
_POLL_S = 0.1
_LAST_WORDS = 600
_END_S = 2.0
"""For a process that is ending anyhow to say its last words."""

Progress = Callable[[int, int], None]
Check = Callable[[], None]


class Agent:
    """
    One agent process, started when it is first needed. One request at a time; a second caller waits for its turn.

    :param env: of the runtime: the store with its secrets, and how Python finds this package.
    :param settings: the fields of `transfer.Settings`.
    """

    def __init__(self, env: Mapping[str, str], settings: Mapping[str, Any] | None = None) -> None:
        self._env = {**_environment(env), ENV_SETTINGS: json.dumps(dict(settings or {}))}
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        # Not a pipe: nobody would empty it while a request runs.
        self._words = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
        self.tally: Counter[str] = Counter()
        self.memory = 0
        self.restarts = 0

    def start(self) -> None:
        """Start it ahead of the first request, which then need not wait for its imports."""
        with self._turn:
            self._process = self._process or self._start()

    def save(self, folder: Path, prefix: str, state: Path, *, progress: Progress, check: Check) -> Manifest:
        """
        Bring a folder into the store. The same three again after a failure go on where it came to.

        :param state: where the state of an unfinished upload is kept.
        :param progress: told bytes done and bytes in all, about twice a second.
        :param check: called every 0.1 s; what it raises ends the agent, and is raised here.
        :raises CheckpointError: it cannot be saved.
        :raises AgentLost: the agent died over it again and again.
        :raises StoreError: the store does not take it now.
        """
        request = {"save": {"folder": str(folder), "prefix": prefix, "state": str(state)}}
        return Manifest(**self._ask(request, progress, check)["saved"])

    def restore(
        self,
        manifests: Sequence[tuple[str, str]],
        target: Path,
        local: Sequence[Path],
        *,
        kept: Path | None = None,
        progress: Progress,
        check: Check,
    ) -> Restored:
        """
        Bring saved trees back; parameters and errors are those of `checkpoint.restore` and of `save`.

        :raises ChecksumMismatch: what is in the store is not what was saved.
        :raises ObjectMissing: the store has lost some of it.
        """
        places = {"target": str(target), "local": [str(folder) for folder in local], "kept": str(kept or "")}
        request = {"restore": {"manifests": [list(manifest) for manifest in manifests], **places}}
        return Restored(**self._ask(request, progress, check)["restored"])

    def close(self) -> None:
        """The agent ends, and with it a request that is still running; there will be no other."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()
        # Its pipes belong to whoever reads them: closing them here would give their numbers to somebody else.
        if self._turn.acquire(timeout=_END_S):
            self._dispose(0.0)
            self._words.close()
            self._turn.release()

    def _ask(self, request: Mapping[str, Any], progress: Progress, check: Check) -> dict[str, Any]:
        line = json.dumps(request).encode() + b"\n"
        with self._turn:
            for attempt in range(RESTARTS + 1):
                if self._closed:
                    raise GpuBurstError("the checkpoint agent was closed: the run is over")
                try:
                    answer = self._try(line, progress, check)
                except BaseException:
                    self._dispose(0.0)  # else it would go on moving what nobody waits for
                    raise
                if answer is not None:
                    return self._taken(answer)
                status = self._dispose(_END_S)
                self.restarts += 1
                _pause(0.2 * 4**attempt if attempt < RESTARTS else 0.0, check)
            raise AgentLost(
                f"the checkpoint agent {describe_exit(status)} ({RESTARTS + 1} times over the same request); its last "
                f"words: {self._last_words()}. If they do not say what to do, look at the memory of the pod"
            )

    def _try(self, line: bytes, progress: Progress, check: Check) -> dict[str, Any] | None:
        """The answer; None: the agent has died."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except OSError:
            return None
        out = process.stdout.fileno()
        poll = select.poll()
        poll.register(out, select.POLLIN)
        rest = b""
        while True:
            check()
            if not poll.poll(_POLL_S * 1000):
                continue
            data = os.read(out, 1 << 16)
            if not data:
                return None
            *lines, rest = (rest + data).split(b"\n")
            for said in map(json.loads, lines):
                if "progress" not in said:
                    return dict(said)
                progress(*said["progress"])

    def _taken(self, answer: dict[str, Any]) -> dict[str, Any]:
        if (failed := answer.get("failed")) is not None:
            known = getattr(errors, failed["error"] or "-", None)
            if isinstance(known, type) and issubclass(known, GpuBurstError):
                raise known(failed["message"])
            raise GpuBurstError(f"the checkpoint agent failed: {failed['message']}. That is a fault of ours: report it")
        self.tally.update(answer["tally"])
        self.memory = max(self.memory, answer["memory"])
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        self._words.seek(0)
        self._words.truncate()
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "airflow_gpu_burst.cli", "checkpoint", "agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            env=self._env,
            cwd="/",
            process_group=0,  # a Ctrl-C in a terminal is the runtime's to handle
        )

    def _dispose(self, wait_s: float) -> int:
        """Its exit status, after at most `wait_s` seconds: there is nothing that it would have to bring to an end."""
        process, self._process = self._process, None
        if process is None:
            return 0
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was not yet written has nobody to read it
                    pipe.close()
        try:
            return process.wait(wait_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def _last_words(self) -> str:
        self._words.seek(0)
        lines = self._words.read()[-_LAST_WORDS:].decode(errors="replace").split("\n")
        return " / ".join(line.strip() for line in lines if line.strip()) or "none"


def _pause(seconds: float, check: Check) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        check()
        time.sleep(min(_POLL_S, left))


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    """What a process of ours needs, and no secret that it has no use for."""
    own = {name: value for name, value in env.items() if name != contract.ENV_CATALOG_SECRETS}
    package = str(Path(airflow_gpu_burst.__file__).parent.parent)
    # A runtime that an init container brought is on no path of the image; here its packages may come first.
    path = [package, *filter(None, [own.get("PYTHONPATH")])]
    return {**own, "PYTHONPATH": os.pathsep.join(path)}
