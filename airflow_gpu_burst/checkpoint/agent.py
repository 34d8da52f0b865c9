"""
The process that moves a node's checkpoints: `gpu-burst checkpoint agent`, started by the runtime.

A process and not a thread: a thread would share the interpreter's lock with what watches over the trainer, and what
uses much memory or crashes here takes nothing else with it. It only moves bytes. It knows no run log and commits
nothing; killed at any time it is started again, is given the same request, and goes on from the state that is on disk.

JSON lines. On standard input, one request at a time:

    {"save": {"folder": ..., "prefix": ..., "state": ...}}
    {"restore": {"manifests": [[key, sha256], ...], "target": ..., "local": [folder, ...], "kept": folder}}

On standard output any number of `{"progress": [bytes done, bytes in all]}`, then one of

    {"saved": {...}, "tally": {...}}     the fields of `Manifest`
    {"restored": {...}, "tally": {...}}  the fields of `Restored`
    {"failed": {"error": class, "message": text}}

`tally` is what the request moved (`transfer.Tally`), and `memory` the most bytes that this process ever held. The store
and its secrets come by environment, see `StoreConfig.from_env`; how to move in ENV_SETTINGS, JSON.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from airflow_gpu_burst.errors import ExitCode, GpuBurstError
from airflow_gpu_burst.store import StoreConfig

ENV_SETTINGS = "GPU_BURST_TRANSFER"
"""The fields of `transfer.Settings` as JSON."""
NICE = 5
"""Below the trainer and its data loaders: they lose to nobody on a busy node, and an idle core serves as well."""
PROGRESS_S = 0.5


def main() -> int:
    """Serve until standard input ends. Exit code."""
    os.nice(NICE)
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, _end)
    with _own_output() as out:
        requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        busy = threading.Event()
        threading.Thread(target=_listen, args=(requests, busy), name="gpu-burst-agent", daemon=True).start()
        agent = _Server(out)
        agent.warm()
        while (line := requests.get()) is not None:
            busy.set()
            agent.serve(line)
            busy.clear()
        agent.close()
    return ExitCode.OK


class _Server:
    """Requests of one runtime, over one mover: connections, cap and slow start outlive a request."""

    def __init__(self, out: BinaryIO) -> None:
        self._out, self._lock = out, threading.Lock()
        self._mover: Any = None

    def serve(self, line: bytes) -> None:
        """Answer one request; whatever goes wrong is an answer."""
        try:
            ((verb, arguments),) = json.loads(line).items()
            before = self._tally()
            answer = {"save": self._save, "restore": self._restore}[verb](arguments, self._progress())
            after = self._tally()
            answer["tally"] = {name: after[name] - before.get(name, 0) for name in after}
            answer["memory"] = _memory()
        except GpuBurstError as error:
            answer = {"failed": {"error": type(error).__name__, "message": str(error)}}
        except Exception as error:
            traceback.print_exc()
            answer = {"failed": {"error": "", "message": f"{type(error).__name__}: {error}"}}
        self._say(answer)

    def warm(self) -> None:
        """Import what a request will need; what goes wrong with it, the request will tell."""
        with suppress(Exception):
            import_module("airflow_gpu_burst.checkpoint.saving")
            self._open()

    def close(self) -> None:
        """Let go of the connections."""
        if self._mover is not None:
            self._mover.close()

    def _save(self, arguments: Mapping[str, Any], progress: Callable[[int, int], None]) -> dict[str, Any]:
        from airflow_gpu_burst.checkpoint import save

        saved = save(
            self._open(),
            Path(arguments["folder"]),
            arguments["prefix"],
            state=Path(arguments["state"]),
            progress=progress,
        )
        return {"saved": asdict(saved)}

    def _restore(self, arguments: Mapping[str, Any], progress: Callable[[int, int], None]) -> dict[str, Any]:
        from airflow_gpu_burst.checkpoint import restore

        # There already: it was whole, and whoever had made it was killed before it could say so.
        shutil.rmtree(arguments["target"], ignore_errors=True)
        restored = restore(
            self._open(),
            [(key, sha256) for key, sha256 in arguments["manifests"]],
            Path(arguments["target"]),
            local=[Path(folder) for folder in arguments["local"]],
            kept=Path(arguments["kept"]) if arguments["kept"] else None,
            progress=progress,
        )
        return {"restored": asdict(restored)}

    def _open(self) -> Any:
        if self._mover is None:
            from airflow_gpu_burst.transfer import Settings, open_mover

            settings = Settings(**json.loads(os.environ.get(ENV_SETTINGS) or "{}"))
            self._mover = open_mover(StoreConfig.from_env(os.environ), settings)
        return self._mover

    def _tally(self) -> dict[str, int]:
        return {} if self._mover is None else asdict(self._mover.tally)

    def _progress(self) -> Callable[[int, int], None]:
        due = 0.0

        def tell(done: int, total: int) -> None:
            nonlocal due
            if (now := time.monotonic()) >= due:
                due = now + PROGRESS_S
                self._say({"progress": [done, total]})

        return tell

    def _say(self, answer: Mapping[str, Any]) -> None:
        data = json.dumps(answer, ensure_ascii=False).encode(errors="replace") + b"\n"
        with self._lock:  # progress is told by whatever thread has moved something
            try:
                self._out.write(data)
                self._out.flush()
            except OSError:
                os._exit(ExitCode.RETRY_MAY_HELP)  # nobody is there who could use what is being moved


def _memory() -> int:
    """The most bytes that were resident. Not ru_maxrss: that begins with those of whoever started this process."""
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


@contextmanager
def _own_output() -> Iterator[BinaryIO]:
    """Standard output for answers alone: what a library prints goes to standard error."""
    own = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(own, "wb") as out:
        yield out


def _listen(requests: queue.SimpleQueue[bytes | None], busy: threading.Event) -> None:
    """
    Hand on requests; the end of them is the runtime's end, however it came.

    Not PR_SET_PDEATHSIG: that comes when the *thread* which started this process ends, and that is the uploader's.
    """
    for line in sys.stdin.buffer:
        requests.put(line)
    if busy.is_set():
        os._exit(ExitCode.RETRY_MAY_HELP)
    requests.put(None)


def _end(_number: int, _frame: object) -> None:
    """
    SIGTERM. At once and without any cleaning up, as if killed: what is on disk and in the store is what a later process
    goes on from, and an orderly end of an upload would abort it.
    """
    os._exit(ExitCode.RETRY_MAY_HELP)
