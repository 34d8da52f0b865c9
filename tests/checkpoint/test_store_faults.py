"""Saves and restores on an S3 server that misbehaves: right in the end, or an error that says what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu_burst.checkpoint import Manifest, restore, save
from airflow_gpu_burst.checkpoint.verifying import verify
from airflow_gpu_burst.errors import ChecksumMismatch, GpuBurstError, ObjectMissing, StoreForbidden
from airflow_gpu_burst.store import open_store
from airflow_gpu_burst.transfer import Mover, Settings, open_mover
from tests.checkpoint.trees import MIB, plant, seen
from tests.faulty_s3 import FaultyS3


@pytest.fixture
def mover(faulty: FaultyS3) -> Iterator[Mover]:
    opened = open_mover(faulty.config(), Settings(part_size=5 * MIB))
    yield opened
    opened.close()


def named(manifest: Manifest) -> tuple[str, str]:
    return manifest.key, manifest.sha256


PASSING = [
    {"status": 503, "code": "SlowDown"},
    {"status": 500, "code": "InternalError"},
    {"lost": True},
    {"close": True},
    {"chunked": True},
    {"delay_s": 0.2},
]


@pytest.mark.parametrize("fault", [*PASSING, {"reset_after": 100}], ids=str)
@pytest.mark.parametrize("kind", ["PutObject", "UploadPart", "CompleteMultipartUpload"])
def test_a_save_survives_what_passes(
    faulty: FaultyS3, mover: Mover, tmp_path: Path, kind: str, fault: dict[str, Any]
) -> None:
    source = plant(tmp_path / "source")
    faulty.fault(kind, times=2, **fault)
    manifest = save(mover, source, "p")
    restore(mover, [named(manifest)], tmp_path / "target")
    assert seen(tmp_path / "target") == seen(source)


@pytest.mark.parametrize("fault", [*PASSING, {"truncate": 1000}, {"corrupt": True}, {"ranges": False}], ids=str)
def test_a_restore_survives_what_passes(faulty: FaultyS3, mover: Mover, tmp_path: Path, fault: dict[str, Any]) -> None:
    source = plant(tmp_path / "source")
    manifest = save(mover, source, "p")
    faulty.fault("GetObject", skip=1, times=1, **fault)
    restore(mover, [named(manifest)], tmp_path / "target")
    assert seen(tmp_path / "target") == seen(source)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ({"corrupt": True}, ChecksumMismatch),
        ({"status": 404, "code": "NoSuchKey"}, ObjectMissing),
        ({"status": 403, "code": "AccessDenied"}, StoreForbidden),
    ],
    ids=str,
)
def test_what_stays_is_told_apart(
    faulty: FaultyS3, mover: Mover, tmp_path: Path, fault: dict[str, Any], error: type[GpuBurstError]
) -> None:
    """Damage makes a run go back to the checkpoint before; what cannot be told must not."""
    manifest = save(mover, plant(tmp_path / "source"), "p")
    faulty.fault("GetObject", skip=1, times=None, **fault)
    with pytest.raises(error):
        restore(mover, [named(manifest)], tmp_path / "rooms" / "target")
    assert not (tmp_path / "rooms" / "target").exists()
    if error is StoreForbidden:
        with pytest.raises(StoreForbidden):
            verify(mover, [named(manifest)])
    else:
        assert len(verify(mover, [named(manifest)])) > 0


def test_a_store_without_checksums_or_ranges_of_its_own(faulty: FaultyS3, mover: Mover, tmp_path: Path) -> None:
    source = plant(tmp_path / "source")
    faulty.fault("GetObject", times=None, ranges=False)
    manifest = save(mover, source, "p")
    restore(mover, [named(manifest)], tmp_path / "target")
    assert seen(tmp_path / "target") == seen(source)
    assert len(list(open_store(faulty.config()).list("p/"))) == 6
