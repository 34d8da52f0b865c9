"""The servers outside Kubernetes: object store, identity provider, Iceberg REST catalog.

On 198.18.0.9, an address of the loopback interface, so that pods reach them too. Where no pod needs them, set
LAB_SERVICES_HOST=127.0.0.1: load and fault tests from the host belong on 127.x addresses.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from core import HERE, Lab, Server, require, sh

HOST = os.environ.get("LAB_SERVICES_HOST", "198.18.0.9")
S3, CATALOG, KEYCLOAK = (f"http://{HOST}:{port}" for port in (9000, 9001, 9002))
TOKENS = f"{KEYCLOAK}/realms/fab/protocol/openid-connect/token"
BUCKETS = ("lake", "checkpoints", "models")
ICEBERG = "org.apache.iceberg:iceberg-open-api:1.10.1"
KEYCLOAK_DIST = "org.keycloak:keycloak-quarkus-dist:26.7.3:zip"
MAVEN = (ICEBERG, KEYCLOAK_DIST)
CLIENTS = {"airflow-gpu-burst": 60, "short-lived": 2, "catalog": 60, "vllm-reader": 60}
"""OAuth2 client -> seconds that its tokens live: a minute shows renewal in a real run, 2 s in a test."""
SCOPE, REALM_HEADER, REALM = "lake", "Polaris-Realm", "FAB"
"""What the catalog asks of a request beside the token."""


def maven(lab: Lab, artifact: str) -> Path:
    """Fetch one artifact with Maven into the cache (`group:name:version[:packaging]`)."""
    name, version, packaging = [*artifact.split(":")[1:], "jar"][:3]
    out = lab.cache / "maven" / f"{name}-{version}.{packaging}"
    if not out.exists():
        require("mvn")
        out.parent.mkdir(parents=True, exist_ok=True)
        sh(
            "mvn",
            "-q",
            "-B",
            "dependency:copy",
            f"-Dartifact={artifact}",
            f"-DoutputDirectory={out.parent}",
            f"-Dmaven.repo.local={lab.cache / 'maven' / 'repository'}",
            "-Dmdep.useBaseVersion=true",
        )
    return out


def secrets_of(lab: Lab) -> dict[str, str]:
    """Keys and client secrets of this lab, made once, readable by the owner only."""
    path = lab.dir / "secrets.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        values = {
            "s3_access_key": "lab" + secrets.token_hex(8),
            "s3_secret_key": secrets.token_urlsafe(30),
            **{c: secrets.token_urlsafe(24) for c in CLIENTS},
        }
        path.touch(mode=0o600)
        path.write_text(json.dumps(values, indent=1))
    return dict(json.loads(path.read_text()))


def are_up(lab: Lab) -> bool:
    """True when a pod that is given the secrets would find all that they are for."""
    return all(Server(lab, name).pid() for name in SERVICES)


def address(verb: str) -> None:
    if not HOST.startswith("127."):
        sh("ip", "address", verb, f"{HOST}/32", "dev", "lo", check=False)


def _answers(url: str) -> bool:
    """True for any HTTP answer, an error status too."""
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(url, timeout=2)
    return True


def s3(lab: Lab) -> None:
    keys, root = secrets_of(lab), lab.dir / "s3"
    for bucket in BUCKETS:
        (root / bucket).mkdir(parents=True, exist_ok=True)
    server = Server(lab, "s3")
    server.start(
        lab.binary("versitygw"),
        "--port",
        S3.removeprefix("http://"),
        "--quiet",
        "posix",
        root,
        env={"ROOT_ACCESS_KEY": keys["s3_access_key"], "ROOT_SECRET_KEY": keys["s3_secret_key"]},
    )
    server.ready(lambda: _answers(S3))


def keycloak_built(lab: Lab) -> Path:
    """Keycloak with its settings of build time compiled in: a start takes 17 s instead of 40."""
    home = lab.cache / "keycloak" / KEYCLOAK_DIST.split(":")[2]
    if home.exists():
        return home
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent) as folder:
        with zipfile.ZipFile(maven(lab, KEYCLOAK_DIST)) as archive:
            archive.extractall(folder)
        unpacked = next(Path(folder).iterdir())
        sh("bash", unpacked / "bin" / "kc.sh", "build", "--db=dev-file", "--cache=local")
        unpacked.rename(home)
    return home


def keycloak(lab: Lab) -> None:
    """With the realm `fab`, and a client for each of CLIENTS."""
    home = lab.dir / "keycloak"
    if not home.exists():
        shutil.copytree(keycloak_built(lab), home)
    (home / "data" / "import").mkdir(parents=True, exist_ok=True)
    (home / "data" / "import" / "fab.json").write_text(json.dumps(_realm(secrets_of(lab))))
    host, port = KEYCLOAK.removeprefix("http://").split(":")
    server = Server(lab, "keycloak")
    server.start(
        "bash",
        home / "bin" / "kc.sh",
        "start",
        "--optimized",
        "--http-enabled=true",
        "--hostname-strict=false",
        f"--http-host={host}",
        f"--http-port={port}",
        "--import-realm",
        env={"JAVA_OPTS_APPEND": " ".join(["-Djava.net.preferIPv4Stack=true", *_java(lab)])},
    )
    server.ready(lambda: urllib.request.urlopen(f"{KEYCLOAK}/realms/fab", timeout=2).status == 200, timeout=180)


def _java(lab: Lab) -> tuple[str, ...]:
    """Temporary files, among them performance data, go away with the lab."""
    return ("-Xmx512m", "-XX:-UsePerfData", f"-Djava.io.tmpdir={lab.tmp}")


def _realm(keys: Mapping[str, str]) -> dict[str, object]:
    mapper = {  # Keycloak tells a client of the tokens that are meant for it, and of no others
        "name": "for the catalog",
        "protocol": "openid-connect",
        "protocolMapper": "oidc-audience-mapper",
        "config": {"included.client.audience": "catalog", "access.token.claim": "true"},
    }
    scopes = [
        {"name": "audience", "protocol": "openid-connect", "protocolMappers": [mapper]},
        {"name": SCOPE, "protocol": "openid-connect", "attributes": {"include.in.token.scope": "true"}},
    ]
    clients = [
        {
            "clientId": client,
            "secret": keys[client],
            "enabled": True,
            "publicClient": False,
            "serviceAccountsEnabled": True,
            "standardFlowEnabled": False,
            "attributes": {"access.token.lifespan": str(seconds)},
            "defaultClientScopes": ["audience"],
            "optionalClientScopes": [SCOPE],  # only in the token of who asks for it
        }
        for client, seconds in CLIENTS.items()
    ]
    return {"realm": "fab", "enabled": True, "sslRequired": "none", "clientScopes": scopes, "clients": clients}


def catalog(lab: Lab) -> None:
    """
    With the object store up the warehouses are in the bucket `lake`, else in a folder of the lab; with the identity
    provider up every request needs its token, SCOPE and REALM_HEADER.
    """
    keys, folder = secrets_of(lab), lab.dir / "catalog"
    folder.mkdir(exist_ok=True)
    settings = {"LAB_WAREHOUSES": f"file://{lab.dir}/warehouse"}
    if Server(lab, "s3").pid():
        settings = {
            "LAB_WAREHOUSES": "s3://lake",
            "LAB_S3_ENDPOINT": S3,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": keys["s3_access_key"],
            "AWS_SECRET_ACCESS_KEY": keys["s3_secret_key"],
        }
    if Server(lab, "keycloak").pid():
        settings |= {
            "LAB_INTROSPECTION": f"{TOKENS}/introspect",
            "LAB_INTROSPECTION_CLIENT": f"catalog:{keys['catalog']}",
            "LAB_SCOPE": SCOPE,
            "LAB_HEADER": f"{REALM_HEADER}: {REALM}",
        }
    jar, (host, port) = maven(lab, ICEBERG), CATALOG.removeprefix("http://").split(":")
    server = Server(lab, "catalog")
    program = HERE / "java" / "LabCatalog.java"
    server.start("java", *_java(lab), "-cp", jar, program, host, port, folder, env=settings)
    server.ready(lambda: _answers(f"{CATALOG}/lab/requests"))


SERVICES: dict[str, Callable[[Lab], None]] = {"s3": s3, "keycloak": keycloak, "catalog": catalog}
"""In this order: the catalog looks which of the others are up."""
