"""
The direct route: a Job, or for several nodes a JobSet, created in a cluster with that cluster's own credentials.

Submission is create-or-adopt: the name is a function of run key, generation and store, so that a lost answer, a killed
worker or a second try finds what the first one made. Whoever waits looks at a watch that all runs of the process
share; whoever looks once asks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from airflow_gpu_burst import contract, platforms, workloads
from airflow_gpu_burst.errors import ClusterUnreachable, GpuBurstError, SpecError
from airflow_gpu_burst.routes import ClusterConfig, Found, Job, Piece
from airflow_gpu_burst.routes.pod_logs import PodLogs
from airflow_gpu_burst.runtime.output import CHUNK, chunk_key, stream_prefix
from airflow_gpu_burst.spec import RunSpec
from airflow_gpu_burst.state import Handle, Observation, Phase, RunKey
from airflow_gpu_burst.store import Store
from airflow_gpu_burst.workloads import Kind, Object, Snapshot, kinds

if TYPE_CHECKING:
    from airflow_gpu_burst.routes.kube import Kube

ATTEMPTS = 4
"""Times that a creation whose answer was lost is asked about and repeated, some seconds in all."""
SALVAGE_LIMIT = 64 << 20
"""Bytes of a dead container's log that are read to complete its spool; a kubelet rotates at 10 MiB by default."""


