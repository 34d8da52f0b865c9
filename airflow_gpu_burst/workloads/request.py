"""What is to be rendered: one generation of a request, with what the connection and the cluster add. Plain data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from airflow_gpu_burst.errors import SpecError
from airflow_gpu_burst.platforms import Platform
from airflow_gpu_burst.spec import RunSpec
from airflow_gpu_burst.state import RunKey

_DNS_NAME = re.compile(r"(?=.{1,63}$)[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class Request:
    """
    One generation of a request for a cluster. Holds no secret: those are in a Kubernetes Secret.

    :param name: of the object to create, see `RunKey.object_name`.
    :param try_number: of the Airflow task, for people.
    :param image: the container image; a manifest has its own.
    :param env: plain environment that carries the contract.
    :param secret_env: names of variables that come from the Secret, under keys of the same names.
    :param secret: name of the Kubernetes Secret; need not have every key.
    :param store_uri: where the run log is.
    :param runtime_image: image of an init container that brings the runtime; empty: the image has `gpu-burst`.
    :param service_account: empty: the namespace's default, without a token.
    :param image_pull_policy: empty: the cluster's default.
    :param grace_s: seconds between SIGTERM and SIGKILL for the trainer; the pod gets twice that and 30 s.
    :param keep_finished_s: seconds that the object stays after its end, for whoever has not looked yet.
    :param restarts: how often the pods may be started again within this generation.
    """

    name: str
    namespace: str
    run_key: RunKey
    generation: int
    try_number: int
    spec: RunSpec
    platform: Platform
    image: str
    env: Mapping[str, str] = field(default_factory=dict)
    secret_env: frozenset[str] = frozenset()
    secret: str = ""
    store_uri: str = ""
    runtime_image: str = ""
    service_account: str = ""
    image_pull_secrets: tuple[str, ...] = ()
    image_pull_policy: str = ""
    grace_s: float = 10.0
    keep_finished_s: int = 3600
    restarts: int = 3

    def __post_init__(self) -> None:
        both = sorted(self.secret_env & self.env.keys())
        if both:
            raise SpecError(
                f"{', '.join(both)} in env and in secret_env: secrets go by reference, take them out of env"
            )
        if self.secret_env and not self.secret:
            raise SpecError("secret_env without secret: name the Kubernetes Secret that holds these keys")
        for what, value in (("queue", self.spec.queue), ("priority", self.spec.priority)):
            if value and not _DNS_NAME.fullmatch(value):
                raise SpecError(
                    f"{what}={value!r}: Kubernetes names have lower-case letters, digits and '-', at most 63, "
                    "e.g. 'gpu-batch'"
                )
