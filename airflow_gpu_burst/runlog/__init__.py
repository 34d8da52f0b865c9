"""
The run log: which checkpoint counts, who may write, and what a run produced. One log per run key.

Here belongs the protocol and nothing else: `records` (what is written), `history` (what it means and what
may follow: every precondition), `log` (reading and appending), `generations` (the Airflow side),
`joins`, `gathering` and `epochs` (the pod's side). All but `log` and `joins` are free of I/O of their own. What a
checkpoint's files are, or how a result is published, belongs to the layers above.

The Airflow side, before it submits, and when the object is gone:

    log = RunLog(store, run_key.prefix)
    match settle_generation(log, spec_digest=spec.digest, max_tries=ti.max_tries, try_number=ti.try_number):
        case Adopt(generation=generation): ...      # create-or-adopt its object
        case Collect(finish=finish): ...            # finish.result, finish.model
    close = close_generation(log, generation, "failed", "exit code 7")   # close.verdict is what holds

The pod's side, on every rank:

    epoch = begin(log, generation=1, member=Member(owner=uid, rank=0, pod_uid=pod), world_size=1, deadline_s=600)
    if epoch.restore_from: ...                      # a Commit: its manifests, its step
    epoch.check()                                   # every few seconds; Fenced or Renamed
    # upload below epoch.data_prefix, then, on rank 0:
    epoch.commit(step, {manifest_key: sha256}, {"loss": 0.1})
    for commit in epoch.retire(keep=2): ...         # delete its data now, never before
    epoch.finish({"rows": 3}, model=(manifest_key, sha256))
"""

from airflow_gpu_burst.runlog.epochs import Epoch, begin
from airflow_gpu_burst.runlog.generations import (
    Adopt,
    Collect,
    OpenNew,
    Plan,
    close_generation,
    open_generation,
    plan,
    settle_generation,
)
from airflow_gpu_burst.runlog.history import Finished, History
from airflow_gpu_burst.runlog.joins import Member
from airflow_gpu_burst.runlog.log import RunLog
from airflow_gpu_burst.runlog.records import Close, Commit, Finish, Open, Record, Retire, Start

__all__ = [
    "Adopt",
    "Close",
    "Collect",
    "Commit",
    "Epoch",
    "Finish",
    "Finished",
    "History",
    "Member",
    "Open",
    "OpenNew",
    "Plan",
    "Record",
    "Retire",
    "RunLog",
    "Start",
    "begin",
    "close_generation",
    "open_generation",
    "plan",
    "settle_generation",
]
