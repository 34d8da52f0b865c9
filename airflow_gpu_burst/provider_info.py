"""What Airflow shows of this provider: connection types with their forms, links. Pure data, read at every start."""

from __future__ import annotations

from typing import Any

from airflow_gpu_burst import __version__


def get_provider_info() -> dict[str, Any]:
    """The entry point `apache_airflow_provider`."""
    return {
        "package-name": "airflow-gpu-burst",
        "name": "GPU Burst",
        "description": "Run the GPU steps of workflows somewhere else, on pinned data, surviving every kill.",
        "versions": [__version__],
        "integrations": [
            {"integration-name": "GPU Burst", "external-doc-url": "https://kueue.sigs.k8s.io/", "tags": ["software"]}
        ],
        "operators": [
            {
                "integration-name": "GPU Burst",
                "python-modules": ["airflow_gpu_burst.operators.gpu_job", "airflow_gpu_burst.operators.pin"],
            }
        ],
        "hooks": [
            {
                "integration-name": "GPU Burst",
                "python-modules": [
                    "airflow_gpu_burst.hooks.gpu_cluster",
                    "airflow_gpu_burst.hooks.lake",
                    "airflow_gpu_burst.hooks.store",
                ],
            }
        ],
        "triggers": [{"integration-name": "GPU Burst", "python-modules": ["airflow_gpu_burst.triggers.gpu_job"]}],
        "extra-links": [
            f"airflow_gpu_burst.operators.links.{name}"
            for name in ("RunInStoreLink", "JobLink", "LogsLink", "ReportLink")
        ],
        "connection-types": [_GPU_CLUSTER, _OBJECT_STORE, _ICEBERG_LAKE],
    }


def _field(label: str, description: str = "", **schema: Any) -> dict[str, Any]:
    return {"label": label, "description": description, "schema": {"type": ["string", "null"], **schema}}


def _number(label: str, description: str, kind: str = "number") -> dict[str, Any]:
    return {"label": label, "description": description, "schema": {"type": [kind, "null"], "minimum": 0}}


def _switch(label: str, description: str) -> dict[str, Any]:
    return {"label": label, "description": description, "schema": {"type": ["boolean", "null"], "default": False}}


_GPU_CLUSTER: dict[str, Any] = {
    "connection-type": "gpu_cluster",
    "hook-class-name": "airflow_gpu_burst.hooks.gpu_cluster.GpuClusterHook",
    "hook-name": "GPU cluster",
    "ui-field-behaviour": {
        "hidden-fields": ["port", "login", "password", "schema"],
        "relabeling": {"host": "API server"},
        "placeholders": {"host": "https://api.gpu.example.com:6443, with a token; empty with a kubeconfig"},
    },
    # env_from, run_as and pull_with are names, not secrets. Airflow hides the value of every extra whose own name has
    # "secret" or "service_account" in it: a Secret called gpu-burst would turn that word into *** in every log.
    "conn-fields": {
        "route": _field(
            "Route",
            "How jobs get there. Empty: direct when an API server is named below, else local.",
            enum=["", "local", "direct"],
            default="",
        ),
        "site": _field("Site", "What people call it, in notes and lists of runs. Empty: the connection id."),
        "namespace": _field("Namespace", "Of the jobs. Empty: the kubeconfig's, or default."),
        "queue": _field("Queue", "Kueue LocalQueue. Empty: jobs are not queued."),
        "platform": _field("Platform", "What its GPU nodes look like, e.g. b300. Empty: generic, or local."),
        "store_conn_id": _field("Store connection", "Empty: object_store_default."),
        "kubeconfig": _field("Kubeconfig", "Its text, YAML or JSON.", format="password"),
        "kubeconfig_path": _field("Kubeconfig file", "Instead of the text: a path on workers and triggerers."),
        "context": _field("Context", "Of the kubeconfig. Empty: its current one."),
        "in_cluster": _switch("In the cluster", "Airflow runs in it: use the pod's own account."),
        "token": _field("Token", "Bearer token for the API server above.", format="password"),
        "ca": _field("Certificate authority", "Of the API server: PEM text or a path.", format="multiline"),
        "disable_verify_ssl": _switch("Trust any certificate", "Anyone on the way can then read the token."),
        "image": _field("Image", "For requests that name none."),
        "working_dir": _field("Working folder", "Where the image keeps the trainers. Empty: what the request says."),
        "run_as": _field("Service account", "Of the pods. Empty: the namespace's default."),
        "env_from": _field("Secret", "Kubernetes Secret with the keys to store and catalogs. Empty: gpu-burst."),
        "runtime_image": _field(
            "Runtime image", "Its /opt/gpu-burst is copied into pods whose image lacks the runtime."
        ),
        "pull_with": _field("Image pull secrets", "Names, with commas between them."),
        "image_pull_policy": _field(
            "Image pull policy",
            "Empty: the cluster's own rule.",
            enum=["", "Always", "IfNotPresent", "Never"],
            default="",
        ),
        "restarts": _number("Restarts", "Pods of a run that may fail and be replaced. Empty: 3.", "integer"),
        "keep_finished_s": _number("Keep finished", "Seconds that a finished job stays. Empty: 3600.", "integer"),
        "dashboard_url": _field(
            "Dashboard",
            "Address of a job with {namespace}, {kind}, {name}, {uid}; becomes a link of tasks.",
            format="url",
        ),
        "logs_url": _field(
            "Logs", "Address of its collected logs with the same placeholders; becomes a link of tasks.", format="url"
        ),
        "work_dir": _field("Work folder", "Local route: scratch files of the runs."),
        "grace_s": _number("Grace time", "Seconds between SIGTERM and SIGKILL. Empty: 10."),
    },
}

