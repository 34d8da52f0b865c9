"""What the lab does to the machine it runs on: which lab is up, what is allowed, what is left behind."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core import MARK, Lab, LabError, birth, send, sh

RECORD = Path("/run/gpu-burst-lab.json")
"""Names the one lab of this machine: its addresses and cgroups are fixed, so that there cannot be two."""
CGROUPS = Path("/sys/fs/cgroup")
FREE_GIB = 3  # images unpacked in two clusters, and etcd
OUTSIDE = tuple(
    Path(p)
    for p in (
        "/etc/kueue",  # its metrics certificate has a fixed place
        "/run/containerd",  # sockets of the shims
        "/var/lib/cni",  # results of the CNI plugins
        "/var/lib/kubelet",
        "/var/log/containers",  # links to the logs of pods
        "/var/log/pods",
        "/usr/libexec/kubernetes",
    )
)
"""Written to by servers that cannot be told otherwise; `down` removes those that were not there before `up`."""
SETTINGS = tuple(
    Path("/proc/sys") / p
    for p in (
        "kernel/keys/root_maxbytes",
        "kernel/keys/root_maxkeys",
        "kernel/panic",
        "kernel/panic_on_oops",
        "net/ipv4/ip_forward",
        "vm/overcommit_memory",
    )
)
"""Kernel settings that kubelet and the bridge plugin change; `down` puts them back."""
ADDRESSES = ("198.18.0.", "10.110.", "10.111.", "10.112.", "10.120.", "10.121.", "10.122.")
CGROUP_PREFIX = "lab-"  # of the clusters' cgroups and bridges


@dataclass(frozen=True)
class Record:
    """What was written down when the lab of this machine came up."""

    dir: Path
    owner: dict[str, Any] | None
    new: tuple[Path, ...]
    settings: dict[str, str]

    def abandoned(self) -> bool:
        """True when a process was to take the lab down, and is no more."""
        return self.owner is not None and birth(self.owner["pid"]) != self.owner["birth"]


def record() -> Record | None:
    """The lab of this machine, up or half down."""
    try:
        known = json.loads(RECORD.read_text())
    except FileNotFoundError:
        return None
    new = tuple(Path(p) for p in known["new"])
    return Record(dir=Path(known["dir"]), owner=known["owner"], new=new, settings=known["settings"])


def default_dir() -> Path:
    """$LAB_DIR; else the lab that is up; else a place for it."""
    known = record()
    return Path(os.environ.get("LAB_DIR") or (known.dir if known else "/var/lib/gpu-burst-lab"))


def claim(lab: Lab, owner: int | None = None) -> None:
    """
    Make this the lab of the machine, and note what `down` has to put back.

    :param owner: pid of the process that takes the lab down; when it dies without, the next lab may.
    :raises LabError: another lab is up.
    """
    mine = RECORD.with_name(f".{RECORD.name}.{os.getpid()}")
    found = {
        "dir": str(lab.dir),
        "owner": {"pid": owner, "birth": birth(owner)} if owner else None,
        "new": [str(path) for path in OUTSIDE if not path.exists()],
        "settings": {str(path): path.read_text().strip() for path in SETTINGS if path.exists()},
    }
    mine.write_text(json.dumps(found))
    try:
        os.link(mine, RECORD)  # whole or not at all, and only one of two succeeds
    except FileExistsError:
        other = record()
        if other and other.dir != lab.dir:
            raise LabError(
                f"another lab is up in {other.dir}, and a machine has room for one: use it (LAB_DIR={other.dir}), "
                "or take it down first (make lab-down)"
            ) from None
    finally:
        mine.unlink()


def release() -> None:
    """Put back what `claim` noted. Safe to repeat."""
    known = record()
    if known is None:
        return
    for path, value in known.settings.items():
        Path(path).write_text(value)
    for outside in known.new:
        shutil.rmtree(outside, ignore_errors=True)
    RECORD.unlink()


def _need_root() -> None:
    if os.geteuid():
        raise LabError(
            "the lab needs root: kubelet and containerd run as plain processes. Use sudo, or a machine in CI"
        )


@contextmanager
def exclusive(lab: Lab) -> Iterator[None]:
    """One at a time changes what runs: two that start the same server would both believe that it is theirs."""
    _need_root()
    lab.cache.mkdir(parents=True, exist_ok=True)
    folder = os.open(lab.cache, os.O_RDONLY)  # a lock on a folder leaves no file
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def preflight(lab: Lab, *, clusters: bool) -> None:
    """
    Raise LabError, with what to do, when this machine cannot carry the lab.

    :param clusters: also what only Kubernetes needs.
    """
    _need_root()
    place = next(p for p in (lab.dir, *lab.dir.parents) if p.exists())
    free = shutil.disk_usage(place).free >> 30
    if free < FREE_GIB:
        raise LabError(f"{free} GiB are free at {place}, {FREE_GIB} are needed: free some, or set LAB_DIR elsewhere")
    if clusters and not any((CGROUPS / name).exists() for name in ("cgroup.controllers", "memory")):
        raise LabError(
            f"no cgroups at {CGROUPS}: a kubelet cannot run here. In a container, start it with "
            "--privileged and the host's cgroup file system"
        )
    if clusters and not os.access(CGROUPS, os.W_OK):
        raise LabError(f"{CGROUPS} is read-only: remount it writable, or start the container with --privileged")


# --- what is left --------------------------------------------------------------------------------------------------


def leftovers(lab: Lab) -> list[str]:
    """Everything of a lab that should be gone after `down`, in words; empty when the machine is clean."""
    found = [f"process {pid}: {line}" for pid, line in processes()]
    found += [f"mount {target}" for target in mounts(lab.dir)]
    found += [f"cgroup {path}" for path in cgroups()]
    found += _network()
    known = record()
    paths = [lab.dir, RECORD, *(known.new if known else OUTSIDE[:1])]
    found += [f"path {path}" for path in paths if path.exists()]
    if known:
        found += [f"setting {p}" for p, value in known.settings.items() if Path(p).read_text().strip() != value]
    return found


def processes(mark: str = "") -> Iterator[tuple[int, str]]:
    """Pid and command line of what carries a mark, or any; not of what is in pods, which the cgroups know."""
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            variables = (entry / "environ").read_bytes().split(b"\0")
            if wanted in variables or (not mark and any(v.startswith(wanted) for v in variables)):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                yield int(entry.name), line[:200]


def kill_processes(mark: str) -> None:
    """All that carry the mark, and what they start meanwhile."""
    end = time.monotonic() + 10
    while (found := list(processes(mark))) and time.monotonic() < end:
        for pid, _ in found:
            send(pid, signal.SIGKILL)
        time.sleep(0.05)


def mounts(folder: Path) -> list[str]:
    """Mount points below a folder, innermost first."""
    targets = (line.split()[1] for line in Path("/proc/mounts").read_text().splitlines())
    return [target for target in targets if Path(target).is_relative_to(folder)][::-1]


def cgroups(name: str = f"{CGROUP_PREFIX}*") -> list[Path]:
    """In every hierarchy: on a hybrid layout the runtime also makes the folder in `unified`."""
    return sorted({*CGROUPS.glob(name), *CGROUPS.glob(f"*/{name}")})


def remove_cgroup(folder: Path) -> None:
    """Kill what is in it, and remove it; it must have no folder in it."""
    for _ in range(50):
        try:
            for pid in (folder / "cgroup.procs").read_text().split():
                send(int(pid), signal.SIGKILL)
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.1)


def _network() -> Iterator[str]:
    for line in sh("ip", "-o", "address", "show", check=False).splitlines():
        words = line.split()
        if any(word.startswith(ADDRESSES) for word in words):
            yield f"address {words[3]} on {words[1]}"
    for line in sh("ip", "-o", "link", "show", check=False).splitlines():
        if (name := line.split()[1]).startswith(CGROUP_PREFIX):
            yield f"link {name.rstrip(':')}"


def settled(lab: Lab, seconds: float = 10) -> list[str]:
    """`leftovers`, after what is just ending had the time to."""
    end = time.monotonic() + seconds
    while (found := leftovers(lab)) and time.monotonic() < end:
        time.sleep(0.2)
    return found
