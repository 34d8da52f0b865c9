"""The Kubernetes client against a server that goes wrong: every fault has one meaning, and a retry never acts twice."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_gpu_burst.errors import (
    ClusterForbidden,
    ClusterUnauthorized,
    ClusterUnreachable,
    NotAdmitted,
    RouteError,
    SpecError,
)
from airflow_gpu_burst.routes import KubeConfig, kube_login
from airflow_gpu_burst.routes.kube import Exists, Expired, Kube, NoLog, Throttled, kube_of
from airflow_gpu_burst.routes.kube_answers import ServerClock
from airflow_gpu_burst.workloads.kinds import EVENT, JOB, JOBSET, POD
from tests.fake_apiserver import ALWAYS, FakeApi

NAMESPACE = "train"


def job(name: str = "a") -> dict[str, Any]:
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": {}}


def pod(name: str = "p") -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}}


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with FakeApi() as server:
        yield server


@pytest.fixture
def slept() -> list[float]:
    return []


@pytest.fixture
def kube(api: FakeApi, slept: list[float]) -> Kube:
    return Kube(KubeConfig(kubeconfig=api.kubeconfig()), sleep=slept.append)


def drain(stream: Any) -> list[Any]:
    with stream:
        return list(stream)


# ---- what works


def test_objects_come_and_go(kube: Kube) -> None:
    made = kube.create(JOB, NAMESPACE, job())
    found = kube.get(JOB, NAMESPACE, "a")
    assert found == made
    assert kube.get(JOB, NAMESPACE, "b") is None
    assert [item["kind"] for item in kube.list(JOB, NAMESPACE).items] == ["Job"]
    assert kube.delete(JOB, NAMESPACE, "a", uid="another") is False
    assert kube.delete(JOB, NAMESPACE, "a", uid=made["metadata"]["uid"]) is True
    assert kube.delete(JOB, NAMESPACE, "a", uid=made["metadata"]["uid"]) is False


def test_delete_names_the_propagation(api: FakeApi, kube: Kube) -> None:
    uid = kube.create(JOB, NAMESPACE, job())["metadata"]["uid"]
    kube.delete(JOB, NAMESPACE, "a", uid=uid)
    body = api.requests[-1].body
    assert body is not None
    assert (body["propagationPolicy"], body["preconditions"]) == ("Background", {"uid": uid})


def test_list_follows_pages_and_trims_as_it_goes(api: FakeApi, kube: Kube) -> None:
    for number in range(7):
        api.put(job(f"j{number}"))
    listing = kube.list(JOB, NAMESPACE, limit=3, keep=lambda i: None if i["metadata"]["name"] == "j5" else i)
    assert [i["metadata"]["name"] for i in listing.items] == ["j0", "j1", "j2", "j3", "j4", "j6"]
    assert api.count("list") == 3


def test_a_list_that_expires_in_the_middle_begins_anew(api: FakeApi, kube: Kube) -> None:
    for number in range(4):
        api.put(job(f"j{number}"))
    api.fault("status", verb="list", status=410, reason="Expired", skip=1)
    assert len(kube.list(JOB, NAMESPACE, limit=2).items) == 4


def test_watch_goes_on_from_a_version(api: FakeApi, kube: Kube) -> None:
    version = kube.list(JOB, NAMESPACE).resource_version
    api.put(job())
    api.delete("jobs", "a")
    seen = drain(kube.watch(JOB, NAMESPACE, resource_version=version, timeout_s=1))
    assert [what for what, _ in seen] == ["ADDED", "DELETED", "BOOKMARK"]


def test_log_query_reaches_the_server_as_it_is(api: FakeApi, kube: Kube) -> None:
    api.put(pod())
    api.write("p", b"2026-01-01T00:00:00Z one\n")
    drain(kube.log(NAMESPACE, "p", "trainer", since_time="2026-01-01T00:00:00Z", tail_lines=0, limit_bytes=9))
    assert api.requests[-1].query == {
        "container": "trainer",
        "timestamps": "true",
        "sinceTime": "2026-01-01T00:00:00Z",
        "tailLines": "0",
        "limitBytes": "9",
    }


def test_log_pieces_come_as_they_are_written(api: FakeApi, kube: Kube) -> None:
    api.put(pod())
    api.write("p", b"one\ntw")
    with kube.log(NAMESPACE, "p", "trainer", follow=True) as stream:
        pieces = iter(stream)
        assert next(pieces) == b"one\ntw"
        api.write("p", b"o\n")
        assert next(pieces) == b"o\n"
        api.end_log("p")
        assert list(pieces) == []


@pytest.mark.parametrize("written", [b"", b"a line\n"], ids=["before-the-header", "in-mid-answer"])
def test_close_from_another_thread_ends_a_log(api: FakeApi, kube: Kube, written: bytes) -> None:
    api.put(pod())
    api.write("p", written)
    stream = kube.log(NAMESPACE, "p", "trainer", follow=True)
    threading.Timer(0.2, stream.close).start()
    began = time.monotonic()
    assert b"".join(drain(stream)) == written
    assert time.monotonic() - began < 2


def test_close_from_another_thread_ends_a_watch(api: FakeApi, kube: Kube) -> None:
    stream = kube.watch(JOB, NAMESPACE, resource_version="100", timeout_s=60)
    threading.Timer(0.2, stream.close).start()
    assert drain(stream) == []


def test_a_finished_stream_that_is_closed_late_cuts_nobody_else(api: FakeApi, kube: Kube) -> None:
    api.put(pod())
    api.write("p", b"x\n")
    stream = kube.log(NAMESPACE, "p", "trainer")
    drain(stream)
    following = kube.log(NAMESPACE, "p", "trainer", follow=True)
    with following:
        pieces = iter(following)
        assert next(pieces) == b"x\n"
        stream.close()
        api.write("p", b"y\n")
        assert next(pieces) == b"y\n"


def test_allowed_asks_the_server(api: FakeApi, kube: Kube) -> None:
    api.forbid("get", "pods/log")
    assert kube.allowed("get", POD, NAMESPACE)
    assert not kube.allowed("get", POD, NAMESPACE, "log")


# ---- create: one attempt, always


@pytest.mark.parametrize(
    ("fault", "error", "made"),
    [
        ({"kind": "lost"}, ClusterUnreachable, True),
        ({"kind": "drop"}, ClusterUnreachable, False),
        ({"kind": "done-but", "status": 409, "reason": "AlreadyExists"}, Exists, True),
        ({"kind": "done-but", "status": 504, "reason": "Timeout"}, ClusterUnreachable, True),
        ({"kind": "status", "status": 409, "reason": "Conflict"}, ClusterUnreachable, False),
        ({"kind": "status", "status": 429, "retry_after": "1"}, Throttled, False),
        ({"kind": "status", "status": 500}, ClusterUnreachable, False),
    ],
)
def test_create_is_tried_once(
    api: FakeApi, kube: Kube, slept: list[float], fault: dict[str, Any], error: type[Exception], made: bool
) -> None:
    api.fault(verb="create", **fault)
    with pytest.raises(error):
        kube.create(JOB, NAMESPACE, job())
    assert (api.count("create"), slept) == (1, [])
    assert (kube.get(JOB, NAMESPACE, "a") is not None) is made


def test_create_on_a_taken_name(api: FakeApi, kube: Kube) -> None:
    api.put(job())
    with pytest.raises(Exists):
        kube.create(JOB, NAMESPACE, job())


# ---- refusals, each with what to do

REFUSALS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"kind": "forbidden"}, ClusterForbidden, "system:serviceaccount:train:tester may not create jobs"),
    ({"kind": "forbidden"}, ClusterForbidden, '- {apiGroups: ["batch"], resources: [jobs], verbs: [create]}'),
    (
        {"status": 403, "message": "jobs.batch is forbidden: exceeded quota: gpus, requested: 8, used: 8, limited: 8"},
        NotAdmitted,
        "exceeded quota: gpus, requested: 8",
    ),
    (
        {"status": 403, "message": "unable to create new content in namespace train because it is being terminated"},
        RouteError,
        "namespace train is being deleted",
    ),
    ({"status": 403, "message": 'violates PodSecurity "restricted:latest"'}, ClusterForbidden, "PodSecurity"),
    (
        {"status": 404, "reason": "NotFound", "details": {"kind": "namespaces", "name": "train"}},
        RouteError,
        "kubectl create namespace train",
    ),
    (
        {
            "status": 422,
            "reason": "Invalid",
            "details": {"causes": [{"field": "spec.template.spec.restartPolicy", "message": "Required value"}]},
        },
        SpecError,
        "spec.template.spec.restartPolicy: Required value",
    ),
    ({"status": 400, "reason": "BadRequest", "message": "strict decoding error"}, SpecError, "strict decoding error"),
    ({"status": 413, "reason": "RequestEntityTooLarge", "message": "too large"}, SpecError, "too large"),
]


@pytest.mark.parametrize(("fault", "error", "said"), REFUSALS)
def test_a_refusal_says_what_to_do(
    api: FakeApi, kube: Kube, fault: dict[str, Any], error: type[Exception], said: str
) -> None:
    api.fault(**{"kind": "status", "verb": "create", **fault})
    with pytest.raises(error) as caught:
        kube.create(JOB, NAMESPACE, job())
    assert said in str(caught.value)
    assert not caught.value.retryable


@pytest.mark.parametrize(
    ("verb", "kind", "line"),
    [
        ("get", JOB, '- {apiGroups: ["batch"], resources: [jobs], verbs: [get]}'),
        ("list", POD, '- {apiGroups: [""], resources: [pods], verbs: [list]}'),
        ("watch", EVENT, '- {apiGroups: [""], resources: [events], verbs: [watch]}'),
        ("delete", JOBSET, '- {apiGroups: ["jobset.x-k8s.io"], resources: [jobsets], verbs: [delete]}'),
        ("log", POD, '- {apiGroups: [""], resources: [pods/log], verbs: [get]}'),
    ],
)
def test_forbidden_names_the_line_to_add(api: FakeApi, kube: Kube, verb: str, kind: Any, line: str) -> None:
    api.forbid("", "")
    calls: dict[str, Callable[[], Any]] = {
        "get": lambda: kube.get(kind, NAMESPACE, "a"),
        "list": lambda: kube.list(kind, NAMESPACE),
        "watch": lambda: drain(kube.watch(kind, NAMESPACE, resource_version="1")),
        "delete": lambda: kube.delete(kind, NAMESPACE, "a", uid="u"),
        "log": lambda: drain(kube.log(NAMESPACE, "p", "trainer")),
    }
    with pytest.raises(ClusterForbidden) as caught:
        calls[verb]()
    assert line in str(caught.value)


def test_only_the_apis_own_404_means_gone(api: FakeApi, kube: Kube) -> None:
    api.put(job())
    for fault in ({"kind": "html", "status": 404}, {"kind": "status", "status": 404, "reason": "NotFound"}):
        api.fault(verb="get", **fault)
        with pytest.raises(ClusterUnreachable):
            kube.get(JOB, NAMESPACE, "a")
        api.fault(verb="delete", **fault)
        with pytest.raises(ClusterUnreachable):
            kube.delete(JOB, NAMESPACE, "a", uid="u")


def test_a_kind_that_is_not_installed_is_named(api: FakeApi, kube: Kube) -> None:
    api.fault("html", verb="create", resource="jobsets", status=404)
    with pytest.raises(RouteError, match="Install JobSet") as caught:
        kube.create(JOBSET, NAMESPACE, {**job(), "kind": "JobSet"})
    assert not caught.value.retryable


def test_a_page_that_is_not_the_apis(api: FakeApi, kube: Kube) -> None:
    api.fault("html", verb="get", status=302)
    with pytest.raises(ClusterUnreachable, match="302"):
        kube.get(JOB, NAMESPACE, "a")


def test_no_log_yet_and_no_log_any_more(api: FakeApi, kube: Kube) -> None:
    with pytest.raises(NoLog, match="gone"):
        drain(kube.log(NAMESPACE, "p", "trainer"))
    api.put(pod())
    with pytest.raises(NoLog, match="ContainerCreating"):
        drain(kube.log(NAMESPACE, "p", "trainer"))


# ---- patience


def test_reads_wait_as_the_server_asks(api: FakeApi, kube: Kube, slept: list[float]) -> None:
    api.fault("status", verb="list", status=429, retry_after="2")
    api.fault("status", verb="list", status=503, retry_after="60")
    kube.list(JOB, NAMESPACE)
    assert slept == [2.0, 5.0]


def test_patience_ends(api: FakeApi, kube: Kube, slept: list[float]) -> None:
    api.fault("status", verb="get", status=429, retry_after="1", times=ALWAYS)
    with pytest.raises(Throttled):
        kube.get(JOB, NAMESPACE, "a")
    assert slept == [1.0] * 3


def test_a_dead_idle_connection_is_no_trouble_for_reads(api: FakeApi, kube: Kube) -> None:
    api.put(job())
    api.fault("drop", verb="get")
    assert kube.get(JOB, NAMESPACE, "a") is not None


def test_a_deletes_lost_answer_is_not_repeated(api: FakeApi, kube: Kube) -> None:
    uid = api.put(job())["metadata"]["uid"]
    api.fault("lost", verb="delete")
    with pytest.raises(ClusterUnreachable):
        kube.delete(JOB, NAMESPACE, "a", uid=uid)
    assert api.count("delete") == 1


def test_a_server_that_is_down(api: FakeApi, kube: Kube) -> None:
    api.stop()
    with pytest.raises(ClusterUnreachable, match=r"no answer from cluster http://127.0.0.1.*Check that"):
        kube.get(JOB, NAMESPACE, "a")


@pytest.mark.parametrize("kind", ["expired", "status"])
def test_a_version_that_is_too_old(api: FakeApi, kube: Kube, kind: str) -> None:
    api.fault(kind, verb="watch", status=410, reason="Expired")
    with pytest.raises(Expired):
        drain(kube.watch(JOB, NAMESPACE, resource_version="1"))


def test_a_stream_that_breaks_is_not_taken_for_its_end(api: FakeApi, kube: Kube) -> None:
    version = kube.list(JOB, NAMESPACE).resource_version
    api.put(job())
    api.fault("cut", verb="watch")
    with pytest.raises(ClusterUnreachable, match="broke off"):
        drain(kube.watch(JOB, NAMESPACE, resource_version=version))


def test_a_silent_watch_is_noticed(api: FakeApi, kube: Kube, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("airflow_gpu_burst.routes.kube.WATCH_SILENCE_S", 0.2)
    api.fault("freeze", verb="watch")
    began = time.monotonic()
    with pytest.raises(ClusterUnreachable):
        drain(kube.watch(JOB, NAMESPACE, resource_version="100", timeout_s=0.5))
    assert time.monotonic() - began < 5


# ---- credentials


def test_credentials_are_read_again_once(api: FakeApi, tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text(api.kubeconfig(token="old"))
    kube = Kube(KubeConfig(kubeconfig_path=str(path)))
    api.tokens = {"new"}
    path.write_text(api.kubeconfig(token="new"))
    kube.create(JOB, NAMESPACE, job())
    assert [r.token for r in api.requests] == ["old", "new"]


def test_credentials_that_stay_refused(api: FakeApi, kube: Kube) -> None:
    api.tokens = {"another"}
    for _ in range(3):
        with pytest.raises(ClusterUnauthorized, match="kubectl create token") as caught:
            kube.get(JOB, NAMESPACE, "a")
        assert caught.value.retryable
        assert str(api.url) in str(caught.value)
    assert len(api.requests) == 4  # read again once; a second time only after some seconds


def test_many_threads_renew_once(api: FakeApi, tmp_path: Path) -> None:
    count, config = plugin(api, tmp_path, tokens="old new new new new new new new new")
    kube = Kube(KubeConfig(kubeconfig=config))
    api.tokens = {"new"}
    threads = [threading.Thread(target=kube.get, args=(JOB, NAMESPACE, "a")) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert int(count.read_text()) == 2
    assert sum(r.token == "new" for r in api.requests) == 8


def plugin(api: FakeApi, tmp_path: Path, tokens: str) -> tuple[Path, str]:
    """An exec plugin that gives one token after the other; the file that counts its calls, and a kubeconfig."""
    count, script = tmp_path / "count", tmp_path / "plugin"
    count.write_text("0")
    script.write_text(
        f"""#!/bin/sh
