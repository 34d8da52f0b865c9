"""One behaviour suite for every store: a directory, S3 over a simulated server, and over the lab's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from airflow_gpu_burst.errors import ObjectExists, ObjectMissing, SpecError, StoreError
from airflow_gpu_burst.runlog import Member, RunLog, begin, close_generation, settle_generation
from airflow_gpu_burst.store import Entry, Store, StoreConfig, open_store, probe_conditions
from airflow_gpu_burst.store.s3 import S3Store


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


def s3_config(endpoint: str, uri: str = "s3://bucket/some/prefix") -> StoreConfig:
    return StoreConfig(
        uri=uri,
        endpoint_url=endpoint,
        region="us-east-1",
        access_key_id="test",
        secret_access_key="test",
    )


@pytest.fixture(params=["directory", "s3", pytest.param("lab", marks=pytest.mark.lab)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "directory":
        yield open_store(StoreConfig(uri=(tmp_path / "a store").as_uri()))
        return
    if request.param == "lab":
        yield S3Store(request.getfixturevalue("stack").store())
        return
    found = S3Store(s3_config(request.getfixturevalue("s3_endpoint")))
    found._client.create_bucket(Bucket="bucket")
    yield found
    left = [{"Key": f"some/prefix/{entry.key}"} for entry in found.list("")]
    for start in range(0, len(left), 1000):
        found._client.delete_objects(Bucket="bucket", Delete={"Objects": left[start : start + 1000]})
    found._client.delete_bucket(Bucket="bucket")


def keys(store: Store, prefix: str = "") -> list[str]:
    return [entry.key for entry in store.list(prefix)]


def test_put_get_overwrite_delete(store: Store) -> None:
    store.put("a/b", b"one")
    store.put("a/b", b"two")
    assert store.get("a/b") == b"two"
    store.delete("a/b")
    with pytest.raises(ObjectMissing, match="a/b"):
        store.get("a/b")
    store.delete("a/b")


def test_empty_and_binary_values(store: Store) -> None:
    store.put("empty", b"")
    store.create("bytes", bytes(range(256)))
    assert (store.get("empty"), store.get("bytes")) == (b"", bytes(range(256)))


def test_create_is_refused_when_taken_and_changes_nothing(store: Store) -> None:
    store.create("log/1", b"first")
    for _ in range(2):
        with pytest.raises(ObjectExists):
            store.create("log/1", b"second")
    assert store.get("log/1") == b"first"
    store.delete("log/1")
    store.create("log/1", b"third")
    assert store.get("log/1") == b"third"


def test_of_many_simultaneous_creates_one_wins(store: Store) -> None:
    writers = 8
    for turn in range(5):
        gate = threading.Barrier(writers)

        def create(writer: int, gate: threading.Barrier = gate, turn: int = turn) -> bool:
            gate.wait()
            try:
                store.create(f"race/{turn}", b"%d" % writer * 1000)
            except ObjectExists:
                return False
            return True

        with ThreadPoolExecutor(writers) as pool:
            won = [writer for writer, winner in enumerate(pool.map(create, range(writers))) if winner]
        assert len(won) == 1
        assert store.get(f"race/{turn}") == b"%d" % won[0] * 1000


def test_probe_passes_and_cleans_up(store: Store) -> None:
    probe_conditions(store, rounds=3)
    assert keys(store) == []


class Ignores:
    """A store that takes `create` for `put`, as servers do that do not know the header."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.uri, self.get, self.put, self.delete = store.uri, store.get, store.put, store.delete
        self.list = store.list

    def create(self, key: str, data: bytes) -> None:
        self._store.put(key, data)


class LooksFirst(Ignores):
    """A store that looks, and then writes: right in sequence, wrong in a race."""

    def create(self, key: str, data: bytes) -> None:
        try:
            self._store.get(key)
        except ObjectMissing:
            self._wait()
            self._store.put(key, data)
        else:
            raise ObjectExists(key)

    def _wait(self) -> None:
        threading.Event().wait(0.05)


@pytest.mark.parametrize("kind", [Ignores, LooksFirst])
def test_probe_refuses_a_store_that_does_not_honour_conditions(store: Store, kind: type[Ignores]) -> None:
    with pytest.raises(StoreError, match="does not honour conditional writes.*Use a store"):
        probe_conditions(kind(store))
    assert keys(store) == []


def test_listing_is_sorted_and_by_plain_prefix(store: Store) -> None:
    names = ["a-b/c", "a.b/c", "a0", "aé/z", "b/x", "b/x-y", "b-x", "Z", "日本/データ", "😀"]
    for name in names:
        store.put(name, name.encode())
    assert list(store.list("")) == [Entry(name, len(name.encode())) for name in sorted(names)]
    assert keys(store, "b") == ["b-x", "b/x", "b/x-y"]
    assert keys(store, "b/") == ["b/x", "b/x-y"]
    assert keys(store, "b/x-") == ["b/x-y"]
    assert keys(store, "日本/") == ["日本/データ"]
    assert keys(store, "nothing/") == []


