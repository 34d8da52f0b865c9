"""
Which cluster, as whom: every form of a connection becomes one kubeconfig document, checked before it is used.

Nothing here imports the Kubernetes client. What is wrong is said by name (the file that is absent, the contexts that
there are): the client's own loader says `KeyError` or logs a line and goes on without credentials.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from airflow_gpu_burst.errors import SpecError
from airflow_gpu_burst.routes import KubeConfig

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds its own token, CA and namespace."""

_FILES = (
    ("cluster", "certificate-authority"),
    ("user", "client-certificate"),
    ("user", "client-key"),
    ("user", "tokenFile"),
)


@dataclass(frozen=True, kw_only=True)
class Login:
    """
    A kubeconfig that can be used here.

    :param document: the whole kubeconfig.
    :param folder: relative files of the document lie there; empty: the working directory.
    :param namespace: of the context, or `default`.
    :param where: the cluster and how it is reached, for messages; no secret.
    :param command: the exec plugin, or empty.
    """

    document: dict[str, Any] = field(repr=False)
    context: str
    namespace: str
    folder: str
    where: str
    command: str


def login_of(config: KubeConfig, environ: Mapping[str, str] = os.environ) -> Login:
    """
    Read and check what the connection says. Of several forms the first counts: text, path, in-cluster, host. With
    none of them: the file that KUBECONFIG names, or `~/.kube/config`, or the pod's own account.

    :raises SpecError: cannot be used here; says what to change.
    """
    if config.kubeconfig:
        return _checked(
            _parsed(config.kubeconfig, "the connection's kubeconfig"),
            config,
            "",
            "the connection's kubeconfig",
            config.context,
        )
    if config.kubeconfig_path:
        return _from_file(Path(config.kubeconfig_path).expanduser(), config)
    if config.in_cluster:
        return _in_cluster(config, environ)
    if config.host:
        return _checked(_document(config), config, "", "host and token of the connection")
    candidates = environ.get("KUBECONFIG", "").split(os.pathsep) + ["~/.kube/config"]
    for path in (Path(text).expanduser() for text in candidates if text):
        if path.is_file():
            return _from_file(path, config)
    if environ.get("KUBERNETES_SERVICE_HOST"):
        return _in_cluster(config, environ)
    raise SpecError(
        "the connection names no cluster, and there is neither a ~/.kube/config nor a pod's account here. "
        "Give it one of: kubeconfig, kubeconfig_path, in_cluster, or host with token and ca"
    )


def _from_file(path: Path, config: KubeConfig) -> Login:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(
            f"kubeconfig {path} cannot be read on this machine: {error}. Every worker and triggerer needs the file; "
            "or put its text into the connection (kubectl config view --flatten --minify)"
        ) from error
    return _checked(_parsed(text, str(path)), config, str(path.parent), str(path), config.context)


def _in_cluster(config: KubeConfig, environ: Mapping[str, str]) -> Login:
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (SERVICE_ACCOUNT / "token").is_file():
        raise SpecError(
            f"in_cluster is set, but this process has no pod's account (KUBERNETES_SERVICE_HOST and "
            f"{SERVICE_ACCOUNT}/token). Run Airflow in a pod that has its account's token, or use a kubeconfig"
        )
    document = _with(
        {
            "server": f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
            "certificate-authority": str(SERVICE_ACCOUNT / "ca.crt"),
        },
        {"tokenFile": str(SERVICE_ACCOUNT / "token")},
    )
    own = SERVICE_ACCOUNT / "namespace"
    if own.is_file():
        document["contexts"][0]["context"]["namespace"] = own.read_text(encoding="utf-8").strip()
    return _checked(document, config, "", "the pod's own account")


def _document(config: KubeConfig) -> dict[str, Any]:
    cluster: dict[str, Any] = {"server": config.host if "://" in config.host else f"https://{config.host}"}
    if "-----BEGIN" in config.ca:
        cluster["certificate-authority-data"] = base64.b64encode(config.ca.encode()).decode()
    elif config.ca:
        cluster["certificate-authority"] = str(Path(config.ca).expanduser())
    return _with(cluster, {"token": config.token} if config.token else {})


