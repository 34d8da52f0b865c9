"""
Trainer of the yield root-cause DAG: XGBoost with SHAP beside lot-level commonality, over the pinned wafers.

Reads the pins `wafers` (see `rca.wafers` for the columns) and `oxide` (Lot, Wafer, Site, Thickness); keeps a checkpoint
every few rounds and goes on from the restored one; leaves the model, and as its result the findings and the
variance split.
"""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import Any

from rca import commonality, features, findings, model, variance
from rca.wafers import check, is_synthetic

from airflow_gpu_burst.runtime import TrainerContext, context
from airflow_gpu_burst.state import RunKey

MODEL_FILE = "model.ubj"


def main() -> None:
    """One run, from pin to result."""
    ctx = context()
    wafers = ctx.inputs["wafers"].table().to_pandas()
    check(wafers)
    matrix = features.build(wafers)
    device = model.device()
    say(f"{len(wafers)} wafers, {matrix.values.shape[1]} features, training on {device}")

    booster = model.train(
        matrix,
        matrix.target,
        rounds=int(ctx.params["rounds"]),
        every=int(ctx.params["checkpoint_every"]),
        resume_from=(ctx.restored.folder / MODEL_FILE).read_bytes() if ctx.restored else None,
        on_checkpoint=lambda done, raw: save(ctx, done, raw),
        device=device,
    )
    (ctx.model_dir / MODEL_FILE).write_bytes(model.to_bytes(booster))
    (ctx.model_dir / "features.json").write_text(json.dumps(matrix.names), encoding="utf-8")

    pin = ctx.inputs["wafers"].pin
    found = findings.combine(
        commonality.analyse(wafers),
        model.attribute(booster, matrix),
        run_key=str(RunKey.from_dict(ctx.run)),
        table=pin.table,
        snapshot_id=pin.snapshot_id,
        synthetic=is_synthetic(wafers),
        created_at=datetime.now(UTC),
    )
    say(f"{len(found)} findings, first: {found[0].factor} ({found[0].verdict})" if found else "no findings")
    ctx.result(
        {
            "findings": json.loads(findings.to_json(found)),
            "variance": oxide_variance(ctx),
            "facts": {
                "Model": f"{ctx.params['rounds']} rounds on {device}"
                + (f", resumed after round {ctx.restored.step}" if ctx.restored else "")
            },
        }
    )


def save(ctx: TrainerContext, done: int, raw: bytes) -> None:
    """A checkpoint after `done` rounds."""
    (ctx.checkpoint_folder(done) / MODEL_FILE).write_bytes(raw)
    ctx.ready(done)
    say(f"round {done} of {ctx.params['rounds']}")
    time.sleep(float(ctx.params.get("pause_s", 0)))


def oxide_variance(ctx: TrainerContext) -> dict[str, Any] | None:
    """Variance split of the real readings, if they are among the inputs."""
    if "oxide" not in ctx.inputs:
        return None
    readings = ctx.inputs["oxide"].table().to_pandas()
    split = variance.variance_components(readings["Thickness"], readings["Lot"], readings["Wafer"])
    return {name: getattr(split, name) for name in split.__dataclass_fields__}


def say(text: str) -> None:
    """A line for the task's log."""
    print(text, flush=True)  # noqa: T201 -- a trainer's stdout is its log


if __name__ == "__main__":
    main()
