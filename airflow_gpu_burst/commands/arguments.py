"""The arguments of every command. A pod pays for this import as well: argparse, and nothing else."""

from __future__ import annotations

import json
import re
from argparse import REMAINDER, SUPPRESS, ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from typing import Any

from airflow_gpu_burst import __version__
from airflow_gpu_burst.errors import ExitCode

_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_CODES = "exit codes: " + ", ".join(f"{code.value} {code.name.lower().replace('_', ' ')}" for code in ExitCode)
_RUN = "a name as `status` shows it, or DAG/TASK/RUN_ID, with /MAP_INDEX for a mapped task"


def parser() -> ArgumentParser:
    """The parser of `gpu-burst`; the result's `command` is the command's name."""
    top = ArgumentParser(
        prog="gpu-burst", description="Run the GPU steps of Airflow workflows in another Kubernetes cluster."
    )
    top.add_argument("--version", action="version", version=f"gpu-burst {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_run(commands)
    site = _site_options()
    _add_submit(commands, [site, _output_option()])
    _add_status(commands, [site, _output_option()])
    _add_logs(commands, [site])
    _add_cancel(commands, [site, _output_option()])
    _add_gc(commands, [site, _output_option()])
    _add_bundle(commands, [_output_option()])
    _add_checkpoint(commands)
    _add_checkpoints(commands, site)
    return top


def duration(text: str) -> float | None:
    """
    Seconds of `90`, `90s`, `30m`, `2h` or `7d`; None for `none`.

    :raises ArgumentTypeError: it is none of these.
    """
    if text == "none":
        return None
    found = _DURATION.fullmatch(text)
    if not found or not float(found[1]):
        raise ArgumentTypeError(f"{text!r} is no duration; e.g. 90s, 30m, 2h, 7d, or none for no limit")
    return float(found[1]) * _SECONDS[found[2]]


def pair(text: str) -> tuple[str, str]:
    """
    Name and value of `name=value`.

    :raises ArgumentTypeError: there is no name, or no `=`.
    """
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ArgumentTypeError(f"{text!r} is not name=value")
    return name, value


def param(text: str) -> tuple[str, Any]:
    """`depth=6` is a number, `names=["a"]` a list, as in JSON; what is no JSON is text."""
    name, value = pair(text)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def count(text: str) -> int:
    """
    A whole number, 0 or more.

    :raises ArgumentTypeError: it is none.
    """
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is not a whole number, 0 or more")
    return int(text)


def _site_options() -> ArgumentParser:
    options = ArgumentParser(add_help=False)
    group = options.add_argument_group("where (connections as Airflow finds them, AIRFLOW_CONN_… included)")
    group.add_argument(
        "--conn", default="gpu_cluster_default", metavar="ID", help="of the cluster (default: %(default)s)"
    )
    group.add_argument(
        "--store-conn", default="", metavar="ID", help="of the store (default: the one that the cluster's names)"
    )
    return options


def _output_option() -> ArgumentParser:
    options = ArgumentParser(add_help=False)
    options.add_argument(
        "-o", "--output", choices=("text", "json"), default="text", help="text for people (default), or json"
    )
    return options


def _command(
    commands: Any, name: str, parents: list[ArgumentParser], description: str, examples: str
) -> ArgumentParser:
    found: ArgumentParser = commands.add_parser(
        name,
        parents=parents,
        help=description[0].lower() + description[1:].partition(".")[0],
        description=description,
        epilog=f"examples:\n{examples}\n{_CODES}",
        formatter_class=RawDescriptionHelpFormatter,
    )
    return found


def _add_run(commands: Any) -> None:
    run = commands.add_parser(
        "run",
        help="in the pod: verify the pins, restore, train, keep checkpoints, publish, write the result",
        description="What a pod starts. The contract comes by environment (GPU_BURST_…), set by whoever submits.",
        epilog=_CODES,
    )
    run.set_defaults(parser=run)
    run.add_argument("trainer", nargs=REMAINDER, metavar="-- CMD", help="the trainer and its arguments")


def _add_submit(commands: Any, parents: list[ArgumentParser]) -> None:
    submit = _command(
        commands,
        "submit",
        parents,
        "Submit a run, or find it again. The same --name and --run-id name the same run.",
        "  gpu-burst submit --gpus 8 --image registry/trainer:1 -- python train.py --depth 6\n"
        "  gpu-burst submit --name fit --run-id monday --wait --run-timeout 2h -- python fit.py\n"
        "  gpu-burst submit --manifest job.yaml --wait\n",
    )
    submit.usage = "gpu-burst submit [options] -- CMD [ARGUMENT ...]"
    submit.set_defaults(parser=submit)
    key = submit.add_argument_group("which run")
    key.add_argument("--name", default="", help="default: your user name")
    key.add_argument("--run-id", default="", metavar="ID", help="default: the time and something random: a new run")
    what = submit.add_argument_group("what")
    what.add_argument("--image", default="", metavar="I", help="container image (default: the connection's)")
    what.add_argument("--gpus", type=count, default=0, metavar="N", help="in all; over one node's worth, whole nodes")
    what.add_argument("--queue", metavar="Q", help="Kueue LocalQueue (default: the connection's)")
    what.add_argument("--priority", default="", metavar="P", help="WorkloadPriorityClass")
    what.add_argument("--platform", default="", metavar="P", help="default: the connection's")
    what.add_argument(
        "--working-dir", default="", metavar="D", help="default: the connection's; on the local route, this folder"
    )
    what.add_argument("--param", type=param, action="append", default=[], metavar="K=V", help="JSON or text")
    what.add_argument("--env", type=pair, action="append", default=[], metavar="K=V", help="never a secret")
    what.add_argument("--input", type=pair, action="append", default=[], metavar="NAME=PIN.json")
    what.add_argument("--publish", default="", metavar="NAME", help="publish the trainer's model under this name")
    what.add_argument("--manifest", default="", metavar="FILE", help="a Job or JobSet of your own, instead of CMD")
    limits = submit.add_argument_group("limits that hold while somebody waits (e.g. 90s, 30m, 2h, 7d, none)")
    limits.add_argument("--queue-timeout", type=duration, metavar="T", help="until admitted (default: none)")
    limits.add_argument("--start-timeout", type=duration, default=1800.0, metavar="T", help="until it runs (30m)")
    limits.add_argument("--run-timeout", type=duration, metavar="T", help="of the run itself (default: none)")
    submit.add_argument("--wait", action="store_true", help="follow it, and exit with its exit code")
    submit.add_argument(
        "--logs", default="all", metavar="RANKS", help="with --wait: all, rank0, none, or e.g. 0,4-7 (default: all)"
    )


def _add_status(commands: Any, parents: list[ArgumentParser]) -> None:
    status = _command(
        commands,
        "status",
        parents,
        "Show where runs are. Without RUN, a table of all that the connection's namespace has.",
        "  gpu-burst status\n  gpu-burst status gpu-cli-fit-0123456789ab-g1\n"
        "  gpu-burst status yield_rca/train/manual__2026-01-01 -o json\n",
    )
    status.add_argument("run", nargs="?", default="", metavar="RUN", help=_RUN)
    status.add_argument("-w", "--watch", action="store_true", help="a line for each change; ends with the run")
    status.add_argument("--every", type=duration, default=5.0, help=SUPPRESS)


def _add_logs(commands: Any, parents: list[ArgumentParser]) -> None:
    logs = _command(
        commands,
        "logs",
        parents,
        "Print what a run has written. Whole, also when its pods are gone; with several ranks, labelled.",
        "  gpu-burst logs -f gpu-cli-fit-0123456789ab-g1\n"
        "  gpu-burst logs --tail 20 yield_rca/train/manual__2026-01-01\n",
    )
    logs.add_argument("run", metavar="RUN", help=_RUN)
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the run ends")
    logs.add_argument("--tail", type=count, metavar="N", help="begin with the last N lines")
    logs.add_argument("--ranks", default="all", help="all (default), rank0, or e.g. 0,4-7")


def _add_cancel(commands: Any, parents: list[ArgumentParser]) -> None:
    cancel = _command(
        commands,
        "cancel",
        parents,
        "End a run. It can write no more from then on; of one that is over it says so.",
        "  gpu-burst cancel gpu-cli-fit-0123456789ab-g1\n",
    )
    cancel.add_argument("run", metavar="RUN", help=_RUN)


def _add_gc(commands: Any, parents: list[ArgumentParser]) -> None:
    gc = _command(
        commands,
        "gc",
        parents,
        "End the runs that nobody waits for. These are the ones whose generation is closed or superseded, or whose "
        "Airflow task has ended over 5 minutes ago. What is unclear is left alone.",
        "  gpu-burst gc --dry-run\n  gpu-burst gc --older-than 7d\n",
    )
    gc.add_argument("--dry-run", action="store_true", help="say what would be ended, end nothing")
    gc.add_argument(
        "--older-than", type=duration, metavar="T", help="only what was created longer ago, e.g. 90s, 30m, 2h, 7d"
    )


def _add_bundle(commands: Any, parents: list[ArgumentParser]) -> None:
    bundle = _command(
        commands,
        "bundle",
        parents,
        "Build the runtime as a folder. An init container copies it into pods whose image lacks the package; it fits "
        "images with the Python that this runs on.",
        "  gpu-burst bundle build/opt/gpu-burst\n",
    )
    bundle.add_argument("folder", metavar="FOLDER", help="new or empty")


def _add_checkpoint(commands: Any) -> None:
    """For a trainer that is no Python: what `context()` does."""
    top = _command(
        commands,
        "checkpoint",
        [],
        "In a trainer: say that a checkpoint is ready. It is uploaded while training goes on.",
        '  cp weights.bin "$(gpu-burst checkpoint folder 1200)" && gpu-burst checkpoint ready 1200\n',
    )
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    folder = verbs.add_parser("folder", help="make the folder for a step's files, and print its path")
    folder.add_argument("step", type=count, metavar="STEP")
    ready = verbs.add_parser("ready", help="all files of a step are written")
    ready.add_argument("step", type=count, metavar="STEP")
    ready.add_argument("--metric", type=pair, action="append", default=[], metavar="NAME=NUMBER", help="kept with it")
    ready.add_argument("--pin", action="store_true", help="keep it for ever")
    ready.add_argument("--self", action="store_true", help="with several ranks: rank 0's files are all of it")
    verbs.add_parser("agent", help="what the runtime starts to move bytes; reads requests from standard input")


def _add_checkpoints(commands: Any, site: ArgumentParser) -> None:
    top = _command(
        commands,
        "checkpoints",
        [],
        "Look at the checkpoints of a run, check them, bring one back, delete what nobody needs. With --store (or "
        "GPU_BURST_STORE, as in a pod) neither Airflow nor a connection is asked.",
        "  gpu-burst checkpoints ls yield_rca/train/manual__2026-01-01\n"
        "  gpu-burst checkpoints verify gpu-cli-fit-0123456789ab-g1\n"
        "  gpu-burst checkpoints restore --store s3://burst/fab yield_rca/train/manual__2026-01-01 newest ./weights\n",
    )
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    common = ArgumentParser(add_help=False, parents=[site, _output_option()])
    common.add_argument(
        "--store", default="", metavar="URI", help="s3://bucket/prefix or file:///folder, with keys from AWS_…"
    )
    common.add_argument("run", metavar="RUN", help=f"{_RUN}, or its key prefix in the store, runs/…")
    which = "number of the commit as `ls` shows it, or newest"
    verbs.add_parser("ls", parents=[common], help="a line for each commit")
    show = verbs.add_parser("show", parents=[common], help="the files of one")
    show.add_argument("seq", metavar="SEQ", help=which)
    verify = verbs.add_parser("verify", parents=[common], help="read all bytes; exit code 5 when some are damaged")
    verify.add_argument("seq", nargs="?", default="", metavar="SEQ", help=f"{which} (default: all that are there)")
    restore = verbs.add_parser("restore", parents=[common], help="bring one back into a folder, verified")
    restore.add_argument("seq", metavar="SEQ", help=which)
    restore.add_argument("target", metavar="FOLDER", help="new or empty")
    restore.add_argument("--rank", type=count, default=0, metavar="N", help="whose files win where names are the same")
    gc = verbs.add_parser("gc", parents=[common], help="what a collector would delete of a run that is over")
    gc.add_argument("--yes", action="store_true", help="delete it")
