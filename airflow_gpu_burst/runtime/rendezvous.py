"""Where the ranks of a trainer find each other: the name of rank 0's pod, once the cluster's DNS knows it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

NAME_S = 60.0
"""The DNS learns a pod's name after the pod has started, and may remember for 30 s that there was none."""
_PAUSE_S = 0.5


def await_name(name: str, sleep: Callable[[float], None], *, wait_s: float = NAME_S) -> bool:
    """
    Wait until a host name resolves. False: it does not, and whoever asks for it next is to say so.

    A trainer that asks once, in its first second, would fail on a cluster where nothing is wrong.

    :param sleep: what it raises ends the wait.
    """
    until = time.monotonic() + wait_s
    while True:
        try:
            socket.getaddrinfo(name, None)
        except OSError:
            if time.monotonic() > until:
                return False
            sleep(_PAUSE_S)
        else:
            return True
