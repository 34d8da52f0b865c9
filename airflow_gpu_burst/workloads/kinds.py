"""The kinds of Kubernetes objects that a run consists of, and where the API keeps them. Plain data, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from airflow_gpu_burst.errors import SpecError


@dataclass(frozen=True, kw_only=True)
class Kind:
    """
    One kind of namespaced object.

    :param api_version: `group/version`, or `v1` for the core group.
    :param plural: how the kind is spelled in a path.
    :param name: the kind as a manifest writes it.
    :param pods_label: the label by which this object's pods name it; empty for a kind that has no pods.
    """

    api_version: str
    plural: str
    name: str
    pods_label: str = ""

    @property
    def group(self) -> str:
        """The API group, as a Role writes it; empty for the core group."""
        return self.api_version.rpartition("/")[0]

    def path(self, namespace: str, name: str = "") -> str:
        """Path of the collection in that namespace, or of one object in it."""
        root = "apis" if "/" in self.api_version else "api"
        collection = f"/{root}/{self.api_version}/namespaces/{namespace}/{self.plural}"
        return f"{collection}/{name}" if name else collection


JOB = Kind(api_version="batch/v1", plural="jobs", name="Job", pods_label="batch.kubernetes.io/job-name")
JOBSET = Kind(
    api_version="jobset.x-k8s.io/v1alpha2", plural="jobsets", name="JobSet", pods_label="jobset.sigs.k8s.io/jobset-name"
)
POD = Kind(api_version="v1", plural="pods", name="Pod")
EVENT = Kind(api_version="v1", plural="events", name="Event")

_KINDS = {kind.name: kind for kind in (JOB, JOBSET, POD, EVENT)}


def by_name(name: str) -> Kind:
    """
    The kind of that name, as a manifest or a handle writes it.

    :raises SpecError: no such kind here; says which there are.
    """
    try:
        return _KINDS[name]
    except KeyError:
        raise SpecError(f"kind {name!r} is not known here; use one of {', '.join(_KINDS)}") from None
