#!/usr/bin/env python3
"""A test lab of real servers on one Linux machine: see README.md."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import controllers
import machine
import running
import services
from build import build
from cluster import CLUSTERS, GPUS, PARTS, Cluster
from core import Lab, LabError, default_cache, servers
from images import IMAGES

Args = argparse.Namespace


def step(label: str, action: Callable[..., object], *args: object) -> None:
    """Do one thing and print how long it took."""
    start = time.monotonic()
    action(*args)
    print(f"{label:28} {time.monotonic() - start:6.1f} s", flush=True)


def up(lab: Lab, args: Args) -> None:
    """Start what is asked for and does not run yet."""
    names = [n for n in args.clusters.split(",") if n]
    machine.preflight(lab, clusters=bool(names))
    running.take_over()
    machine.claim(lab, owner=args.owner)
    clusters = [Cluster(lab, n) for n in names]
    _clusters_up(clusters, args)
    for name in services.SERVICES:
        if getattr(args, name):
            services.address("add")
            step(name, services.SERVICES[name], lab)
    if services.are_up(lab):
        for cluster in clusters:
            cluster.kubectl.apply([running.pod_secret(lab)])


def _clusters_up(clusters: list[Cluster], args: Args) -> None:
    for cluster in clusters:
        step(f"cluster {cluster.name}", cluster.up)
    for cluster in clusters:
        for name in controllers.OPERATORS:
            if getattr(args, name.replace("-", "_")):
                step(f"{name} on {cluster.name}", controllers.OPERATORS[name], cluster)
    if args.kueue:
        for cluster in clusters:
            step(f"kueue on {cluster.name}", controllers.kueue, cluster)
        controllers.queues(clusters)


def status(lab: Lab, _: Args) -> None:
    for server in servers(lab):
        pid = server.pid()
        print(f"{server.name:28} {'pid ' + str(pid) if pid else 'DEAD, see ' + str(server.log)}")


def down(lab: Lab, _: Args) -> None:
    known = machine.record()
    if known and known.dir != lab.dir:
        print(f"{lab.dir} is not up; the lab that is, is in {known.dir} and goes on")
        return
    running.down(lab)
    print("down; nothing of the lab is left")


def check_clean(lab: Lab, _: Args) -> None:
    if found := machine.settled(lab):
        raise LabError("left behind:\n  " + "\n  ".join(found) + "\nmake lab-down takes it away")
    print("clean")


def kubeconfig(lab: Lab, args: Args) -> None:
    cluster = Cluster(lab, args.name)
    path = cluster.client_kubeconfig if args.client else cluster.kubeconfig
    if not path.exists():
        raise LabError(f"cluster {args.name} is not up: lab.py up --clusters {args.name}")
    print(path)


def image(lab: Lab, args: Args) -> None:
    """Build an image and hand it to every GPU cluster that runs."""
    for name in args.names:
        start = time.monotonic()
        tarball = IMAGES[name](lab)
        print(f"{'image ' + name:28} {time.monotonic() - start:6.1f} s  {tarball.stat().st_size >> 20} MiB", flush=True)
        for cluster in (Cluster(lab, n) for n in CLUSTERS if n in GPUS):
            if cluster.process("containerd").pid():
                step(f"{name} into {cluster.name}", cluster.load_image, tarball)


def stop(lab: Lab, args: Args) -> None:
    """Kill one part of a cluster, as a crash does; pods go on."""
    Cluster(lab, args.name).process(args.part).stop(grace=0)


def start(lab: Lab, args: Args) -> None:
    step(f"{args.part} of {args.name} back", Cluster(lab, args.name).start, args.part)


def outage(lab: Lab, args: Args) -> None:
    """Take a cluster's API server away and bring it back; pods keep running meanwhile, as in a real network cut."""
    cluster = Cluster(lab, args.name)
    cluster.process("apiserver").stop(grace=0)
    print(f"API server of {args.name} is gone for {args.seconds:.0f} s", flush=True)
    time.sleep(args.seconds)
    step(f"API server of {args.name} back", cluster.start_apiserver)


def show(lab: Lab, _: Args) -> None:
    print(running.guide(lab))


def test(lab: Lab, args: Args) -> None:
    """A lab of its own for one command, down again whatever happens."""
    sys.exit(running.supervised(lab, args.command))


CHANGES = (up, down, image, stop, start)
"""Verbs that come one after the other."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, help="folder of this lab (env LAB_DIR, default: the one that is up)")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="built binaries and images (env LAB_CACHE)")
    commands = parser.add_subparsers(required=True)

    def command(name: str, run: Callable[[Lab, Args], None], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text)
        sub.set_defaults(run=run)
        return sub

    make = command("build", lambda lab, args: build(lab, everything=args.all), "fill the cache: the only network use")
    make.add_argument("--all", action="store_true", help="also trainer, kuberay and spark-operator")
    begin = command("up", up, "start clusters, controllers and services; what already runs is left alone")
    begin.add_argument("--clusters", default="", help="comma-separated: " + ",".join(CLUSTERS))
    begin.add_argument("--owner", type=int, help="pid of the process that takes the lab down")
    for flag in ["kueue", *controllers.OPERATORS, *services.SERVICES]:
        begin.add_argument(f"--{flag}", action="store_true")
    built = command("image", image, "build images and load them into the running GPU clusters")
    built.add_argument("names", nargs="+", choices=sorted(IMAGES))
    command("status", status, "list processes")
    command("guide", show, "where everything is, and the connections for Airflow")
    command("down", down, "stop everything and remove it; safe to repeat")
    command("check-clean", check_clean, "fail if anything of a lab is left on this machine")
    config = command("kubeconfig", kubeconfig, "print the path of a cluster's kubeconfig")
    config.add_argument("name")
    config.add_argument("--client", action="store_true", help="the least-privilege account instead of the admin")
    for name, run in (("stop", stop), ("start", start)):
        sub = command(name, run, f"{name} one part of a cluster")
        sub.add_argument("name")
        sub.add_argument("part", choices=PARTS)
    cut = command("outage", outage, "kill a cluster's API server for a while, then start it again")
    cut.add_argument("name")
    cut.add_argument("--seconds", type=float, default=30)
    tested = command("test", test, "run a command (after --) with a lab of its own, which is always taken down")
    tested.add_argument("command", nargs="+")

    args = parser.parse_args()
    try:
        lab = Lab((args.dir or machine.default_dir()).resolve(), args.cache.resolve())
        with machine.exclusive(lab) if args.run in CHANGES else contextlib.nullcontext():
            args.run(lab, args)
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
