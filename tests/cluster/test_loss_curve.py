"""A JobSet that is killed while it trains goes on from the S3 server, and the loss curve does not notice."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_gpu_burst.state import Phase
from tests.cluster.conftest import Burst, ended, trainer

fault = pytest.mark.fault

MODEL = '''
import json

def sample(step, rank):
    """Data of one rank at one step: it depends on both, so that a step left out or done twice is seen."""
    x = [(7919 * step + 104729 * rank + 1299709 * i) % 1000 / 1000 - 0.5 for i in range(4)]
    return x, 3 * x[0] - 2 * x[1] + 0.5 * x[2]

def train(state, step, rank):
    """One step of gradient descent with momentum; the loss before it."""
    x, wanted = sample(step, rank)
    error = sum(w * v for w, v in zip(state["weights"], x)) - wanted
    state["momentum"] = [0.9 * m + error * v for m, v in zip(state["momentum"], x)]
    state["weights"] = [w - 0.02 * m for w, m in zip(state["weights"], state["momentum"])]
    return error * error

def begin():
    return {"weights": [0.0] * 4, "momentum": [0.0] * 4}
'''

BODY = (
    MODEL
    + """
state, first = begin(), 0
if ctx.restored:
    first = ctx.restored.step
    state = json.loads((ctx.restored.folder / f"state-{ctx.rank}.json").read_text())
print(f"from {first}", flush=True)
for step in range(first + 1, ctx.params["steps"] + 1):
    loss = train(state, step, ctx.rank)
    print(f"loss {step} {loss!r}", flush=True)
    if step % 5 == 0:
        folder = ctx.checkpoint_folder(step)
        (folder / f"state-{ctx.rank}.json").write_text(json.dumps(state))
        (folder / f"optimizer-{ctx.rank}.bin").write_bytes(bytes([step % 256]) * 3_000_000)
        ctx.ready(step, loss=loss)
    time.sleep(0.2)
ctx.result({"from": first, "weights": state["weights"]})
"""
)


def expected(steps: int, rank: int) -> dict[int, float]:
    """The curve of a training that nobody interrupts."""
    space: dict[str, Any] = {}
    exec(MODEL, space)
    state = space["begin"]()
    return {step: space["train"](state, step, rank) for step in range(1, steps + 1)}


def losses(lines: list[str], rank: int) -> list[tuple[int, float]]:
    found = [line.split("] loss ", 1)[1].split() for line in lines if line.startswith(f"[{rank}] loss ")]
    return [(int(step), float(loss)) for step, loss in found]


@fault("a JobSet's pod is killed in mid-training", outcome="it goes on from S3; the loss curve is the undisturbed one")
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.lab_full)])
def test_the_loss_curve_goes_on(burst: Burst, victim: int) -> None:
    steps = 60
    handle = burst.submit(trainer(BODY, gpus=8, params={"steps": steps}))
    assert handle.kind == "JobSet"
    following = burst.follow(handle, ranks=2)
    following.until_line("checkpoint 15 committed", 120)
    (pod,) = [p for p in burst.pods(handle) if p["metadata"]["annotations"].get(INDEX) == str(victim)]
    burst.gpu.kubectl("delete", "pod", pod["metadata"]["name"], "--grace-period=0", "--force")
    step = following.to_end(240)
    assert ended(step)[0] is Phase.SUCCEEDED
    result = burst.collect(handle, step)
    assert result.result["from"] >= 15 and result.generation == 1, "it began anew"
    for rank in (0, 1):
        curve = losses(following.lines, rank)
        assert [step for step, _ in curve] != sorted({step for step, _ in curve}), "nothing was done again"
        assert dict(curve) == expected(steps, rank)
        assert set(curve) == set(expected(steps, rank).items()), "a step came out otherwise the second time"
    following.close()


INDEX = "batch.kubernetes.io/job-completion-index"