n=$(cat {count}); n=$((n+1)); echo $n > {count}
set -- {tokens} "" "" ""; shift $((n-1))
[ -n "$1" ] || {{ echo "the identity provider is down" >&2; exit 1; }}
printf '{{"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential","status":{{"token":"%s"}}}}' $1
"""
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    config = json.loads(api.kubeconfig())
    config["users"][0]["user"] = {
        "exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": str(script), "interactiveMode": "Never"}
    }
    return count, json.dumps(config)


def test_a_failing_exec_plugin_says_why(api: FakeApi, tmp_path: Path) -> None:
    _, config = plugin(api, tmp_path, tokens="")
    with pytest.raises(ClusterUnauthorized, match="the identity provider is down"):
        Kube(KubeConfig(kubeconfig=config))
    assert api.requests == []  # never as nobody


# ---- forms of a connection


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fake")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    cert, private = folder / "ca.crt", folder / "tls.key"
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return cert, private


def test_each_form_of_a_connection_reaches_its_own_server(
    certificate: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six forms over two servers, all in one process, used in turns: never the other's address or token."""
    with FakeApi(tls=certificate) as one, FakeApi(tls=certificate) as two:
        pod_folder = tmp_path / "serviceaccount"
        pod_folder.mkdir()
        (pod_folder / "token").write_text("in-cluster\n")
        (pod_folder / "namespace").write_text("airflow")
        (pod_folder / "ca.crt").write_text(certificate[0].read_text())
        monkeypatch.setattr(kube_login, "SERVICE_ACCOUNT", pod_folder)
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", two.url.rpartition(":")[2])
        path = tmp_path / "config"
        path.write_text(one.kubeconfig(token="path", namespace="of-path"))
        both = json.loads(one.kubeconfig(token="first"))
        second = json.loads(two.kubeconfig(token="second"))
        both["clusters"].append({"name": "c2", "cluster": second["clusters"][0]["cluster"]})
        both["users"].append({"name": "u2", "user": {"token": "second"}})
        both["contexts"].append({"name": "two", "context": {"cluster": "c2", "user": "u2"}})
        pem = certificate[0].read_text()
        as_yaml = f"""
current-context: y
contexts: [{{name: y, context: {{cluster: y, user: y, namespace: of-yaml}}}}]
clusters:
- name: y
  cluster: {{server: "{two.url}", certificate-authority-data: {base64.b64encode(pem.encode()).decode()}}}
users: [{{name: y, user: {{token: yaml}}}}]
"""
        _, exec_config = plugin(one, tmp_path, tokens="exec")
        forms: list[tuple[KubeConfig, FakeApi, str, str]] = [
            (KubeConfig(kubeconfig=as_yaml), two, "yaml", "of-yaml"),
            (KubeConfig(kubeconfig_path=str(path)), one, "path", "of-path"),
            (KubeConfig(kubeconfig=json.dumps(both), context="two"), two, "second", "default"),
            (KubeConfig(in_cluster=True), two, "in-cluster", "airflow"),
            (KubeConfig(host=one.url, token="pem", ca=pem, namespace="mine"), one, "pem", "mine"),
            (KubeConfig(host=two.url, token="file", ca=str(certificate[0])), two, "file", "default"),
            (KubeConfig(kubeconfig=exec_config), one, "exec", "train"),
        ]
        kubes = [kube_of(config) for config, *_ in forms]
        for _ in range(2):
            for kube, (config, server, token, namespace) in zip(kubes, forms, strict=True):
                assert kube_of(config) is kube
                assert kube.namespace == namespace
                before = len(one.requests), len(two.requests)
                kube.version()
                after = len(one.requests), len(two.requests)
                assert after == (before[0] + (server is one), before[1] + (server is two))
                assert server.requests[-1].token == token


