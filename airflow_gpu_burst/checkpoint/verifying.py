"""Whether a saved tree would come back: everything is fetched and checked, nothing is kept."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from itertools import groupby

from airflow_gpu_burst.checkpoint.fetching import data_of, extents
from airflow_gpu_burst.checkpoint.manifest import File
from airflow_gpu_burst.checkpoint.reading import read_manifest
from airflow_gpu_burst.checkpoint.restoring import AT_ONCE
from airflow_gpu_burst.checkpoint.together import Meter, Progress, silent, together
from airflow_gpu_burst.errors import ChecksumMismatch, ObjectMissing
from airflow_gpu_burst.transfer.interface import Mover, Span


def verify(mover: Mover, manifests: Sequence[tuple[str, str]], *, progress: Progress = silent) -> list[str]:
    """
    What is damaged or missing, a sentence for each object; empty: all of it would come back.

    :param manifests: (key, SHA-256).
    :raises StoreError: the store does not answer: nothing is known then.
    """
    damage: list[str] = []
    files: list[File] = []
    for key, sha256 in manifests:
        try:
            files += read_manifest(mover, key, sha256).files
        except (ChecksumMismatch, ObjectMissing) as error:
            damage.append(str(error))
    meter = Meter(mover, sum(map(data_of, files)), progress)
    sink = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)

    def check(group: list[File]) -> None:
        spans = [Span((f.offset or 0) + start, n, sink, 0, crc) for f in group for start, n, crc in extents(f)]
        try:
            mover.fetch(group[0].key, sorted(spans, key=lambda span: span.start))
        except (ChecksumMismatch, ObjectMissing) as error:
            damage.append(str(error))

    by_key = groupby(sorted((f for f in files if data_of(f)), key=lambda f: f.key), key=lambda f: f.key)
    try:
        together([(AT_ONCE, [partial(check, list(group)) for _, group in by_key])], meter.tell)
    finally:
        os.close(sink)
    meter.whole()
    return sorted(damage)
