"""What a manifest says comes back from its bytes; what leads out of a tree is refused in both directions."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu_burst.checkpoint.manifest import (
    Entries,
    File,
    Manifest,
    Same,
    decode,
    encode,
    length_of,
)
from airflow_gpu_burst.checkpoint.paths import Link, safe_path, stays_inside
from airflow_gpu_burst.contract import sha256_hex
from airflow_gpu_burst.errors import CheckpointError, ChecksumMismatch

NAME = st.text(st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="/\\"), min_size=1, max_size=20)
PATH = st.lists(NAME.filter(lambda name: name not in (".", "..")), min_size=1, max_size=4).map("/".join)
CRC = st.integers(0, 2**64 - 1)
FILE = st.builds(
    File,
    path=PATH,
    size=st.integers(1, 2**50),
    crc64nvme=CRC,
    key=st.sampled_from(["p/data/a", "p/data/b"]),
    offset=st.none() | st.integers(0, 2**30),
    mode=st.integers(0, 0o777),
    extents=st.none() | st.lists(st.tuples(st.integers(0), st.integers(1), CRC), max_size=3).map(tuple),
)


@given(st.lists(FILE, max_size=6), st.lists(PATH, max_size=3), st.lists(st.builds(Same, PATH, PATH), max_size=3))
def test_a_manifest_comes_back_from_its_bytes(files: list[File], folders: list[str], same: list[Same]) -> None:
    entries = Entries(tuple(files), tuple(folders), (Link("x", "y"),), tuple(same))
    manifest, data = encode(entries, "p")
    assert decode(data, manifest.key, manifest.sha256) == entries
    assert length_of(manifest.key) == len(data)
    assert (manifest.files, manifest.size) == (len(files), sum(file.size for file in files))


def with_file(path: str) -> tuple[Manifest, bytes]:
    return encode(Entries(files=(File(path, 1, 2, "p/data/x"),)), "p")


@pytest.mark.parametrize("path", ["a..b", "..a", "a..", "...", "ä ☃/b", "-", "a" * 255, "/".join(["abc"] * 256)])
def test_good_paths_are_taken(path: str) -> None:
    assert safe_path(path) == path


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("../outside", "segment"),
        ("/etc/passwd", "is absolute"),
        ("a/../../b", "segment"),
        ("a/..", "segment"),
        ("./a", "segment"),
        ("a//b", "empty"),
        ("a/", "empty"),
        ("", "empty"),
        ("a\\b", "backslash"),
        ("a\0b", "control"),
        ("a\nb", "control"),
        ("a\x7f", "control"),
        ("a\udcff", "no UTF-8"),
        ("a" * 1025, "longer than 1024 bytes"),
        ("ä" * 513, "longer than 1024 bytes"),
    ],
)
def test_a_path_that_leads_outside_is_refused_in_both_directions(path: str, says: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{says}.*neither saved nor restored. Rename"):
        safe_path(path)
    if path.isascii() and path:
        manifest, data = with_file(path)
        with pytest.raises(CheckpointError, match="neither saved nor restored"):
            decode(data, manifest.key, manifest.sha256)


@pytest.mark.parametrize(
    ("path", "target", "inside"),
    [
        ("a", "b", True),
        ("a", "a", True),  # a circle is harmless: nothing follows it
        ("a", "missing/x", True),
        ("d/a", "../b", True),
        ("d/a", "..", True),
        ("a", ".", True),
        ("a", "d/../b", True),
        ("a", "..", False),
        ("a", "../x", False),
        ("d/a", "../../x", False),
        ("a", "/etc/passwd", False),
        ("a", "d/../../x", False),
        # `up` leads to the root, so that two names lie behind what reads like one folder
        ("d/e/a", "up/..", False),
        ("d/e/a", "up/x", True),
        ("a", "out", False),
    ],
)
def test_links_stay_in_their_tree_or_are_refused(path: str, target: str, inside: bool) -> None:
    links = {"d/e/up": "../..", "out": "../x"}
    assert stays_inside(Link(path, target), links) is inside


def test_links_of_a_manifest_are_judged_when_it_is_read() -> None:
    manifest, data = encode(Entries(links=(Link("a", "../x"),)), "p")
    with pytest.raises(CheckpointError, match="points out of the tree"):
        decode(data, manifest.key, manifest.sha256)


def test_other_bytes_are_refused() -> None:
    manifest, data = with_file("a")
    with pytest.raises(ChecksumMismatch, match="the run log says"):
        decode(data + b" ", manifest.key, manifest.sha256)


@pytest.mark.parametrize("version", [1, 3, None, "2"])
def test_another_version_is_refused(version: object) -> None:
    data = json.dumps({"version": version, "files": []}).encode()
    with pytest.raises(CheckpointError, match="use the release"):
        decode(data, "p/manifest-1.json", sha256_hex(data))


ROW = ["a", 1, "0", 0, None, 0o644]


@pytest.mark.parametrize(
    "change",
    [
        {"files": [["a", 1, "0", 7, None, 0o644]]},
        {"files": [["a", -1, "0", 0, None, 0o644]]},
        {"files": [["a", 1, "no hex", 0, None, 0o644]]},
        {"files": [["a", 1]]},
        {"files": [["a", 1, "0", None, None, 0o644]]},
        {"files": [["a", 1, "0", 0, -5, 0o644]]},
        {"objects": ["../outside"]},
        {"objects": ["/data/x"]},
        {"links": [["a", "b\0"]]},
        {"links": [["a"]]},
        {"folders": None},
    ],
)
def test_what_does_not_read_as_a_manifest_is_refused(change: dict[str, object]) -> None:
    content = {"version": 2, "objects": ["data/x"], "files": [ROW], "folders": [], "links": [], "same": [], **change}
    data = json.dumps(content).encode()
    with pytest.raises(CheckpointError):
        decode(data, "p/manifest-1.json", sha256_hex(data))


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"null"])
def test_what_is_no_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="does not read as one"):
        decode(data, "p/manifest-1.json", sha256_hex(data))


@pytest.mark.parametrize(
    "key",
    [
        "p/manifest.json",
        "p/manifest-1.json",
        f"p/manifest-0-{'a' * 16}.json",
        f"p/manifest-1-{'a' * 16}.json.x",
        f"p/manifest-1-{'a' * 17}.json",
        f"manifest-x-{'a' * 16}.json",
    ],
)
def test_a_key_that_is_no_manifests_is_refused(key: str) -> None:
    with pytest.raises(CheckpointError, match="is no manifest of this release"):
        length_of(key)


def test_setuid_and_the_like_do_not_come_back() -> None:
    manifest, data = encode(Entries(files=(File("a", 1, 2, "p/data/x", None, 0o4755),)), "p")
    assert decode(data, manifest.key, manifest.sha256).files[0].mode == 0o755


def test_a_hundred_thousand_files_are_quick_and_small() -> None:
    files = tuple(File(f"shard-{n % 100:03d}/{n:06d}.bin", 4096, n << 40, "p/data/x", n * 4096) for n in range(100_000))
    began = time.process_time()
    manifest, data = encode(Entries(files=files), "p")
    assert len(decode(data, manifest.key, manifest.sha256).files) == 100_000
    assert time.process_time() - began < 5.0  # 0.8 s on a quiet machine
    assert len(data) < 100 * 100_000
