"""What the suites take for granted of the servers: that they ask for what a company's servers ask for."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.synchronize import Barrier
from typing import Any

import pytest

from airflow_gpu_burst.errors import CatalogError, ObjectExists
from airflow_gpu_burst.lake.catalog import CatalogConfig, load_table, opened
from airflow_gpu_burst.store import Store, StoreConfig, open_store, probe_conditions
from tests.lab_fixtures import Stack
from tests.lake_fixtures import WAFERS, Lake, wafers


def config(stack: Stack, client: str = "airflow-gpu-burst", **other: str) -> CatalogConfig:
    """Of a new warehouse; an empty value leaves the property out."""
    properties = {**stack.catalog(client=client), **other}
    return CatalogConfig.of("lake", {name: value for name, value in properties.items() if value})


class TestCatalog:
    @pytest.mark.parametrize(
        ("other", "says"),
        [
            ({"credential": "airflow-gpu-burst:wrong"}, "did not accept the credentials.*Check client id and secret"),
            ({"credential": ""}, "did not accept the credentials"),
            ({"credential": "", "token": "made-up"}, "did not accept the credentials"),
            ({"scope": "PRINCIPAL_ROLE:ALL"}, "did not accept the credentials: invalid_scope"),
            ({"header.Polaris-Realm": "OTHER"}, "Missing or invalid realm"),
            ({"header.Polaris-Realm": ""}, "Missing or invalid realm"),
            ({"warehouse": "nowhere"}, "Unable to find warehouse nowhere. Check uri and warehouse"),
        ],
    )
    def test_asks_for_credential_scope_realm_and_warehouse(
        self, stack: Stack, other: dict[str, str], says: str
    ) -> None:
        found = config(stack, **other)
        with pytest.raises(CatalogError, match=says) as caught, opened(found) as catalog:
            load_table(catalog, found, WAFERS)
        assert all(secret not in str(caught.value) for secret in found.secrets.values())

    def test_a_token_without_the_scope_is_not_enough(self, stack: Stack) -> None:
        import requests

        properties = stack.catalog()
        client, _, secret = properties["credential"].partition(":")
        form = {"grant_type": "client_credentials", "client_id": client, "client_secret": secret}
        token = requests.post(properties["oauth2-server-uri"], data=form, timeout=10).json()["access_token"]
        refused = pytest.raises(CatalogError, match="not allowed.*no activated grants.*Check the grants")
        with refused, opened(config(stack, credential="", token=token)):
            pass

    def test_a_token_that_has_expired_is_renewed_in_reads_and_commits(self, stack: Stack) -> None:
        found = config(stack, client="short-lived")
        with opened(found) as catalog:
            lake = Lake(config=found, catalog=catalog)
            lake.append(wafers(1))
            before = stack.catalog_requests().get("GET 401", 0)
            time.sleep(2.5)
            assert lake.rows() == wafers(1).to_pylist()
            assert stack.catalog_requests()["GET 401"] > before  # it had expired indeed
            table = lake.load()
            time.sleep(2.5)
            table.append(wafers(2))
            assert [row["wafer"] for row in lake.rows()] == [2, 1]

    def test_warehouses_are_apart(self, stack: Stack) -> None:
        one, other = config(stack), config(stack)
        with opened(one) as catalog:
            Lake(config=one, catalog=catalog).append(wafers(1))
        with opened(other) as catalog:
            assert catalog.list_namespaces() == []


def test_the_object_store_honours_conditions(stack: Stack) -> None:
    probe_conditions(open_store(stack.store()), writers=8, rounds=10)


@pytest.mark.parametrize("size", [100, 5_000_000])
def test_of_processes_that_create_one_object_one_wins(stack: Stack, size: int) -> None:
    """As pods would: with a connection each, and bodies that take a while."""
    store, count, rounds = stack.store(), 4, 10
    context = multiprocessing.get_context("forkserver")
    barrier, answers = context.Barrier(count, timeout=60), context.Queue()
    racers = [context.Process(target=_race, args=(store, n, rounds, size, barrier, answers)) for n in range(count)]
    for racer in racers:
        racer.start()
    found = [answers.get(timeout=120) for _ in racers]
    for racer in racers:
        racer.join()
    answers.close()
    for turn in range(rounds):
        winners = [number for number, won in found if turn in won]
        assert len(winners) == 1
        assert open_store(store).get(f"race/{turn}") == _body(winners[0], size)


def _body(number: int, size: int) -> bytes:
    return bytes([number]) * size


def _race(config: StoreConfig, number: int, rounds: int, size: int, barrier: Barrier, answers: Any) -> None:
    store: Store = open_store(config)
    won: list[int] = []
    for turn in range(rounds):
        barrier.wait()
        try:
            store.create(f"race/{turn}", _body(number, size))
            won.append(turn)
        except ObjectExists:
            pass
    answers.put((number, won))
