"""The helpers for training frameworks, each over the real framework. Skipped where it is not installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu_burst.runtime.frameworks import distributed, huggingface, lightning, plain
from airflow_gpu_burst.runtime.trainer import Restored, TrainerContext
from airflow_gpu_burst.runtime.workspace import Workspace

pytestmark = pytest.mark.filterwarnings("default")  # of the frameworks' own warnings none is ours to mend


def context(root: Path, *, rank: int = 0, world_size: int = 1, **values: Any) -> TrainerContext:
    workspace = Workspace(root)
    workspace.prepare()
    own: dict[str, Any] = {"params": {}, "inputs": {}, "run": {}, "restored": None}
    return TrainerContext(workspace=workspace, rank=rank, world_size=world_size, **{**own, **values})


def again(root: Path, *folders: Path, step: int) -> TrainerContext:
    """A pod that has restored what is in these folders."""
    made = context(root, restored=Restored(step, root / "restored"))
    for folder in folders:
        shutil.copytree(folder, root / "restored", dirs_exist_ok=True)
    return made


def test_a_plain_state_comes_back(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    ctx = context(tmp_path / "first")
    assert plain.load_state(ctx) is None
    state = {"weights": torch.arange(10.0), "step": 7}
    plain.save_state(ctx, 7, state, loss=0.5, pin=True)
    state["weights"].zero_()  # training goes on
    (ready,) = ctx.workspace.ready()
    assert ready.metrics == {"loss": 0.5, "pinned": True}
    step, found = plain.load_state(again(tmp_path / "second", ready.folder, step=7))
    assert step == 7 and torch.equal(found["weights"], torch.arange(10.0))


WORKER = """
import sys
from pathlib import Path
import torch, torch.distributed as dist
from airflow_gpu_burst.runtime.frameworks import distributed
from tests.behaviour.test_frameworks import context
home, rank, how = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{home}/rendezvous", rank=rank, world_size=2)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, Shard
mesh = init_device_mesh("cpu", (2,))
full = torch.arange(1000.0).reshape(100, 10)
state = {"model": {"weights": distribute_tensor(full, mesh, [Shard(0)])}, "step": 5}
ctx = context(home / f"node{rank}", rank=rank, world_size=2)
if how == "save":
    distributed.save(ctx, 5, state, loss=0.25)
else:
    pending = distributed.save_async(ctx, 5, state, loss=0.25)
    state["model"]["weights"].to_local().zero_()
    pending.result()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_shards_of_two_nodes_come_back_in_one_process(tmp_path: Path, how: str) -> None:
    torch = pytest.importorskip("torch")
    here = str(Path(__file__).parents[2])
    nodes = [
        subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path), str(rank), how], cwd=here) for rank in range(2)
    ]
    assert [node.wait(100) for node in nodes] == [0, 0]
    ready = [Workspace(tmp_path / f"node{rank}").ready() for rank in range(2)]
    assert [[(part.step, part.alone) for part in parts] for parts in ready] == [[(5, False)]] * 2
    assert ready[0][0].metrics == {"loss": 0.25}
    ctx = again(tmp_path / "new", *(parts[0].folder for parts in ready), step=5)
    state = {"model": {"weights": torch.zeros(100, 10)}, "step": 0}
    assert distributed.load(ctx, state) == 5 and state["step"] == 5
    assert torch.equal(state["model"]["weights"], torch.arange(1000.0).reshape(100, 10))


def test_an_async_save_that_fails_is_not_ready_and_says_so(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        ctx = context(tmp_path / "node")
        ctx.checkpoint_folder(1).rmdir()
        ctx.workspace.checkpoint(1).write_text("in the way")
        with pytest.raises(Exception, match="000000000001"):
            distributed.save_async(ctx, 1, {"a": __import__("torch").zeros(3)}).result()
        assert ctx.workspace.ready() == []
    finally:
        dist.destroy_process_group()


def test_a_hugging_face_trainer_goes_on_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x: Any, labels: Any) -> Any:
            found = self.layer(x)
            return {"loss": torch.nn.functional.mse_loss(found, labels), "logits": found}

    data = [{"x": torch.randn(4), "labels": torch.randn(1)} for _ in range(64)]

    def train(ctx: TrainerContext, steps: int) -> Any:
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "out"),
            max_steps=steps,
            save_steps=2,
            logging_steps=1,
            save_total_limit=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(Model(), arguments, train_dataset=data, callbacks=[huggingface.callback(ctx)])
        trainer.train(resume_from_checkpoint=huggingface.resume_from(ctx))
        return trainer.state

    ctx = context(tmp_path / "pod")
    train(ctx, 4)
    first, second = ctx.workspace.ready()
    assert (first.step, second.step) == (2, 4) and set(second.metrics) == {"loss"}
    assert (first.folder / "trainer_state.json").exists(), "the Trainer's own rotation has removed only its own"
    resumed = again(tmp_path / "next", second.folder, step=4)
    state = train(resumed, 6)
    assert state.global_step == 6 and [ready.step for ready in resumed.workspace.ready()] == [6]


def test_a_lightning_trainer_goes_on_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning")
    torch = pytest.importorskip("torch")
    import lightning.pytorch as pl

    monkeypatch.chdir(tmp_path)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.layer(batch).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    loader = torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4)

    def train(ctx: TrainerContext, steps: int) -> Any:
        trainer = pl.Trainer(
            max_steps=steps,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            accumulate_grad_batches=2,
            callbacks=[lightning.callback(ctx, every_n_steps=2)],
        )
        trainer.fit(Module(), loader, ckpt_path=lightning.resume_from(ctx))
        return trainer

    ctx = context(tmp_path / "pod")
    train(ctx, 4)
    assert [ready.step for ready in ctx.workspace.ready()] == [2, 4]
    last = ctx.workspace.ready()[-1]
    assert set(last.metrics) == {"loss"}
    resumed = again(tmp_path / "next", last.folder, step=4)
    assert train(resumed, 6).global_step == 6
    assert [ready.step for ready in resumed.workspace.ready()] == [6]
