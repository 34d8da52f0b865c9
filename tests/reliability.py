"""
`python -m tests.reliability`: writes docs/reliability.md from the tests that are marked `fault(what, outcome=...)`.

Read from their source, so that nothing needs to be installed; a test compares the file with what this would write.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reliability.md"
HEAD = """# Faults and what becomes of a run

Printed from the tests by `make reliability`; a row is a test against real servers (`tests/lab`): Kubernetes with
its kubelet and containerd, Kueue, JobSet, an Iceberg REST catalog, S3, Keycloak, and in `system/` a real scheduler,
worker and triggerer. `make lab-test` runs the short ones, `make lab-full` all of them. What real servers do not do on
demand is injected by a small API server (`behaviour/`, `make test`).

What holds throughout: one object per generation of a run key; one result per generation; a restart goes on from the
last committed checkpoint; every line is in the task's log once (those of the last 15 s before a triggerer was killed
may be there twice).

| fault | outcome | test |
|---|---|---|
"""


@dataclass(frozen=True)
class Row:
    """One marked test."""

    what: str
    outcome: str
    test: str
    full: bool

    def __str__(self) -> str:
        return f"| {self.what} | {self.outcome} | `{self.test}`{' (full)' if self.full else ''} |"


def rows() -> Iterator[Row]:
    """Every marked test, in the order of the files."""
    real = [*(ROOT / "tests" / "cluster").glob("test_*.py"), ROOT / "tests" / "system" / "test_cluster.py"]
    injected = [ROOT / "tests" / "behaviour" / f"test_{name}.py" for name in ("direct", "watching")]
    for path in [*sorted(real), *injected]:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                yield from _rows(path, node)


def _rows(path: Path, function: ast.FunctionDef) -> Iterator[Row]:
    full = any(isinstance(d, ast.Name) and d.id == "full" for d in function.decorator_list)
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name) and decorator.func.id == "fault":
            (outcome,) = [ast.literal_eval(k.value) for k in decorator.keywords if k.arg == "outcome"]
            what = ast.literal_eval(decorator.args[0])
            yield Row(what, outcome, f"{path.relative_to(ROOT / 'tests')}::{function.name}", full)


def page() -> str:
    """The whole page."""
    return HEAD + "".join(f"{row}\n" for row in rows())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