def test_listing_goes_over_pages(store: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: store.put(f"many/{n:05d}", b""), range(1005)))
    assert keys(store, "many/") == [f"many/{n:05d}" for n in range(1005)]


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/abs",
        "a//b",
        "a/",
        "../x",
        "a/../b",
        "a/..",
        ".",
        "a/./b",
        "a\\b",
        "a\0b",
        "a\nb",
        "a\x7f",
        "\ud800",
        ".gpu-burst-x",
        "a/.gpu-burst-1/b",
        "x" * 256,
        "x/" * 450 + "x",
    ],
)
def test_bad_keys_are_refused_by_every_verb(store: Store, key: str, tmp_path: Path) -> None:
    for verb in (
        lambda: store.get(key),
        lambda: store.put(key, b""),
        lambda: store.create(key, b""),
        lambda: store.delete(key),
    ):
        with pytest.raises(StoreError, match="use relative names"):
            verb()
    assert keys(store) == []


def test_listing_refuses_prefixes_that_lead_out(store: Store) -> None:
    for prefix in ("../", "/etc", "a/../../b"):
        with pytest.raises(StoreError):
            list(store.list(prefix))


@given(
    key=st.lists(
        st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/\\"), min_size=1, max_size=12),
        min_size=1,
        max_size=4,
    )
    .map("/".join)
    .filter(lambda key: not any(part in (".", "..") for part in key.split("/"))),
    data=st.binary(max_size=50),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_unicode_key_round_trips(store: Store, key: str, data: bytes) -> None:
    store.put(key, data)
    assert store.get(key) == data
    assert list(store.list(key)) == [Entry(key, len(data))]
    store.delete(key)
    assert keys(store) == []


def test_two_owners_and_airflow_in_real_threads(store: Store) -> None:
    """The run log on a real store: many epochs fence each other, one result comes out."""
    asked = {"spec_digest": "s", "max_tries": 0, "try_number": 1}
    settle_generation(RunLog(store, "run"), **asked)
    words: list[str] = []

    def train(owner: str) -> None:
        log = RunLog(store, "run")
        try:
            member = Member(owner=owner, rank=0, pod_uid=owner)
            epoch = begin(log, generation=1, member=member, world_size=1, deadline_s=60)
            for step in range(6):
                key = f"{epoch.data_prefix}/{step}"
                store.put(key, owner.encode())
                epoch.commit(step, {key: "0"})
                for commit in epoch.retire():
                    for key in commit.manifests:
                        store.delete(key)
            epoch.finish({"owner": owner})
            words.append("finished")
        except Exception as error:
            words.append(type(error).__name__)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(train, [f"owner-{n}" for n in range(6)]))
    assert sorted(set(words)) in (["Fenced", "finished"], ["Fenced", "Finished", "finished"], ["Finished", "finished"])
    assert words.count("finished") == 1
    history = RunLog(store, "run").read()
    for commit in history.restorable(1):
        assert all(store.get(key) == commit.owner.encode() for key in commit.manifests)
    assert close_generation(RunLog(store, "run"), 1, "failed").verdict == "succeeded"


def test_open_store_reports_its_uri(store: Store) -> None:
    assert open_store(StoreConfig(uri=store.uri)).uri == store.uri


@pytest.mark.parametrize("uri", ["", "relative", "file://relative", "s3://", "s3:///x", "http://x", "s3://b/../x"])
def test_bad_uris(uri: str) -> None:
    with pytest.raises((SpecError, StoreError)):
        StoreConfig(uri=uri)


@pytest.mark.parametrize(
    "make",
    [
        lambda: StoreConfig(uri="file:///a%20b/c"),
        lambda: StoreConfig(
            uri="s3://bucket/p/q",
            endpoint_url="https://s3.example.test",
            region="eu-central-1",
            ca_bundle="/ca.pem",
            access_key_id="AKID",
            secret_access_key="hidden-1",
            session_token="hidden-2",
        ),
    ],
)
def test_config_travels_through_the_environment(make: Callable[[], StoreConfig]) -> None:
    config = make()
    assert StoreConfig.from_env(config.to_env()) == config
    assert "hidden" not in repr(config)
    assert "AKID" not in repr(config)


def test_config_says_what_is_missing() -> None:
    with pytest.raises(SpecError, match="GPU_BURST_STORE"):
        StoreConfig.from_env({})
    with pytest.raises(SpecError, match="AWS_SECRET_ACCESS_KEY"):
        StoreConfig(uri="s3://b", access_key_id="x")
    with pytest.raises(SpecError, match="GPU_BURST_S3_ENDPOINT"):
        StoreConfig(uri="s3://b", endpoint_url="s3.example.test")
