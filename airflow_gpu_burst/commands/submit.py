"""`gpu-burst submit`: create-or-adopt from a shell, and wait if asked to."""

from __future__ import annotations

import getpass
import json
import os
import secrets
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from airflow_gpu_burst import platforms, runs
from airflow_gpu_burst.commands.connect import site_and_config
from airflow_gpu_burst.commands.follow import POLL_S, show, steps
from airflow_gpu_burst.commands.words import next_steps, options, path_of, size_of
from airflow_gpu_burst.errors import SpecError
from airflow_gpu_burst.routes import ClusterConfig
from airflow_gpu_burst.runlog import RunLog
from airflow_gpu_burst.runs import Site
from airflow_gpu_burst.runs.output import ranks_wanted
from airflow_gpu_burst.spec import RunSpec, TablePin, Timeouts
from airflow_gpu_burst.state import Handle, RunKey

DAG_ID = "cli"
"""Of every run that was submitted from a shell."""


def execute(arguments: Namespace) -> int:
    """Submit or find; with `--wait`, follow it to its end."""
    if not arguments.trainer and not arguments.manifest:
        arguments.parser.error("no command; e.g. gpu-burst submit -- python train.py")
    ranks_wanted(arguments.logs)
    inputs = {name: _pin(name, path) for name, path in arguments.input}
    site, cluster = site_and_config(arguments, [pin.catalog for pin in inputs.values()])
    spec, run_key = _spec(arguments, cluster, inputs), _run_key(arguments)
    site.route.kind_of(spec)  # before a generation is opened for what this route cannot run
    known = RunLog(site.store, run_key.prefix).read().opens
    try:
        # There are no tries and no clears here: the same words find the same run, and start a failed one again.
        handle = runs.submit(site, spec=spec, run_key=run_key, max_tries=0, try_number=1)
    except SpecError as error:
        if not known:
            raise
        raise SpecError(
            f"{error}. From a shell: give another --run-id, or end this run first: gpu-burst cancel {path_of(run_key)}"
        ) from error
    adopted = handle.generation in known
    where = options(site.connection, site.store_connection, arguments.store_conn)
    if not arguments.wait:
        return _tell(arguments, site, handle, spec, where, adopted)
    word = "found" if adopted else "submitted"
    print(f"gpu-burst: {word} {handle.name}, {path_of(run_key)}", file=sys.stderr, flush=True)
    try:
        return _wait(arguments, site, handle, spec)
    except KeyboardInterrupt:
        print(
            f"\ngpu-burst: {handle.name} goes on without you", *next_steps(handle, where), sep="\n  ", file=sys.stderr
        )
        raise


def _tell(arguments: Namespace, site: Site, handle: Handle, spec: RunSpec, where: str, adopted: bool) -> int:
    finished = runs.finished(site, handle)
    if arguments.output == "json":
        print(json.dumps({**asdict(handle), "adopted": adopted, "finished": finished}, ensure_ascii=False))
        return 0
    if finished:
        print(f"{handle.name} has finished already; another --run-id makes a new run")
    else:
        print(f"{handle.name} {'was submitted before, and is this run' if adopted else 'submitted'}")
    print(f"  {path_of(handle.run_key)}, {size_of(spec, site.route.ranks_of(spec))}")
    print(*next_steps(handle, where), sep="\n")
    return 0


def _wait(arguments: Namespace, site: Site, handle: Handle, spec: RunSpec) -> int:
    ranks = site.route.ranks_of(spec)
    # Whoever wants JSON has it to themselves on standard output.
    lines_to = sys.stderr if arguments.output == "json" else sys.stdout
    if runs.finished(site, handle):
        for line in runs.unprinted(site.store, handle, ranks=ranks, logs=arguments.logs):
            print(line, file=lines_to)
        return _result(arguments, runs.collect(site, handle))
    status = runs.read_status(site.store, handle)
    submitted_at = status.submitted_at if status else time.time()

    def follower(wake: Callable[[], None]) -> runs.Follower:
        return runs.Follower(
            store=site.store,
            route=site.route,
            handle=handle,
            timeouts=spec.timeouts,
            submitted_at=submitted_at,
            wake=wake,
            ranks=ranks,
            logs=arguments.logs,
            spooled=spec.manifest is None,
            poll_s=POLL_S,
        )

    for step in steps(follower):
        show(step, lines_to=lines_to)
    return _result(arguments, runs.collect(site, handle, step.observation, timeout=step.timeout))


def _result(arguments: Namespace, result: runs.RunResult) -> int:
    if arguments.output == "json":
        print(json.dumps(result.to_dict(), ensure_ascii=False))
        return 0
    said = [f"finished in {result.seconds:.1f} s"]
    if result.result is not None:
        said.append(f"result {json.dumps(result.result, ensure_ascii=False)}")
    elif result.result_key:
        said.append(f"result in the store: {result.result_key}")
    if result.model_key:
        said.append(f"model {result.model_name} {result.model_version}")
    print(f"gpu-burst: {'; '.join(said)}", file=sys.stderr)
    return 0


def _run_key(arguments: Namespace) -> RunKey:
    name = arguments.name or _user()
    if "/" in name:
        raise SpecError(f"--name {name!r}: a name has no '/', which separates name and run id; e.g. 'fit'")
    stamp = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
    return RunKey(dag_id=DAG_ID, task_id=name, run_id=arguments.run_id or stamp)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without an account, as in many containers
        return f"uid-{os.getuid()}"


def _spec(arguments: Namespace, cluster: ClusterConfig, inputs: dict[str, TablePin]) -> RunSpec:
    platform = platforms.load(arguments.platform or cluster.platform)
    platform.check_gpus(arguments.gpus)
    manifest = _manifest(arguments.manifest)
    here = os.getcwd() if cluster.route == "local" else ""
    return RunSpec(
        command=tuple(arguments.trainer),
        manifest=manifest,
        image=arguments.image or (cluster.image if manifest is None else ""),
        gpus=arguments.gpus,
        platform=platform.name,
        queue=cluster.queue if arguments.queue is None else arguments.queue,
        priority=arguments.priority,
        inputs=inputs,
        params=dict(arguments.param),
        env=dict(arguments.env),
        working_dir=arguments.working_dir or cluster.working_dir or here,
        publish=arguments.publish,
        timeouts=Timeouts(
            queue_s=arguments.queue_timeout, start_s=arguments.start_timeout, run_s=arguments.run_timeout
        ),
    )


def _manifest(path: str) -> Any:
    if not path:
        return None
    from airflow_gpu_burst.workloads import parse_manifest

    return parse_manifest(_text(path, "--manifest"))


def _pin(name: str, path: str) -> TablePin:
    try:
        data = json.loads(_text(path, f"--input {name}"))
    except ValueError as error:
        raise SpecError(
            f"--input {name}: {path} is no JSON ({error}); it holds what PinSnapshotOperator returned"
        ) from error
    if not isinstance(data, dict):
        raise SpecError(f"--input {name}: {path} is no pin; it holds what PinSnapshotOperator returned, as JSON")
    return TablePin.from_dict(data)


def _text(path: str, option: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{option}: cannot read {path}: {error.strerror}; give a file") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"{option}: {path} is not text in UTF-8; give a text file") from error