def _with(cluster: dict[str, Any], user: dict[str, Any]) -> dict[str, Any]:
    name = "connection"
    return {
        "clusters": [{"name": name, "cluster": cluster}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        "current-context": name,
    }


def _parsed(text: str, source: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = _yaml(text, source)
    if not isinstance(found, dict):
        raise SpecError(f"{source} is no kubeconfig (a mapping with clusters, contexts, users). Paste the whole file")
    return found


def _yaml(text: str, source: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        # only the place: the error's own text quotes the line, which may hold the token
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}" if mark else ""
        raise SpecError(
            f"{source} is neither JSON nor YAML{place}. Paste the whole file, line breaks included"
        ) from None


def _checked(document: dict[str, Any], config: KubeConfig, folder: str, source: str, context: str = "") -> Login:
    contexts = _named(document, "contexts", "context")
    name = context or str(document.get("current-context") or "")
    if name not in contexts:
        wanted = f"has no context {name!r}" if name else "has no current-context, and the connection names none"
        raise SpecError(
            f"{source} {wanted}; it has: {', '.join(sorted(contexts)) or 'none'}. Set the connection's context"
        )
    chosen = contexts[name]
    cluster = _named(document, "clusters", "cluster").get(str(chosen.get("cluster")))
    if not cluster or not cluster.get("server"):
        raise SpecError(
            f"{source}: context {name!r} refers to cluster {chosen.get('cluster')!r}, which has no server there. "
            "Paste the whole file"
        )
    user = _named(document, "users", "user").get(str(chosen.get("user"))) or {}
    _files_exist({"cluster": cluster, "user": user}, folder, source)
    _token_read(user, folder, source)
    if not config.verify_ssl:
        cluster["insecure-skip-tls-verify"] = True
    return Login(
        document=document,
        context=name,
        namespace=config.namespace or str(chosen.get("namespace") or "default"),
        folder=folder,
        where=f"cluster {cluster['server']} ({source})",
        command=_command(user, folder, source),
    )


def _named(document: dict[str, Any], plural: str, singular: str) -> dict[str, dict[str, Any]]:
    items = document.get(plural) or []
    if not isinstance(items, list):
        raise SpecError(f"kubeconfig: {plural} is not a list. Paste the whole file")
    return {str(i["name"]): i.get(singular) or {} for i in items if isinstance(i, dict) and "name" in i}


def _files_exist(parts: dict[str, dict[str, Any]], folder: str, source: str) -> None:
    for part, key in _FILES:
        value = parts[part].get(key)
        if not value or parts[part].get(f"{key}-data"):
            continue
        if not (Path(folder) / str(value)).is_file():
            raise SpecError(
                f"{source} refers to {value} ({key}), which does not exist on this machine. "
                "Put its content into the kubeconfig: kubectl config view --flatten --minify"
            )


def _token_read(user: dict[str, Any], folder: str, source: str) -> None:
    """A token from its file, as kubectl prefers it, without the line break that many a file and form ends in."""
    if user.get("tokenFile"):
        user["token"] = (Path(folder) / str(user["tokenFile"])).read_text(encoding="utf-8", errors="replace")
    if user.get("token"):
        user["token"] = str(user["token"]).strip()
        if not user["token"].isascii() or not user["token"].isprintable() or " " in user["token"]:
            raise SpecError(
                f"{source}: the token holds characters that no token has, such as a line break. Paste it anew"
            )


def _command(user: dict[str, Any], folder: str, source: str) -> str:
    """The exec plugin's command; it must be there, since the client's loader would go on as nobody."""
    command = str((user.get("exec") or {}).get("command") or "")
    if command and not shutil.which(str(Path(folder) / command) if os.sep in command else command):
        raise SpecError(
            f"{source} gets its credentials from the command {command!r}, which is not installed on this machine. "
            "Install it on every worker and triggerer, or use a token: kubectl create token airflow-gpu-burst"
        )
    return command
