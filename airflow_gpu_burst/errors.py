"""
Every error of this package, and the exit codes that carry them out of a process.

* GpuBurstError                  retryable: no, unless said
  x SpecError                    the request is wrong
  x ContractError                worker and pod disagree on the version of their border
  x NotInstalledError            an optional dependency is missing: says what to type
  x StoreError                   the object store
    + StoreUnavailable           retryable: 5xx, timeout, no route
    + StoreForbidden             401 or 403: "cannot tell", never "nothing there"
    + ObjectMissing              404 for a key that must exist
    + ObjectExists               a conditional create lost
    + StoreFull                  no space left
  x RunLogError                  the run log holds something that must not be there
    + Fenced                     a newer epoch or generation has taken over
  x RouteError                   the cluster
    + ClusterUnreachable         retryable
      - ClusterUnauthorized      retryable: the credentials are not taken any more
    + ClusterForbidden           names verb and resource
    + NotAdmitted                the queue's own words
    + RunLost                    retryable: the run is gone without a verdict
  x RunFailed                    retryable, but for exit codes 3, 5 and 6
    + RunTimeout                 a queue, start or run timeout of the request has passed
    + Preempted
  x DataError                    the data that was pinned is not there any more
    + SnapshotGone
    + TableReplaced
    + ChecksumMismatch
  x CheckpointError
  x AgentLost                    retryable: the process that moves checkpoints died over and over
  x CatalogError                 the Iceberg catalog
    + CatalogUnavailable         retryable
  x GatewayError
  x PromotionConflict

Whether a retry may help is a property of the class (`retryable`), read once at the operator's edge.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of `gpu-burst run` and of every other command. Numbered once; never renumber."""

    OK = 0
    UNCATEGORISED = 1
    USAGE = 2
    REQUEST_WRONG = 3
    RETRY_MAY_HELP = 4
    DATA_MISSING = 5
    CONTRACT_MISMATCH = 6
    TRAINER_FAILED = 7
    FENCED = 8


class GpuBurstError(Exception):
    """Base of all errors of this package. Its message ends with what to do."""

    retryable: bool = False
    exit_code: ExitCode = ExitCode.UNCATEGORISED


class SpecError(GpuBurstError, ValueError):
    """The request is wrong. Says which field, and what would be right."""

    exit_code = ExitCode.REQUEST_WRONG


class ContractError(GpuBurstError):
    """The pod was given a contract of a version, or with a content, that it cannot read."""

    exit_code = ExitCode.CONTRACT_MISMATCH


class NotInstalledError(GpuBurstError, ImportError):
    """An optional dependency is missing or too old. The message is the command to type."""

    exit_code = ExitCode.USAGE


class StoreError(GpuBurstError):
    """The object store refused, or answered what cannot be understood."""


class StoreUnavailable(StoreError):
    """5xx, throttling, timeout or no route: nothing is known about what was asked."""

    retryable = True
    exit_code = ExitCode.RETRY_MAY_HELP


class StoreForbidden(StoreError):
    """401 or 403. Says nothing about whether the object exists."""

    exit_code = ExitCode.REQUEST_WRONG


class ObjectMissing(StoreError):
    """404 for a key that must exist."""

    exit_code = ExitCode.DATA_MISSING


class ObjectExists(StoreError):
    """A conditional create found the key taken (412)."""


class StoreFull(StoreError):
    """No space left on the device, or over quota. Room must be made before a retry helps."""

    exit_code = ExitCode.REQUEST_WRONG


class RunLogError(GpuBurstError):
    """The run log holds something that the protocol cannot have written."""


class Fenced(RunLogError):
    """A newer epoch or generation has taken over; this writer must stop and restart nothing."""

    exit_code = ExitCode.FENCED


class NotStarted(RunLogError):
    """No epoch with this rank came to be within the deadline. The others may come after a restart."""

    retryable = True
    exit_code = ExitCode.RETRY_MAY_HELP


class Renamed(RunLogError):
    """
    Not an error of the run: this epoch is over, and a new one with the same member has begun or is due.

    Stop the trainer and call `Epoch.restart()`.
    """

    retryable = True
    exit_code = ExitCode.RETRY_MAY_HELP


class Overtaken(RunLogError):
    """Another try has opened the generation for something else: plan again."""

    retryable = True
    exit_code = ExitCode.RETRY_MAY_HELP


class RouteError(GpuBurstError):
    """The cluster, or the way to it."""


class ClusterUnreachable(RouteError):
    """No answer from the cluster's API."""

    retryable = True
    exit_code = ExitCode.RETRY_MAY_HELP


class ClusterUnauthorized(ClusterUnreachable):
    """401, also after the credentials were read again: expired or revoked. A renewed connection mends it."""


class ClusterForbidden(RouteError):
    """The credentials may not do this. Names verb and resource."""

    exit_code = ExitCode.REQUEST_WRONG


class NotAdmitted(RouteError):
    """The queue will never run this. The message is the queue's own."""


class RunLost(RouteError):
    """The run is gone without a verdict: deleted, or its host rebooted."""

    retryable = True
    exit_code = ExitCode.RETRY_MAY_HELP


NEVER_RETRIED = frozenset({ExitCode.REQUEST_WRONG, ExitCode.DATA_MISSING, ExitCode.CONTRACT_MISMATCH})
"""Exit codes of a pod after which a retry would burn GPU hours on the same end."""


FINAL_CODES = frozenset(int(code) for code in ExitCode) - {ExitCode.OK, ExitCode.RETRY_MAY_HELP}
"""Exit codes of the runtime after which another pod would only meet the same end."""


class RunFailed(GpuBurstError):
    """
    The run ended in failure.

    :param code: exit code of `gpu-burst run`, or None when it was killed.
    :param reason: one word for programs (`TrainerFailed`, `Killed`, ...).
    """

    retryable = True
    exit_code = ExitCode.TRAINER_FAILED

    def __init__(self, message: str, *, code: int | None = None, reason: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.retryable = code not in NEVER_RETRIED


class RunTimeout(RunFailed):
    """A queue, start or run timeout of the request has passed; the run was cancelled."""


class Preempted(RunFailed):
    """Preempted more often than the request allows."""


class DataError(GpuBurstError):
    """The data that was pinned is not there any more."""

    exit_code = ExitCode.DATA_MISSING


class SnapshotGone(DataError):
    """The pinned snapshot has been expired, or never existed."""


class TableReplaced(DataError):
    """The table has been dropped and created again: same name, other UUID."""


class ChecksumMismatch(DataError):
    """Bytes that came back are not the bytes that were committed."""


class AgentLost(GpuBurstError):
    """The process that moves checkpoints died again and again, as when memory is short. What it moved stays."""

    retryable = True
    exit_code = ExitCode.RETRY_MAY_HELP


class CheckpointError(GpuBurstError):
    """A checkpoint cannot be saved or restored, for a reason that a retry meets again."""

    exit_code = ExitCode.REQUEST_WRONG


class CatalogError(GpuBurstError):
    """The Iceberg catalog refused, or does not know the name."""

    exit_code = ExitCode.REQUEST_WRONG


class CatalogUnavailable(CatalogError):
    """The catalog did not answer, or is in the way of concurrent commits: a later try may succeed."""

    retryable = True
    exit_code = ExitCode.RETRY_MAY_HELP


class GatewayError(GpuBurstError):
    """The inference gateway."""


class PromotionConflict(GpuBurstError):
    """Another promotion came first."""
