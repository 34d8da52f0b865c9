"""What the API said about one run at one moment. Plain data, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]
"""An object as the API's JSON has it."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """
    A run's object with its pods and events; in no particular order.

    :param object: the top object; None if the API says that it is gone (a 404, or another UID under the name).
    :param pods: the pods that are there now, of all ranks and attempts.
    :param events: core events about the object, its pods and what stands between.
    :param last: with `object` None, how the object was last seen; None if it never was.
    """

    object: Object | None
    pods: tuple[Object, ...] = ()
    events: tuple[Object, ...] = ()
    last: Object | None = None
