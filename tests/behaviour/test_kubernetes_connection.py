"""An existing `kubernetes` connection works as it is, in a worker and a triggerer, and each reaches its own cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu_burst.hooks.gpu_cluster import GpuClusterHook, afind_site
from airflow_gpu_burst.routes import open_route
from tests.fake_apiserver import FakeApi


@pytest.fixture
def apis() -> Iterator[tuple[FakeApi, FakeApi]]:
    with FakeApi() as one, FakeApi() as other:
        one.tokens, other.tokens = {"token-of-one"}, {"token-of-other"}
        yield one, other


def text(api: FakeApi) -> str:
    return api.kubeconfig(token=next(iter(api.tokens)), namespace="fab")


FORMS: dict[str, Callable[[FakeApi, Path], dict[str, Any]]] = {
    "kube_config": lambda api, path: {"kube_config": text(api)},
    "kube_config as an object": lambda api, path: {"kube_config": json.loads(json.dumps(_parsed(text(api))))},
    "kube_config_path": lambda api, path: {"kube_config_path": _written(path, text(api))},
    "prefixed": lambda api, path: {"extra__kubernetes__kube_config": text(api)},
    "gpu_cluster's own words": lambda api, path: {"kubeconfig": text(api)},
}


def _parsed(kubeconfig: str) -> Any:
    import yaml

    return yaml.safe_load(kubeconfig)


def _written(path: Path, kubeconfig: str) -> str:
    file = path / "kubeconfig"
    file.write_text(kubeconfig)
    return str(file)


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    value = {"conn_type": "object_store", "extra": {"uri": f"file://{tmp_path}"}}
    monkeypatch.setenv("AIRFLOW_CONN_OBJECT_STORE_DEFAULT", json.dumps(value))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("conn_type", ["kubernetes", "gpu_cluster"])
def test_each_form_reaches_its_own_cluster(
    apis: tuple[FakeApi, FakeApi], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: str, conn_type: str
) -> None:
    for name, api in zip(("one", "other"), apis, strict=True):
        (tmp_path / name).mkdir()
        extra = {**FORMS[form](api, tmp_path / name), "queue": "q"}
        monkeypatch.setenv(f"AIRFLOW_CONN_{name.upper()}", json.dumps({"conn_type": conn_type, "extra": extra}))
    # The other first: a global configuration would keep it.
    for name, api in (("other", apis[1]), ("one", apis[0])):
        config = GpuClusterHook(name).config()
        route = open_route(config)
        assert (config.route, config.queue, route.namespace) == ("direct", "q", "fab")
        assert list(route.find()) == [] and api.count("list", "jobs") == 1
        site = asyncio.run(afind_site(name, "object_store_default"))
        assert list(site.route.find()) == [] and api.count("list", "jobs") == 2


def test_host_and_token(apis: tuple[FakeApi, FakeApi], monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"conn_type": "gpu_cluster", "host": apis[0].url, "password": "token-of-one", "extra": {"namespace": "n"}}
    monkeypatch.setenv("AIRFLOW_CONN_ONE", json.dumps(value))
    ok, said = GpuClusterHook("one").test_connection()
    assert ok and "namespace n" in said


def test_the_button_in_the_form_says_what_is_wrong(
    apis: tuple[FakeApi, FakeApi], monkeypatch: pytest.MonkeyPatch
) -> None:
    value = {"conn_type": "gpu_cluster", "host": apis[0].url, "password": "expired-token"}
    monkeypatch.setenv("AIRFLOW_CONN_ONE", json.dumps(value))
    ok, said = GpuClusterHook("one").test_connection()
    assert not ok and "token" in said
