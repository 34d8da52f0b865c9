"""Whether a store honours `create` when several writers race for one key. Asked, not believed."""

from __future__ import annotations

import os
from contextlib import suppress
from threading import Barrier
from typing import TYPE_CHECKING

from airflow_gpu_burst.errors import ObjectExists, ObjectMissing, StoreError, StoreUnavailable
from airflow_gpu_burst.store.interface import Store

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

CONDITIONS_HOLD_S = 7 * 86400.0
"""How long a store is believed to honour conditions: it may be upgraded or moved."""

_ANSWER = "probe/conditions"
_REPEATS = 5  # of one writer whose answer was lost


def probe_conditions(store: Store, *, writers: int = 4, rounds: int = 6) -> None:
    """
    Raise StoreError unless exactly one of several simultaneous writers gets each of some fresh keys.

    In sequence would prove nothing: servers exist that check the condition before they store the body,
    and take no lock. A race that is not lost proves little either; hence several writers and rounds.
    Leaves no key behind.
    """
    from concurrent.futures import ThreadPoolExecutor

    base = f"probe/{os.urandom(8).hex()}"
    with ThreadPoolExecutor(writers) as pool:
        for turn in range(rounds):
            key = f"{base}/{turn}"
            try:
                _race(store, key, pool, writers)
            finally:
                with suppress(StoreError):
                    store.delete(key)


def assure_conditions(store: Store, *, now: float) -> None:
    """
    Raise StoreError unless the store was seen to honour conditions: asked with `probe_conditions` at most once in
    CONDITIONS_HOLD_S, since that is some fifty requests; the answer is kept in the store.

    :param now: wall clock, seconds since the epoch.
    """
    try:
        asked = float(store.get(_ANSWER))
    except (ObjectMissing, ValueError):
        asked = 0.0
    if not 0 <= now - asked < CONDITIONS_HOLD_S:
        probe_conditions(store)
        store.put(_ANSWER, str(now).encode())


def _race(store: Store, key: str, pool: ThreadPoolExecutor, writers: int) -> None:
    gate = Barrier(writers, timeout=60)
    values = [f"{key} {writer}".encode() for writer in range(writers)]

    def write(value: bytes) -> bool:
        gate.wait()
        return _won(store, key, value)

    won = [value for value, winner in zip(values, pool.map(write, values), strict=True) if winner]
    found = store.get(key)
    if len(won) != 1 or found != won[0]:
        raise StoreError(
            f"{store.uri} does not honour conditional writes: {len(won)} of {writers} simultaneous writers "
            "were told that they had created the same key, so two copies of a run could both commit. Use a "
            "store that implements `If-None-Match: *` atomically (AWS S3, MinIO since 2024-05), or, on one "
            "machine, a file:/// store"
        )
    with suppress(ObjectExists):
        store.create(key, b"late")
        raise StoreError(
            f"{store.uri} ignores `If-None-Match: *`: a second write to the same key was accepted. Upgrade "
            "the store, or use another one"
        )


def _won(store: Store, key: str, value: bytes) -> bool:
    for left in reversed(range(_REPEATS)):
        try:
            store.create(key, value)
            return True
        except ObjectExists:
            with suppress(ObjectMissing):
                return store.get(key) == value
        except StoreUnavailable:
            if not left:
                raise
    raise StoreUnavailable(f"{store.uri} says of {key!r} both that it exists and that it does not: try again")
