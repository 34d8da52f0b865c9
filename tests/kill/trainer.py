"""
The trainer of the kill tests: counts steps, saves each, and trusts nothing that it is given.

Whatever it restores it checks bit for bit against what that checkpoint must hold. Exit code 77: it was not so.
"""

from __future__ import annotations

import sys
import time

from airflow_gpu_burst.runtime import context
from airflow_gpu_burst.runtime.workspace import Workspace
from tests.kill.content import chain, differences, lineage_in, part, whole, write

DAMAGED = 77


def main() -> int:
    """Train to the last step; exit code."""
    ctx = context()
    seed, steps, pause_s = int(ctx.params["seed"]), int(ctx.params["steps"]), float(ctx.params["pause_s"])
    epoch = int(ctx.run["epoch"])
    lineage: list[int] = []
    if ctx.restored:
        lineage = lineage_in(ctx.restored.folder, ctx.rank)
        wrong = differences(ctx.restored.folder, whole(seed, ctx.world_size, lineage, ctx.rank))
        if len(lineage) != ctx.restored.step:
            wrong.append(f"holds {len(lineage)} steps")
        if wrong:
            _say(f"the checkpoint of step {ctx.restored.step} is not what was saved: {'; '.join(wrong)}")
            return DAMAGED
    _say(f"rank {ctx.rank}: epoch {epoch} goes on after {lineage}")
    for step in range(len(lineage) + 1, steps + 1):
        lineage.append(epoch)
        write(part(seed, ctx.rank, lineage), ctx.checkpoint_folder(step))
        ctx.ready(step, lineage=step)
        _wait(ctx.workspace, pause_s)
    ctx.result({"lineage": lineage, "state": chain(seed, ctx.rank, lineage)})
    return 0


def _wait(workspace: Workspace, pause_s: float) -> None:
    """As long as a step of training takes; on a busy machine until no checkpoint waits behind another's upload."""
    time.sleep(pause_s)
    while len(list(workspace.ready_folder.glob("*.json"))) > 1:
        time.sleep(0.05)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
