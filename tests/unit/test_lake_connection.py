"""From the fields of a connection to the properties of a catalog: pure, and nothing passes unlisted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from airflow_gpu_burst.errors import SpecError
from airflow_gpu_burst.lake.catalog import CatalogConfig, is_secret, split_name
from airflow_gpu_burst.lake.connection import config_of
from airflow_gpu_burst.provider_info import get_provider_info

CONNECTION_TYPE = next(
    entry for entry in get_provider_info()["connection-types"] if entry["connection-type"] == "iceberg_lake"
)
URI = "https://polaris.example.com/api/catalog"


def config(host: str | None = URI, **fields: Any) -> CatalogConfig:
    extras = fields.pop("extras", {})
    return config_of("lake", host=host, extras=extras, **fields)


def everything(found: CatalogConfig) -> dict[str, str]:
    return {**found.properties, **found.secrets}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"uri": URI}),
        ({"host": URI + "/v1/"}, {"uri": URI}),
        ({"host": None, "extras": {"uri": URI}}, {"uri": URI}),
        ({"login": "id", "password": "s3cret"}, {"uri": URI, "credential": "id:s3cret"}),
        ({"password": "token-only"}, {"uri": URI, "credential": "token-only"}),
        ({"extras": {"warehouse": " fab ", "scope": ""}}, {"uri": URI, "warehouse": "fab"}),
        ({"extras": {"scope": None}}, {"uri": URI}),
        (
            {"extras": {"realm": "FAB", "oauth2_server_uri": "https://idp/token"}},
            {"uri": URI, "header.Polaris-Realm": "FAB", "oauth2-server-uri": "https://idp/token"},
        ),
        ({"extras": {"access_delegation": "none"}}, {"uri": URI, "header.X-Iceberg-Access-Delegation": ""}),
        (
            {"extras": {"access_delegation": "vended"}},
            {"uri": URI, "header.X-Iceberg-Access-Delegation": "vended-credentials"},
        ),
        (
            {"extras": {"s3_endpoint": "https://s3", "s3_access_key_id": "a", "s3_secret_access_key": "b"}},
            {"uri": URI, "s3.endpoint": "https://s3", "s3.access-key-id": "a", "s3.secret-access-key": "b"},
        ),
        ({"host": "sqlite:////data/c.db"}, {"uri": "sqlite:////data/c.db"}),
        (
            {"host": "postgresql://db/ice", "login": "u@x", "password": "p:/@"},
            {"uri": "postgresql://u%40x:p%3A%2F%40@db/ice"},
        ),
    ],
)
def test_fields_become_properties(fields: dict[str, Any], expected: dict[str, str]) -> None:
    assert everything(config(**fields)) == expected


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"host": "polaris.example.com", "port": 8181}, "'polaris.example.com:8181' is no URI.*e.g. https://"),
        ({"host": ""}, "Set host"),
        ({"extras": {"warehous": "x"}}, "unknown extra 'warehous'. Did you mean 'warehouse'"),
        ({"extras": {"py-catalog-impl": "os.system"}}, "unknown extra 'py-catalog-impl'"),
        ({"extras": {"s3_region": 7}}, "'s3_region' is int: write it as text"),
        ({"extras": {"access_delegation": "off"}}, "Choose one of: vended, remote-signing, none"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=f"connection 'lake'.*{says}"):
        config(**fields)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("credential", "id:secret", True),
        ("token", "x", True),
        ("s3.secret-access-key", "x", True),
        ("s3.session-token", "x", True),
        ("s3.access-key-id", "x", True),
        ("client.secret-access-key", "x", True),
        ("adls.account-key", "x", True),
        ("adls.sas-token", "x", True),
        ("gcs.oauth2.token", "x", True),
        ("header.Authorization", "Bearer x", True),
        ("auth.oauth2.client_secret", "x", True),
        ("auth.basic.password", "x", True),
        ("uri", "postgresql+psycopg2://user:pass@db/ice", True),
        ("uri", "postgresql://user@db/ice", False),
        ("uri", "https://polaris:8181/api/catalog", False),
        ("uri", "sqlite:////data/c.db", False),
        ("warehouse", "s3://bucket/a:b@c", False),
        ("oauth2-server-uri", "https://idp/token", False),
        ("gcs.oauth2.token-expires-at", "1", False),
        ("scope", "PRINCIPAL_ROLE:ALL", False),
        ("header.X-Iceberg-Access-Delegation", "vended-credentials", False),
        ("ssl.client.key", "/etc/key.pem", False),
    ],
)
def test_what_is_a_secret(key: str, value: str, expected: bool) -> None:
    assert is_secret(key, value) is expected


def test_secrets_show_nowhere() -> None:
    found = config(login="me", password="hush-hush", extras={"token": "t0k3n", "s3_secret_access_key": "k3yk3y"})
    assert not {"hush-hush", "t0k3n", "k3yk3y"} & set(found.properties.values())
    for secret in ("hush-hush", "t0k3n", "k3yk3y"):
        assert secret not in repr(found)
        assert secret not in found.redact(f"server said: bad {secret} and me:hush-hush")
    database = config("postgresql://db:5432/ice", login="me", password="hush@hush")
    assert database.redact("me/hush@hush (hush%40hush) at db:5432") == "me/*** (***) at db:5432"


def test_a_config_with_a_secret_in_the_open_is_refused() -> None:
    with pytest.raises(SpecError, match="credential is a secret.*CatalogConfig.of"):
        CatalogConfig(name="lake", properties={"uri": URI, "credential": "id:x"})


@pytest.mark.parametrize("name", ["wafers", "", ".wafers", "fab.", "fab..wafers", "fab. "])
def test_names_that_name_no_table(name: str) -> None:
    with pytest.raises(SpecError, match=r"e\.g\. 'fab.wafers'"):
        split_name(name)


def test_the_form_is_what_airflow_s_schema_wants() -> None:
    """Airflow ships the schema; read as a file, since importing Airflow takes seconds."""
    import importlib.metadata

    shipped = importlib.metadata.distribution("apache-airflow-core").locate_file("airflow/provider.yaml.schema.json")
    schema = json.loads(Path(str(shipped)).read_text())["properties"]["connection-types"]
    jsonschema.validate([CONNECTION_TYPE], schema)


def test_every_field_of_the_form_is_understood() -> None:
    for name, field in CONNECTION_TYPE["conn-fields"].items():
        value = {"access_delegation": "vended", "type": "rest", "uri": URI}.get(name, "x")
        found = config(extras={name: value})
        hidden = field["schema"].get("format") == "password"
        assert hidden == bool(found.secrets), name
