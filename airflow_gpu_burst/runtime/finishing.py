"""The end of a run that succeeded: what the trainer made becomes the run's one result."""

from __future__ import annotations

import json
import time

from airflow_gpu_burst.checkpoint import save_bytes
from airflow_gpu_burst.contract import Artifact, PodResult
from airflow_gpu_burst.errors import SpecError
from airflow_gpu_burst.runlog import Epoch
from airflow_gpu_burst.runtime.kit import Kit
from airflow_gpu_burst.runtime.publication import model_uri, model_version, publish
from airflow_gpu_burst.runtime.telling import Telling, moved
from airflow_gpu_burst.store import StoreConfig


def finish(kit: Kit, epoch: Epoch, step: int | None) -> None:
    """
    Save the trainer's result and model, write the log's `finish`, publish.

    :param step: of the last committed checkpoint.
    :raises SpecError: a result that is no JSON, or no model where one is to be published.
    """
    pod = kit.pod
    context, store, workspace = pod.context, pod.store, pod.workspace
    result = model = None
    if workspace.result_file.is_file():
        data = workspace.result_file.read_bytes()
        _check_result(data)
        saved = save_bytes(store, data, f"{epoch.data_prefix}/result", "result.json")
        result = Artifact(key=saved.key, sha256=saved.sha256)
    if context.publish:
        if not any(workspace.model.iterdir()):
            raise SpecError(
                f"publish={context.publish!r}, but the trainer left no file in context().model_dir; "
                "write the model there, or drop publish"
            )
        telling = Telling("the model", pod.output.say)
        tree = kit.agent.save(
            workspace.model,
            f"{epoch.data_prefix}/model",
            workspace.uploads / "model",
            progress=telling.progress,
            check=lambda: pod.stop.check_after(pod.grace_s),
        )
        pod.output.say(f"the model is saved: {tree.files} files, {moved(tree.size, telling.seconds)}")
        model = Artifact(key=tree.key, sha256=tree.sha256)
    pod_result = PodResult(
        seconds=round(time.monotonic() - pod.began, 3),
        result=result,
        model=model,
        model_name=context.publish if model else "",
        model_version=model_version(context.run_key, context.generation) if model else "",
        step=step,
        model_uri=model_uri(pod.env, store, context) if model else "",
        checkpoints=kit.totals.to_dict(kit.agent.tally, kit.agent.restarts),
    )
    epoch.finish(pod_result.to_dict(), (model.key, model.sha256) if model else None)
    key = publish(
        store, StoreConfig.from_env(pod.env), context.run_key, context.generation, pod_result, scratch=workspace.root
    )
    pod.output.say(f"finished in {pod_result.seconds:.1f} s" + (f", model published as {key}" if key else ""))


def _check_result(data: bytes) -> None:
    try:
        json.loads(data)
    except ValueError as error:
        raise SpecError(f"the trainer's result is no JSON ({error}); write it with context().result(...)") from error
