"""A trainer starts once rank 0's name resolves."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from airflow_gpu_burst.runtime.rendezvous import await_name


class Dns:
    """Knows a name from the n-th question on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, knows_at: int) -> None:
        self.asked, self._knows_at = 0, knows_at
        monkeypatch.setattr(socket, "getaddrinfo", self._answer)

    def _answer(self, *_: Any) -> list[Any]:
        self.asked += 1
        if self.asked < self._knows_at:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return []


@pytest.mark.parametrize("knows_at", [1, 4])
def test_it_asks_until_there_is_an_answer(monkeypatch: pytest.MonkeyPatch, knows_at: int) -> None:
    dns, slept = Dns(monkeypatch, knows_at), list[float]()
    assert await_name("rank-0.run", slept.append)
    assert (dns.asked, len(slept)) == (knows_at, knows_at - 1)


def test_it_gives_up_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    Dns(monkeypatch, 1 << 30)
    assert not await_name("rank-0.run", lambda _: None, wait_s=0.05)


def test_whoever_is_told_to_end_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    Dns(monkeypatch, 1 << 30)

    def stop(_: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await_name("rank-0.run", stop)
