"""
Routes: the way to the machine that runs a job. A few verbs, create-or-adopt, no Airflow.

The connection decides the route. `local` runs the in-pod runtime as a process of its own on this machine; `direct`
creates a Job or JobSet in a cluster with that cluster's own credentials.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from airflow_gpu_burst.errors import SpecError
from airflow_gpu_burst.spec import RunSpec
from airflow_gpu_burst.state import Handle, Observation, RunKey
from airflow_gpu_burst.store import Store

ROUTES = ("local", "direct")


@dataclass(frozen=True, kw_only=True)
class KubeConfig:
    """
    How to reach the API of one cluster. One of: a kubeconfig (text or path), the pod's own account, or host with token.

    :param kubeconfig: text, YAML or JSON.
    :param context: of the kubeconfig; empty: its current one.
    :param host: URL of the API server, with `token` and `ca` (PEM text or a path).
    :param namespace: empty: the context's, or `default`.
    """

    kubeconfig: str = field(default="", repr=False)
    kubeconfig_path: str = ""
    context: str = ""
    in_cluster: bool = False
    host: str = ""
    token: str = field(default="", repr=False)
    ca: str = field(default="", repr=False)
    verify_ssl: bool = True
    namespace: str = ""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """
    What a `gpu_cluster` connection says.

    :param route: one of ROUTES.
    :param site: a name for people, in notes and in the status of a run; empty: the connection id.
    :param work_dir: local route: folder for scratch files of the runs.
    :param grace_s: seconds between SIGTERM and SIGKILL; 10 leaves room within the 30 s that Airflow's triggerer
        gives to a kill.
    :param image: of requests that name none.
    :param working_dir: where this cluster's image keeps the trainers; empty: what the request says.
    :param secret: name of the Kubernetes Secret that gives pods the secret part of the contract (keys
        AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, GPU_BURST_CATALOG_SECRETS).
    :param runtime_image: image whose /opt/gpu-burst is copied into pods whose own image lacks the runtime.
    :param keep_finished_s: how long a finished object stays for `kubectl`, in seconds.
    :param restarts: pods that may fail and be replaced within one generation.
    """

    connection: str
    route: str = "local"
    namespace: str = ""
    queue: str = ""
    platform: str = "local"
    site: str = ""
    work_dir: str = ""
    grace_s: float = 10.0
    api: KubeConfig = field(default_factory=KubeConfig)
    image: str = ""
    working_dir: str = ""
    secret: str = "gpu-burst"
    service_account: str = ""
    runtime_image: str = ""
    image_pull_secrets: tuple[str, ...] = ()
    image_pull_policy: str = ""
    keep_finished_s: int = 3600
    restarts: int = 3


@dataclass(frozen=True, kw_only=True)
class Job:
    """
    One generation of a request, ready to be created.

    :param env: the environment that carries the contract; the store's credentials are among it.
    :param secret_env: names in `env` whose values are secret: by reference on a cluster.
    :param try_number: Airflow's, for people.
    :param store_uri: of the store that holds the run log: part of the identity.
    """

    name: str
    run_key: RunKey
    generation: int
    spec: RunSpec
    env: Mapping[str, str] = field(repr=False)
    secret_env: frozenset[str] = frozenset()
    try_number: int = 0
    store_uri: str = ""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """
    Some bytes that a container wrote, in order.

    :param source: one start of one container.
    :param pod: its pod's name, for people.
    :param rank: of the pod, if it has one.
    :param time: stamp of the last line, for a reader that comes later.
    :param ended: no more will come from this source: it ended, or was cut off.
    """

    source: str
    pod: str
    data: bytes = b""
    rank: int | None = None
    time: str = ""
    ended: bool = False


class Live(Protocol):
    """One run while somebody looks at it. Methods are called from one thread at a time."""

    pushes: bool
    """Whether `wake` is called when there is something new, so that nobody needs to ask."""

    def observe(self) -> Observation:
        """
        How the run is now.

        :raises ClusterUnreachable: nothing is known; ask again.
        """

    def output(self) -> list[Piece]:
        """What its containers have written since the last call; empty where only the spool has it."""

    def reading(self) -> bool:
        """Whether more output may come through `output`."""

    def notes(self) -> list[str]:
        """What happened to it, in words, each once."""

    def close(self) -> None:
        """Nobody looks any more."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """
    An object of ours that is still there.

    :param store_uri: of the store that holds its run log.
    :param created: wall clock of its creation, seconds since the epoch; None: unknown.
    """

    handle: Handle
    store_uri: str
    created: float | None = None


class Route(Protocol):
    """One way to run a job. Every method may be called from any worker or triggerer, any number of times."""

    name: str

    @property
    def namespace(self) -> str:
        """Where its objects are; empty where there is no such thing."""

    def kind_of(self, spec: RunSpec) -> str:
        """What `submit` would create."""

    def ranks_of(self, spec: RunSpec) -> int:
        """How many pods it would have that train together."""

    def check(self, job: Job) -> None:
        """
        Before anything is written: whether this can be submitted, as far as that can be told here.

        :raises SpecError: it cannot; says what would be right.
        """

    def submit(self, job: Job) -> str:
        """
        Create the object, or adopt the one of that name when it is ours. Returns its UID.

        :raises SpecError: the name is taken by something that is not this run.
        :raises ClusterUnreachable: nothing is known; ask again.
        """

    def observe(self, handle: Handle) -> Observation:
        """One look at the object."""

    def follow(
        self, handle: Handle, wake: Callable[[], None], *, resume: bool = False, since: Mapping[str, str] | None = None
    ) -> Live:
        """
        Look at it again and again.

        :param wake: called from any thread when there may be something new.
        :param resume: take up logs that break off: there is no spool behind them.
        :param since: with `resume`: source → `Piece.time` up to which its lines are known.
        """

    def salvage(self, handle: Handle, store: Store) -> None:
        """
        If the run is over: spool what of its output the pod could not, as far as it can still be had, and leave
        nothing of it on the machine.
        """

    def report(self, handle: Handle) -> str:
        """What the cluster shows of it, some lines for an error message; empty where there is nothing to show."""

    def cancel(self, handle: Handle) -> None:
        """End it and what it started; nothing happens when it is gone."""

    def settle(self, handle: Handle, store: Store) -> None:
        """The run log has its verdict: leave nothing running; what is worth a look may stay for a while."""

    def find(self) -> Iterator[Found]:
        """Every object of ours that is still there, in this connection's namespace."""


def open_route(config: ClusterConfig) -> Route:
    """
    The route that a connection names. Opens no connection yet.

    :raises SpecError: a route that does not exist.
    """
    if config.route == "local":
        from airflow_gpu_burst.routes.local import LocalRoute

        return LocalRoute(config)
    if config.route == "direct":
        from airflow_gpu_burst.routes.direct import DirectRoute

        return DirectRoute(config)
    raise SpecError(
        f"route {config.route!r} of connection {config.connection!r} is not available; this release has "
        f'{" and ".join(map(repr, ROUTES))}. Set the connection\'s extra to {{"route": "direct"}}'
    )
