"""What saves, keeps and restores the checkpoints of one pod, put together."""

from __future__ import annotations

from dataclasses import dataclass

from airflow_gpu_burst.runlog import Epoch, RunLog
from airflow_gpu_burst.runtime.agent_process import Agent
from airflow_gpu_burst.runtime.keeping import Keeping, kept_copies
from airflow_gpu_burst.runtime.orphans import TrainerLock
from airflow_gpu_burst.runtime.peers import Peers
from airflow_gpu_burst.runtime.restoring import restore
from airflow_gpu_burst.runtime.start import Pod
from airflow_gpu_burst.runtime.totals import Totals
from airflow_gpu_burst.runtime.uploads import Uploader
from airflow_gpu_burst.spec import Checkpointing
from airflow_gpu_burst.store import StoreConfig

STAGGER_S = 0.1
"""Between the first requests of two ranks; beside an upload of seconds it costs nothing."""
STAGGER_MOST_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Kit:
    """What one start of the runtime keeps over all epochs, and what it makes for each."""

    pod: Pod
    log: RunLog
    agent: Agent
    totals: Totals
    lock: TrainerLock | None

    def restore(self, epoch: Epoch) -> tuple[Epoch, int | None]:
        """The checkpoint that the epoch names, or the one before."""
        pod = self.pod
        return restore(
            self.agent,
            epoch,
            pod.workspace.restored,
            pod.output,
            rank=pod.identity.rank,
            local=kept_copies(pod.kept, pod.context.run_key),
            kept=pod.kept,
            totals=self.totals,
            check=pod.stop.check,
        )

    def keeping(self, epoch: Epoch) -> Keeping:
        """What retires the checkpoints of one epoch."""
        pod = self.pod
        return Keeping(
            workspace=pod.workspace,
            epoch=epoch,
            log=self.log,
            store=pod.store,
            config=StoreConfig.from_env(pod.env),
            policy=pod.context.checkpoint or Checkpointing(),
            kept=pod.kept,
            run_key=pod.context.run_key,
            rank=pod.identity.rank,
            say=pod.output.say,
        )

    def uploader(self, epoch: Epoch, peers: Peers, keeping: Keeping) -> Uploader:
        """What saves the checkpoints of one epoch."""
        pod = self.pod
        return Uploader(
            workspace=pod.workspace,
            epoch=epoch,
            agent=self.agent,
            keeping=keeping,
            totals=self.totals,
            output=pod.output,
            peers=peers,
            stop=pod.stop,
            grace_s=pod.grace_s,
            rank=pod.identity.rank,
        )


def agent_of(pod: Pod) -> Agent:
    """What moves this pod's bytes, as its request says; not yet started."""
    policy = pod.context.checkpoint or Checkpointing()
    settings = {
        "cap": policy.bandwidth,
        "rdma": policy.rdma,
        # All ranks are ready at the same moment; a store meets them one after the other.
        "stagger_s": min(STAGGER_S * pod.identity.rank, STAGGER_MOST_S),
    }
    return Agent(pod.env, settings)