def test_another_authority_is_refused(certificate: tuple[Path, Path]) -> None:
    with FakeApi(tls=certificate) as api:
        kube = Kube(KubeConfig(host=api.url, token="t"))
        with pytest.raises(ClusterUnreachable, match="CERTIFICATE_VERIFY_FAILED"):
            kube.version()
        assert api.requests == []


def test_certificates_outlive_their_temporary_files(certificate: tuple[Path, Path]) -> None:
    """A process forked from this one removes them when it ends."""
    from kubernetes.config import kube_config

    with FakeApi(tls=certificate) as api:
        kube = Kube(KubeConfig(host=api.url, token="t", ca=certificate[0].read_text()))
        kube_config._cleanup_temp_files()
        assert kube.version() == "v1.34.4"


def test_a_forked_child_has_a_client_of_its_own(api: FakeApi) -> None:
    config = KubeConfig(kubeconfig=api.kubeconfig())
    mine = kube_of(config)
    mine.version()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        other = kube_of(config)
        os.write(writer, b"y" if other is not mine and other.version() == "v1.34.4" else b"n")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 1) == b"y"
    os.close(reader)
    os.close(writer)
    assert kube_of(config) is mine


def test_the_processs_own_configuration_is_left_alone(api: FakeApi) -> None:
    from kubernetes import client

    before = client.Configuration.get_default_copy().host
    Kube(KubeConfig(kubeconfig=api.kubeconfig())).version()
    assert client.Configuration.get_default_copy().host == before
    assert client.Configuration._default is None


