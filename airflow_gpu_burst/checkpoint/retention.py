"""Which commits stay restorable. Pure; who may retire, and what must stay in any case, is the run log's business."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from airflow_gpu_burst.contract import PINNED
from airflow_gpu_burst.runlog import Commit
from airflow_gpu_burst.spec import Checkpointing


def staying(
    commits: Sequence[Commit],
    policy: Checkpointing,
    *,
    damaged: Collection[int] = (),
    restore_from: int | None = None,
) -> frozenset[int]:
    """
    The commits that stay, by their places in the log: the last ones, every k-th step, the best, the pinned.

    :param commits: those that are not retired, in the order of the log.
    :param damaged: of these, the ones that were found damaged: they do not count among the last or the best.
    :param restore_from: what the present epoch restores.
    """
    sound = [commit for commit in commits if commit.seq not in damaged]
    stay = {commit.seq for commit in sound[-policy.keep :]}
    stay |= {commit.seq for commit in commits if commit.metrics.get(PINNED) is True or commit.seq == restore_from}
    if policy.keep_every:
        # Of a step that was saved more than once the last counts: it is what training went on from.
        stay |= set({c.step: c.seq for c in sound if c.step % policy.keep_every == 0}.values())
    if policy.best:
        stay |= set(_best(sound, policy))
    return frozenset(stay)


def value_of(commit: Commit, metric: str) -> float | None:
    """A metric's value; None if it is missing, or no finite number."""
    value = commit.metrics.get(metric)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _best(commits: Sequence[Commit], policy: Checkpointing) -> list[int]:
    sign = 1 if policy.best_mode == "min" else -1
    ranked = [(sign * value, -c.seq) for c in commits if (value := value_of(c, policy.best)) is not None]
    return [-seq for _, seq in sorted(ranked)[: policy.keep_best]]  # of equals the later one
