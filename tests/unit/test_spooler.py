"""The spool: pieces that meet end to end, whatever the store does."""

from __future__ import annotations

import threading
from pathlib import Path

from airflow_gpu_burst.errors import StoreUnavailable
from airflow_gpu_burst.runtime.output import Output, Spooler, chunk_key, send_rest
from airflow_gpu_burst.store import Store, StoreConfig, open_store


def spooled(store: Store, stream: str = "s") -> bytes:
    data, pieces = b"", {entry.key: entry.size for entry in store.list(f"{stream}/")}
    while (key := chunk_key(stream, len(data))) in pieces:
        data += store.get(key)
        del pieces[key]
    assert not pieces, f"pieces that nobody finds: {pieces}"
    return data


class Halting:
    """In front of a real store: `put` waits for `gate`, then the first `failures` of them fail."""

    def __init__(self, store: Store, failures: int = 0) -> None:
        self.store, self.failures = store, failures
        self.gate, self.reached = threading.Event(), threading.Event()

    def put(self, key: str, data: bytes) -> None:
        self.reached.set()
        self.gate.wait(20)
        if self.failures:
            self.failures -= 1
            raise StoreUnavailable("503")
        self.store.put(key, data)


def test_a_piece_that_is_under_way_is_not_sent_twice(tmp_path: Path) -> None:
    store = open_store(StoreConfig(uri=f"file://{tmp_path}/store"))
    path = tmp_path / "output.log"
    path.write_bytes(b"first\n")
    slow = Halting(store)
    spooler = Spooler(slow, path, lambda offset: chunk_key("s", offset))  # type: ignore[arg-type]
    spooler.start()
    assert slow.reached.wait(20)
    with path.open("ab") as file:
        file.write(b"second\n" * 1000)
    assert spooler.finish(timeout_s=0.2) is False
    slow.gate.set()
    spooler.join(20)
    send_rest(store, path, "s")
    assert spooled(store) == path.read_bytes()


def test_a_store_that_is_down_for_a_while_only_delays(tmp_path: Path) -> None:
    store = open_store(StoreConfig(uri=f"file://{tmp_path}/store"))
    path = tmp_path / "output.log"
    path.write_bytes(b"line\n" * 500_000)
    failing = Halting(store, failures=2)
    failing.gate.set()
    spooler = Spooler(failing, path, lambda offset: chunk_key("s", offset))  # type: ignore[arg-type]
    spooler.start()
    assert spooler.finish(timeout_s=20)
    assert spooled(store) == path.read_bytes()


def test_our_own_lines_never_stand_in_the_middle_of_another(tmp_path: Path) -> None:
    output = Output(tmp_path / "output.log")
    output.write(b"half a li")
    output.say("hello")
    output.write(b"whole\n")
    output.say("again")
    output.close()
    assert output.path.read_text() == "half a li\ngpu-burst: hello\nwhole\ngpu-burst: again\n"
