"""
Gradient boosting that can be stopped after any round and go on elsewhere, to the same model.

Resuming is exact, bit for bit: 20 rounds, a checkpoint, another process, 20 rounds more give the very bytes
of 40 rounds in one go. That needs three things, and the default parameters have them:

* the booster's state is all there is: no early stopping, no learning rate that changes from round to round;
* no row or column sampling: its random state is not part of a checkpoint;
* sums in a fixed order: one thread on the CPU (the order of additions depends on the number of threads; a pod
  that resumes may have other cores than the one that was killed). A GPU adds in fixed point, in any order.

Contributions are XGBoost's own TreeSHAP (`pred_contribs`): for each wafer they add up to the prediction, in
yield points. Lundberg et al. (2020), Nat. Mach. Intell. 2, 56. They say what the model leans on, which is not
yet a cause: a tool and its chambers, or a chamber and the sensor it disturbs, share the credit between them.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from rca.features import ModelMatrix

PARAMS: Mapping[str, Any] = {
    "objective": "reg:squarederror",
    "tree_method": "hist",
    "eta": 0.1,
    "max_depth": 4,
    # A leaf of fewer wafers than about a lot would learn lots by heart instead of tools.
    "min_child_weight": 10,
    "nthread": 1,
    "seed": 7,
}


@dataclass(frozen=True)
class Attribution:
    """
    What the model says about one feature, in yield points.

    `mean_abs` is over all wafers. `mean_exposed` is the signed mean over the wafers that went through the
    tool or chamber (negative: they lose yield); None for sensors, which every wafer has.
    """

    key: str
    factor: str
    step: str
    kind: str
    mean_abs: float
    mean_exposed: float | None


def device() -> str:
    """`"cuda"` if this XGBoost was built for it and the driver sees a GPU, else `"cpu"`."""
    return "cuda" if xgb.build_info().get("USE_CUDA") and _gpus() > 0 else "cpu"


def _gpus() -> int:
    # The driver itself is asked, so that CUDA_VISIBLE_DEVICES counts, and so that no torch is needed.
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def train(
    matrix: ModelMatrix,
    target: NDArray[np.float32],
    *,
    params: Mapping[str, Any] | None = None,
    rounds: int,
    every: int,
    resume_from: bytes | None = None,
    on_checkpoint: Callable[[int, bytes], None] = lambda _round, _model: None,
    device: str = "cpu",
) -> xgb.Booster:
    """
    Train until the model has `rounds` rounds, counting those of `resume_from`.

    `on_checkpoint(round, model)` is called at each multiple of `every` and after the last round; `model` is
    what `resume_from` takes. `params` are added to `PARAMS`; read the module's docstring before adding
    sampling.
    """
    if rounds < 1 or every < 1:
        raise ValueError("rounds and every must be at least 1")
    names = _column_names(matrix)
    data = xgb.DMatrix(matrix.values, label=target, feature_names=names)
    booster = xgb.Booster({**PARAMS, **(params or {}), "device": device}, [data])
    if resume_from is not None:
        booster.load_model(bytearray(resume_from))
        if booster.feature_names != names:
            raise ValueError("the checkpoint was trained on other columns: start again without it")
    for index in range(booster.num_boosted_rounds(), rounds):
        booster.update(data, index)
        done = index + 1
        if done % every == 0 or done == rounds:
            on_checkpoint(done, to_bytes(booster))
    return booster


def to_bytes(booster: xgb.Booster) -> bytes:
    """The model as bytes (UBJSON): a checkpoint, or the file to publish."""
    return bytes(booster.save_raw("ubj"))


def from_bytes(model: bytes) -> xgb.Booster:
    """The booster that `to_bytes` wrote."""
    booster = xgb.Booster()
    booster.load_model(bytearray(model))
    return booster


def predict(booster: xgb.Booster, matrix: ModelMatrix) -> NDArray[np.float32]:
    """Predicted yield in percent, shape (wafers,)."""
    return np.asarray(booster.predict(xgb.DMatrix(matrix.values, feature_names=_column_names(matrix))))


def contributions(booster: xgb.Booster, matrix: ModelMatrix) -> NDArray[np.float32]:
    """SHAP values in yield points, shape (wafers, features + 1); the last column is the mean prediction."""
    data = xgb.DMatrix(matrix.values, feature_names=_column_names(matrix))
    return np.asarray(booster.predict(data, pred_contribs=True))


def _column_names(matrix: ModelMatrix) -> list[str]:
    # XGBoost refuses the characters [ ] < in names; a fab may not. % as well, so that no two become the same.
    return [re.sub(r"[%<\[\]]", lambda hit: f"%{ord(hit[0]):02X}", name) for name in matrix.names]


def attribute(booster: xgb.Booster, matrix: ModelMatrix) -> list[Attribution]:
    """Average the SHAP values per feature; the largest mean absolute contribution first."""
    values = contributions(booster, matrix)[:, :-1].astype(np.float64)
    rows = []
    for index, feature in enumerate(matrix.features):
        own = values[:, index]
        mean_exposed = None
        if feature.kind != "sensor":
            mean_exposed = float(own[matrix.values[:, index] == 1.0].mean())
        mean_abs = float(np.abs(own).mean())
        rows.append(Attribution(feature.key, feature.factor, feature.step, feature.kind, mean_abs, mean_exposed))
    return sorted(rows, key=lambda row: (-row.mean_abs, row.key))