class DirectRoute:
    """See the module."""

    name = "direct"

    def __init__(self, config: ClusterConfig, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._config, self._sleep = config, sleep

    @property
    def _kube(self) -> Kube:
        from airflow_gpu_burst.routes.kube import kube_of

        return kube_of(self._config.api)

    @property
    def namespace(self) -> str:
        """Of the jobs: the connection's, else the kubeconfig's."""
        return self._config.namespace or self._kube.namespace

    def kind_of(self, spec: RunSpec) -> str:
        """A raw manifest's own; else a JobSet for more than one node."""
        if spec.manifest is not None:
            return workloads.kind_of_manifest(spec.manifest).name
        nodes = platforms.load(spec.platform).check_gpus(spec.gpus)
        return kinds.JOBSET.name if nodes > 1 else kinds.JOB.name

    def ranks_of(self, spec: RunSpec) -> int:
        """One pod for each node; of a manifest what its Indexed Job says."""
        if spec.manifest is not None:
            return workloads.ranks_of_manifest(spec.manifest)
        return platforms.load(spec.platform).check_gpus(spec.gpus)

    def check(self, job: Job) -> None:
        """Render it and throw it away."""
        self._render(job)

    def submit(self, job: Job) -> str:
        """Create, or adopt what has the name and is this very run."""
        kind, manifest = self._render(job)
        for attempt in range(ATTEMPTS):
            try:
                return self._create_or_adopt(kind, manifest)
            except ClusterUnreachable:
                # Nothing is known: it may be there. The name makes repeating safe.
                if attempt == ATTEMPTS - 1:
                    raise
                self._sleep(0.5 * 2**attempt)
        raise AssertionError("unreachable")

    def observe(self, handle: Handle) -> Observation:
        """One look, by a few requests."""
        kind = kinds.by_name(handle.kind)
        return self._interpret(kind, self._snapshot(kind, handle))

    def follow(
        self, handle: Handle, wake: Callable[[], None], *, resume: bool = False, since: Mapping[str, str] | None = None
    ) -> DirectLive:
        """Look at it through the shared watch."""
        kube = self._kube
        logs = PodLogs(kube, handle.namespace, wake, resume=resume, since=since or {})
        return DirectLive(kube, handle, wake, logs, cluster=self._cluster)

    def salvage(self, handle: Handle, store: Store) -> None:
        """What a killed container wrote after its last piece of spool is still in the kubelet's log."""
        kind = kinds.by_name(handle.kind)
        try:
            for pod in workloads.pods_of(self._snapshot(kind, handle, events=False)):
                if pod.terminated and not pod.orderly:
                    self._send_rest(handle, store, pod)
        except GpuBurstError:
            return  # the log of a pod that is gone, or may not be read: the spool is what there is

    def cancel(self, handle: Handle) -> None:
        """Delete the top object by its UID; its pods go with it. One that is over stays for a look."""
        kind = kinds.by_name(handle.kind)
        found = self._kube.get(kind, handle.namespace, handle.name)
        if found is None or (handle.uid and found["metadata"]["uid"] != handle.uid):
            return
        if not handle.uid and _identity(found) != (handle.run_key.to_dict(), handle.generation):
            return
        if self._interpret(kind, Snapshot(object=found)).terminal:
            return
        for attempt in range(ATTEMPTS):
            try:
                self._kube.delete(kind, handle.namespace, handle.name, uid=found["metadata"]["uid"])
                return
            except ClusterUnreachable:  # by UID: repeating is safe, and nobody may ask a second time
                if attempt == ATTEMPTS - 1:
                    raise
                self._sleep(0.5 * 2**attempt)

    def report(self, handle: Handle) -> str:
        """Pods, conditions and events."""
        kind = kinds.by_name(handle.kind)
        try:
            return workloads.report(kind, self._snapshot(kind, handle))
        except GpuBurstError:
            return ""  # it only explains

    def settle(self, handle: Handle, store: Store) -> None:
        """The cluster collects it `keep_finished_s` after its end."""
        self.salvage(handle, store)

    def find(self) -> Iterator[Found]:
        """Everything in the namespace that carries our label."""
        for kind in (kinds.JOB, kinds.JOBSET):
            for item in self._list(kind):
                whose = _identity(item)
                if whose is None or _owned(item):
                    continue
                metadata = item["metadata"]
                yield Found(
                    handle=Handle(
                        connection=self._config.connection,
                        route=self.name,
                        kind=kind.name,
                        namespace=metadata["namespace"],
                        name=metadata["name"],
                        uid=metadata["uid"],
                        run_key=RunKey.from_dict(whose[0]),
                        generation=whose[1],
                        store_connection="",
                    ),
                    store_uri=metadata["annotations"].get(workloads.STORE, ""),
                    created=workloads.seconds(metadata.get("creationTimestamp")),
                )

    def _list(self, kind: Kind) -> Iterable[Object]:
        from airflow_gpu_burst.routes.kube_errors import NotServed

        try:
            return self._kube.list(kind, self.namespace, labels=workloads.MANAGED).items
        except NotServed:
            if kind is kinds.JOB:
                raise
            return ()  # it has just listed its jobs: a cluster without JobSet has none of them

    @property
    def _cluster(self) -> str:
        return self._config.site or self._config.connection

    def _interpret(self, kind: Kind, snapshot: Snapshot) -> Observation:
        found = workloads.interpret(kind, snapshot, self._kube.clock_offset)
        return replace(found, cluster=self._cluster)

    def _render(self, job: Job) -> tuple[Kind, Object]:
        config, spec = self._config, job.spec
        image = spec.image or config.image
        if not image and spec.manifest is None:
            raise SpecError(
                f'no image: give the operator image=..., or connection {config.connection!r} an extra "image"'
            )
        request = workloads.Request(
            name=job.name,
            namespace=self.namespace,
            run_key=job.run_key,
            generation=job.generation,
            try_number=job.try_number,
            spec=spec,
            platform=platforms.load(spec.platform),
            image=image,
            env={name: value for name, value in job.env.items() if name not in job.secret_env},
            secret_env=job.secret_env,
            secret=config.secret,
            store_uri=job.store_uri,
            runtime_image=config.runtime_image,
            service_account=config.service_account,
            image_pull_secrets=config.image_pull_secrets,
            image_pull_policy=config.image_pull_policy,
            grace_s=config.grace_s,
            keep_finished_s=config.keep_finished_s,
            restarts=config.restarts,
        )
        return workloads.render(request) if spec.manifest is None else workloads.adopt_manifest(spec.manifest, request)

    def _create_or_adopt(self, kind: Kind, manifest: Object) -> str:
        from airflow_gpu_burst.routes.kube_errors import Exists

        name = manifest["metadata"]["name"]
        try:
            return str(self._kube.create(kind, self.namespace, manifest)["metadata"]["uid"])
        except Exists:
            found = self._kube.get(kind, self.namespace, name)
        if found is None:
            raise ClusterUnreachable(f"{kind.name} {name} existed and is gone again; ask again")
        ours, theirs = _identity(manifest), _identity(found)
        if ours != theirs or _store(manifest) != _store(found):
            raise SpecError(
                f"{kind.name} {self.namespace}/{name} exists and is not this run. It belongs to {theirs} with store "
                f"{_store(found) or 'unknown'}; this is {ours} with store {_store(manifest)}. "
                f"Delete it if nobody needs it: kubectl -n {self.namespace} delete {kind.plural} {name}"
            )
        if found["metadata"].get("deletionTimestamp"):
            raise ClusterUnreachable(f"{kind.name} {name} is being deleted; ask again when it is gone")
        return str(found["metadata"]["uid"])

    def _snapshot(self, kind: Kind, handle: Handle, *, events: bool = True) -> Snapshot:
        found = self._kube.get(kind, handle.namespace, handle.name)
        if found is not None and handle.uid and found["metadata"]["uid"] != handle.uid:
            found = None
        pods = self._kube.list(
            kinds.POD, handle.namespace, labels=f"{workloads.MANAGED},{workloads.NAME}={handle.name}"
        ).items
        return Snapshot(object=found, pods=tuple(pods), events=self._events(handle, found, pods) if events else ())

    def _events(self, handle: Handle, found: Object | None, pods: Iterable[Object]) -> tuple[Object, ...]:
        """Of what does not run: they say why."""
        waiting = [pod for pod in pods if pod.get("status", {}).get("phase") not in ("Running", "Succeeded")]
        events: list[Object] = []
        for one in [*([found] if found else []), *waiting[:4]]:
            uid = one["metadata"]["uid"]
            try:
                events += self._kube.list(kinds.EVENT, handle.namespace, fields=f"involvedObject.uid={uid}").items
            except GpuBurstError:
                break  # they only explain
        return tuple(events)

    def _send_rest(self, handle: Handle, store: Store, pod: workloads.PodFacts) -> None:
        with self._kube.log(
            handle.namespace, pod.name, pod.container, timestamps=False, limit_bytes=SALVAGE_LIMIT
        ) as log:
            data = b"".join(log)
        begins = 0
        while (ends := data.find(b"\n", begins)) >= 0:
            if header := contract.parse_header(data[begins:ends]):
                break
            begins = ends + 1
        else:
            return
        stream = f"{stream_prefix(handle.run_key.prefix, handle.generation)}{header[0]}"
        sent = sum(entry.size for entry in store.list(f"{stream}/"))
        data = data[begins + sent :]
        for start in range(0, len(data), CHUNK):
            store.put(chunk_key(stream, sent + start), data[start : start + CHUNK])


class DirectLive:
    """One run seen through the watch that all runs of this process share."""

    pushes = True

    def __init__(self, kube: Kube, handle: Handle, wake: Callable[[], None], logs: PodLogs, *, cluster: str) -> None:
        from airflow_gpu_burst.routes.watching import watcher_of

        self._kube, self._handle, self._logs, self._cluster = kube, handle, logs, cluster
        self._kind = kinds.by_name(handle.kind)
        self._seen: set[str] = set()
        self._words: list[str] = []
        self._known: tuple[Snapshot, Observation] | None = None
        self._watch = watcher_of(kube, handle.namespace).subscribe(self._kind, handle.name, handle.uid, wake)

    def observe(self) -> Observation:
        """From memory; by requests until the watch has begun."""
        if trouble := self._watch.trouble:
            raise trouble
        snapshot = self._watch.snapshot()
        if snapshot is None:
            return Observation(phase=Phase.SUBMITTED, cluster=self._cluster)
        if self._known is not None and self._known[0] is snapshot:
            return self._known[1]  # woken by a line: nothing else has changed
        self._logs.want(workloads.pods_of(snapshot))
        self._words += workloads.events_in_words(snapshot, self._seen)
        found = self._interpreted(snapshot)
        self._known = None if found.phase is Phase.LOST else (snapshot, found)
        return found

    def _interpreted(self, snapshot: Snapshot) -> Observation:
        found = workloads.interpret(self._kind, snapshot, self._kube.clock_offset)
        if found.phase is Phase.LOST and (there := self._asked()) is not None:
            # The watch selects by label: somebody took ours off, and the object is still there.
            seen = Snapshot(object=there, pods=snapshot.pods, events=snapshot.events)
            found = workloads.interpret(self._kind, seen, self._kube.clock_offset)
        return replace(found, cluster=self._cluster)

    def _asked(self) -> Object | None:
        handle = self._handle
        there = self._kube.get(self._kind, handle.namespace, handle.name)
        return there if there is not None and there["metadata"]["uid"] == handle.uid else None

    def output(self) -> list[Piece]:
        """Live lines."""
        return self._logs.take()

    def reading(self) -> bool:
        """Whether a container's log is still being read."""
        return self._logs.reading()

    def notes(self) -> list[str]:
        """Events, and what cannot be seen."""
        words, self._words = self._words, []
        return [*self._watch.notes(), *self._logs.notes(), *words]

    def close(self) -> None:
        """Unsubscribe and end the streams."""
        self._watch.close()
        self._logs.close()


def _identity(manifest: Object) -> tuple[dict[str, Any], int] | None:
    annotations = manifest["metadata"].get("annotations") or {}
    try:
        return json.loads(annotations[workloads.RUN_KEY]), int(annotations[workloads.GENERATION])
    except (KeyError, ValueError):
        return None


def _store(manifest: Object) -> str:
    return str((manifest["metadata"].get("annotations") or {}).get(workloads.STORE, ""))


def _owned(item: Object) -> bool:
    """Whether it is a part of something larger: the Job of a JobSet."""
    return bool(item["metadata"].get("ownerReferences"))
