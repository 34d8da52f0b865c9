"""
Routes: the way to the machine that runs a job. Three verbs, create-or-adopt, no Airflow.

The connection decides the route. `local` runs the very same in-pod runtime as a process of its own on this
machine; routes to clusters join it behind the same interface.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from airflow_gpu_burst.errors import SpecError
from airflow_gpu_burst.spec import RunSpec
from airflow_gpu_burst.state import Handle, Observation, RunKey
from airflow_gpu_burst.store import Store


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """
    What a `gpu_cluster` connection says.

    :param route: `local` so far.
    :param work_dir: local route: folder for scratch files of the runs.
    :param grace_s: seconds between SIGTERM and SIGKILL; 10 leaves room within the 30 s that Airflow's triggerer
        gives to a kill.
    """

    connection: str
    route: str = "local"
    namespace: str = "default"
    queue: str = ""
    platform: str = "local"
    work_dir: str = ""
    grace_s: float = 10.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """
    One generation of a request, ready to be created.

    :param env: the environment that carries the contract; the store's credentials are among it.
    :param secret_env: names in `env` whose values are secret: by reference on a cluster.
    """

    name: str
    run_key: RunKey
    generation: int
    spec: RunSpec
    env: Mapping[str, str] = field(repr=False)
    secret_env: frozenset[str] = frozenset()


class Route(Protocol):
    """One way to run a job. Every method may be called from any worker or triggerer, any number of times."""

    name: str
    kind: str
    namespace: str

    def submit(self, job: Job) -> str:
        """
        Create the object, or adopt the one of that name when it is ours. Returns its UID.

        :raises SpecError: the name is taken by something that is not this run.
        :raises ClusterUnreachable: nothing is known; ask again.
        """

    def observe(self, handle: Handle) -> Observation:
        """One look at the object."""

    def salvage(self, handle: Handle, store: Store) -> None:
        """
        If the run is over: spool what of its output the pod could not, as far as it can still be had, and leave
        nothing of it on the machine.
        """

    def cancel(self, handle: Handle) -> None:
        """End it and what it started; nothing happens when it is gone."""


def open_route(config: ClusterConfig) -> Route:
    """
    The route that a connection names.

    :raises SpecError: a route that does not exist, or is not built yet.
    """
    if config.route == "local":
        from airflow_gpu_burst.routes.local import LocalRoute

        return LocalRoute(config)
    raise SpecError(
        f"route {config.route!r} of connection {config.connection!r} is not available; this release has 'local'. "
        'Set the connection\'s extra to {"route": "local"}'
    )
