"""What a process of a benchmark uses."""

from __future__ import annotations

import resource
from pathlib import Path

MIB = 1 << 20


def cpu_s() -> float:
    """CPU seconds of this process so far, of all its threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def rss_mib() -> float:
    """Memory that this process occupies now."""
    return _status("VmRSS")


def reset_peak() -> None:
    """`peak_mib` counts from here."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_mib() -> float:
    """Most that it occupied since `reset_peak`."""
    return _status("VmHWM")


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024