_OBJECT_STORE: dict[str, Any] = {
    "connection-type": "object_store",
    "hook-class-name": "airflow_gpu_burst.hooks.store.StoreHook",
    "hook-name": "Object store (GPU burst)",
    "ui-field-behaviour": {
        "hidden-fields": ["host", "port", "schema"],
        "relabeling": {"login": "Access key", "password": "Secret key"},
        "placeholders": {"login": "empty for a folder", "password": "empty for a folder"},
    },
    "conn-fields": {
        "uri": _field("Where", "s3://bucket/prefix, or file:///folder"),
        "endpoint_url": _field("Endpoint", "Of the S3 server; empty: AWS.", format="url"),
        "region": _field("Region"),
        "ca_bundle": _field("CA bundle", "File with the certificate authority of the endpoint."),
        "console_url": _field(
            "Console", "Where people browse it, up to the keys; becomes a link of tasks.", format="url"
        ),
    },
}

_ICEBERG_LAKE: dict[str, Any] = {
    "connection-type": "iceberg_lake",
    "hook-class-name": "airflow_gpu_burst.hooks.lake.LakeHook",
    "hook-name": "Iceberg lake",
    "ui-field-behaviour": {
        "hidden-fields": ["port", "schema"],
        "relabeling": {"host": "URI", "login": "Client ID", "password": "Client secret"},
        "placeholders": {
            "host": "https://polaris.example.com/api/catalog",
            "login": "empty: no credentials, or a token below",
        },
    },
    "conn-fields": {
        "type": _field("Type", "rest or sql. Empty: by the URI.", enum=["", "rest", "sql"], default=""),
        "uri": _field("URI", "Instead of the one above, for forms that are no URL: sqlite:///…"),
        "warehouse": _field("Warehouse", "What the catalog calls the warehouse, or its location."),
        "catalog_name": _field("Catalog name", "Of a SQL catalog: the name its rows carry. Empty: the connection id."),
        "scope": _field("Scope", "OAuth2 scope. Polaris wants PRINCIPAL_ROLE:<role>, or PRINCIPAL_ROLE:ALL."),
        "oauth2_server_uri": _field("OAuth2 token endpoint", "Empty: the catalog's own.", format="url"),
        "audience": _field("OAuth2 audience", "If the identity provider wants one."),
        "resource": _field("OAuth2 resource", "If the identity provider wants one."),
        "token": _field("Bearer token", "Instead of client ID and secret.", format="password"),
        "realm": _field("Realm", "Sent as Polaris-Realm."),
        "access_delegation": _field(
            "Storage access",
            "vended: the catalog hands out storage credentials. none: use those below.",
            enum=["", "vended", "remote-signing", "none"],
            default="",
        ),
        "ca_bundle": _field("CA bundle", "File with the certificate authority of the catalog."),
        "client_cert": _field("Client certificate", "File, for mutual TLS."),
        "client_key": _field("Client key", "File, for mutual TLS."),
        "s3_endpoint": _field("S3 endpoint", "Empty: AWS.", format="url"),
        "s3_region": _field("S3 region", "E.g. eu-central-1."),
        "s3_access_key_id": _field("S3 access key", "Only without vended credentials.", format="password"),
        "s3_secret_access_key": _field("S3 secret key", "Only without vended credentials.", format="password"),
    },
}