GOOD: dict[str, Any] = {
    "current-context": "a",
    "contexts": [{"name": "a", "context": {"cluster": "c", "user": "u"}}, {"name": "b", "context": {"cluster": "x"}}],
    "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
    "users": [{"name": "u", "user": {"token": "SECRET"}}],
}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (KubeConfig(kubeconfig="a: b: SECRET"), "neither JSON nor YAML at line 1"),
        (KubeConfig(kubeconfig="just text"), "is no kubeconfig"),
        (KubeConfig(kubeconfig=json.dumps(GOOD), context="prod"), "no context 'prod'; it has: a, b"),
        (KubeConfig(kubeconfig=json.dumps({**GOOD, "current-context": ""})), "no current-context"),
        (KubeConfig(kubeconfig=json.dumps(GOOD), context="b"), "cluster 'x', which has no server"),
        (
            KubeConfig(
                kubeconfig=json.dumps(
                    {
                        **GOOD,
                        "clusters": [
                            {"name": "c", "cluster": {"server": "https://h", "certificate-authority": "/no/ca.crt"}}
                        ],
                    }
                )
            ),
            "/no/ca.crt",
        ),
        (
            KubeConfig(kubeconfig=json.dumps({**GOOD, "users": [{"name": "u", "user": {"tokenFile": "/no/token"}}]})),
            "/no/token",
        ),
        (
            KubeConfig(
                kubeconfig=json.dumps(
                    {
                        **GOOD,
                        "users": [{"name": "u", "user": {"exec": {"command": "no-such-plugin", "apiVersion": "v1"}}}],
                    }
                )
            ),
            "'no-such-plugin', which is not installed",
        ),
        (KubeConfig(kubeconfig_path="/no/such/kubeconfig"), "/no/such/kubeconfig"),
        (KubeConfig(host="https://127.0.0.1:1", ca="/no/ca.pem"), "/no/ca.pem"),
        (KubeConfig(host="https://127.0.0.1:1", token="two\nlines"), "no token has"),
        (KubeConfig(host="https://127.0.0.1:1", ca="-----BEGIN CERTIFICATE-----\nx\n"), "cannot be used"),
    ],
)
def test_a_connection_that_cannot_be_used_says_why(config: KubeConfig, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        Kube(config)
    assert said in str(caught.value)
    assert "SECRET" not in str(caught.value)


def test_without_any_form_the_usual_places_are_tried(api: FakeApi, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(api.kubeconfig(namespace="usual"))
    found = kube_login.login_of(KubeConfig(), {"KUBECONFIG": f"/no/such:{tmp_path / 'config'}"})
    assert found.namespace == "usual"


# ---- the server's clock


@pytest.mark.parametrize("skew_s", [3600.0, -3600.0, 0.0])
def test_an_hour_of_skew_is_measured(api: FakeApi, kube: Kube, skew_s: float) -> None:
    assert kube.clock_offset == 0.0
    api.skew_s = skew_s
    for _ in range(5):
        kube.version()
        time.sleep(0.11)
    assert kube.clock_offset == pytest.approx(skew_s, abs=0.6)


def test_a_clock_that_is_set_is_followed(api: FakeApi, kube: Kube) -> None:
    kube.version()
    api.skew_s = -100.0
    kube.version()
    assert kube.clock_offset == pytest.approx(-100.0, abs=0.6)


@given(
    offset=st.floats(-1e5, 1e5),
    asked=st.lists(st.tuples(st.floats(0, 30), st.floats(0, 5), st.floats(0, 5)), min_size=1, max_size=40),
)
@settings(deadline=None)  # a busy machine is no wrong answer
def test_the_true_offset_is_never_missed(offset: float, asked: list[tuple[float, float, float]]) -> None:
    """Whatever the delays there and back, the answer is within half a second and half of the quickest round trip."""
    from email.utils import formatdate

    clock, now = ServerClock(), 1.8e9
    for pause, there, back in asked:
        sent = now + pause
        stamp = int(sent + there + offset)
        now = sent + there + back
        clock.heard(formatdate(stamp, usegmt=True), sent, now)
    quickest = min(there + back for _, there, back in asked[-32:])
    assert abs(clock.offset - offset) <= (1.0 + quickest) / 2 + 1e-3
