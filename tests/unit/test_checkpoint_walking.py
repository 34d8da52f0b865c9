"""What a folder holds, as it is found; small files together; what cannot be saved is named, never skipped."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu_burst.checkpoint.manifest import Same
from airflow_gpu_burst.checkpoint.packing import batches, object_name, read_pack
from airflow_gpu_burst.checkpoint.paths import Link
from airflow_gpu_burst.checkpoint.sparse import combined, extents_of
from airflow_gpu_burst.checkpoint.walking import Found, Identity, check_unchanged, walk
from airflow_gpu_burst.errors import CheckpointError
from airflow_gpu_burst.transfer import crc

MIB = 1 << 20


def test_everything_is_found_once_in_a_stable_order(tmp_path: Path) -> None:
    (tmp_path / "z" / "deep").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    for name in ("b", "a", "z/deep/c"):
        (tmp_path / name).write_text(name)
    os.link(tmp_path / "b", tmp_path / "z" / "again")
    (tmp_path / "link").symlink_to("z/deep")
    (tmp_path / "dangling").symlink_to("nowhere")
    walked = walk(tmp_path)
    assert [file.path for file in walked.files] == ["a", "b", "z/deep/c"]
    assert walked.folders == ("empty",)
    assert walked.links == (Link("dangling", "nowhere"), Link("link", "z/deep"))
    assert walked.same == (Same("z/again", "b"),)
    assert walked.size == 1 + 1 + 8


@pytest.mark.parametrize("target", ["/etc/hostname", "..", "../../outside", "./x/../../../outside", "up/.."])
def test_a_link_that_leaves_the_folder_is_refused_by_name(tmp_path: Path, target: str) -> None:
    folder = tmp_path / "c"
    (folder / "in").mkdir(parents=True)
    (folder / "in" / "up").symlink_to("..")
    (folder / "in" / "the-link").symlink_to(target)
    if target == "..":
        walk(folder)  # from a subfolder that is the folder itself
        (folder / "the-link").symlink_to(target)
    with pytest.raises(CheckpointError, match="the-link.*points out of the tree.*relative path inside"):
        walk(folder)


def test_a_special_file_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="'pipe' is a special file.*move it out"):
        walk(tmp_path)
    (tmp_path / "pipe").unlink()
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(tmp_path)  # a socket's path is short
        server.bind("sock")
        with pytest.raises(CheckpointError, match="'sock' is a special file"):
            walk(tmp_path)


@pytest.mark.parametrize("name", [b"a\xff", b"a\nb", b"a\\b"])
def test_a_name_that_is_not_good_everywhere_is_refused(tmp_path: Path, name: bytes) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_text("x")
    with pytest.raises(CheckpointError, match="Rename the file"):
        walk(tmp_path)


def test_a_folder_that_cannot_be_read_is_an_error_not_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        walk(tmp_path / "missing")


@pytest.mark.parametrize("change", ["append", "touch", "replace", "remove", "a link instead"])
def test_a_file_that_is_not_what_it_was_is_noticed(tmp_path: Path, change: str) -> None:
    path = tmp_path / "weights"
    path.write_text("x")
    walked = walk(tmp_path)
    check_unchanged(tmp_path, walked.files)
    match change:
        case "append":
            with path.open("a") as file:
                file.write("y")
        case "touch":
            os.utime(path, ns=(0, walked.files[0].identity.mtime_ns + 1))
        case "replace":
            (tmp_path / "new").write_text("x")
            os.utime(tmp_path / "new", ns=(0, walked.files[0].identity.mtime_ns))
            (tmp_path / "new").rename(path)
        case "remove":
            path.unlink()
        case "a link instead":
            path.rename(tmp_path / "elsewhere")
            path.symlink_to("elsewhere")
    for look in (
        lambda: check_unchanged(tmp_path, walked.files),
        lambda: read_pack(tmp_path, list(walked.files), "k", memoryview(bytearray(1))),
    ):
        with pytest.raises(CheckpointError, match="weights changed while it was uploaded"):
            look()


SIZES = st.lists(st.integers(0, 60), max_size=40)


def found(number: int, size: int) -> Found:
    return Found(f"{number:03d}", Identity(1, number, size, 0), 0o644, False)


@given(SIZES)
def test_batches_keep_every_file_once_in_order_and_within_the_limit(sizes: list[int]) -> None:
    files = [found(number, size) for number, size in enumerate(sizes)]
    made = list(batches(files, limit=60))
    assert [file for batch in made for file in batch] == files
    assert all(batch and sum(file.size for file in batch) <= 60 for batch in made)
    for one, following in zip(made, made[1:], strict=False):
        assert sum(file.size for file in one) + following[0].size > 60  # as many together as fit


def test_an_object_is_named_by_what_is_in_it() -> None:
    one, other = found(1, 10), found(2, 10)
    assert object_name([one, other]) == object_name([one, other])
    written_anew = one._replace(identity=one.identity._replace(mtime_ns=1))
    names = {object_name(files) for files in ([one], [one, other], [other, one], [written_anew], [written_anew, other])}
    assert len(names) == 5


def test_a_pack_holds_the_files_one_after_the_other(tmp_path: Path) -> None:
    for name, content in {"a": b"one", "b": b"", "c": b"three"}.items():
        (tmp_path / name).write_bytes(content)
    buffer = bytearray(8)
    entries = read_pack(tmp_path, list(walk(tmp_path).files), "k", memoryview(buffer))
    assert bytes(buffer) == b"onethree"
    assert [(e.path, e.size, e.offset, e.key) for e in entries] == [
        ("a", 3, 0, "k"),
        ("b", 0, None, ""),
        ("c", 5, 3, "k"),
    ]
    assert [e.crc64nvme for e in entries] == [crc.of_bytes(data) for data in (b"one", b"", b"three")]


def sparse(path: Path, size: int, pieces: dict[int, bytes]) -> bytes:
    content = bytearray(size)
    with path.open("wb") as file:
        file.truncate(size)
        for start, data in pieces.items():
            file.seek(start)
            file.write(data)
            content[start : start + len(data)] = data
    return bytes(content)


@pytest.mark.parametrize(
    "pieces",
    [
        {},
        {0: b"first"},
        {3 * MIB - 5: b"last!"},
        {0: b"a" * 70_000, MIB: b"b", 2 * MIB + 1: b"c" * 5000},
        {MIB: b"x", MIB + 20_000: b"y"},  # a hole that is too small to matter
    ],
)
def test_a_sparse_file_is_known_by_its_data_alone(tmp_path: Path, pieces: dict[int, bytes]) -> None:
    content = sparse(tmp_path / "f", 3 * MIB, pieces)
    (file,) = walk(tmp_path).files
    assert file.sparse
    extents = extents_of(tmp_path / "f", file)
    assert extents is not None
    assert sum(length for _, length, _ in extents) < 200_000
    rebuilt = bytearray(file.size)
    for start, length, part in extents:
        rebuilt[start : start + length] = content[start : start + length]
        assert crc.of_bytes(content[start : start + length]) == part
    assert bytes(rebuilt) == content
    assert combined(extents, file.size) == crc.of_bytes(content)


def test_a_file_without_holes_has_no_extents(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(2 * MIB))
    (file,) = walk(tmp_path).files
    assert not file.sparse
    assert extents_of(tmp_path / "f", file) is None
