"""
`python -m tests.kill.report RESULTS`: writes docs/kill-test.md from what `python -m tests.kill.campaign` noted.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.kill.rounds import KINDS, MEANING, PHASES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kill-test.md"
HEAD = """# The kill test

Printed by `python -m tests.kill.report`; nothing here is typed in. A round is one run of a job, in real processes of
`gpu-burst run`, whose pods are killed at moments that a seed draws, and which is then left alone. Its trainers save a
large file of several parts, small files, an empty file and folder, links and a sparse file at each step; every byte
follows from the seed, the step, the rank and the epochs in which the steps were trained.

What holds after each round; the first three are judged from the store alone:

1. Every commit that may be restored comes back bit for bit, its holes, links and empty folders included.
2. Whoever commits, retires or finishes is the newest start at that place of the log, in a generation that is open.
3. The run has finished, and its result is a hash chain over exactly the steps and epochs that the log tells.
4. No trainer was ever given anything but a whole checkpoint: each checks all that it restores.
5. Who was superseded has ended with exit code 8, and nobody else has. (A rank that only waited for the result, or a
   start that comes when there is one, ends with 0.) The agent is gone within 5 s of its runtime's end.
"""


def page(results: Sequence[dict[str, Any]], about: dict[str, Any]) -> str:
    """The whole page. Pure."""
    wrong = [result for result in results if result["wrong"]]
    lines = [HEAD, *_totals(results, about, wrong)]
    lines += ["", "| what is killed | | kills | hit | of them in a round that restored |", "|---|---|---|---|---|"]
    blows = [(blow, result) for result in results for blow in result["blows"]]
    for kind in KINDS:
        mine = [(blow, result) for blow, result in blows if blow["kill"]["kind"] == kind]
        hits = [(blow, result) for blow, result in mine if blow["hit"]]
        again = sum(result["restored"] > 0 for _, result in hits)
        lines.append(f"| {kind} | {MEANING[kind]} | {len(mine)} | {len(hits)} | {again} |")
    lines += ["", *_moments([blow for blow, _ in blows])]
    lines += ["", "A kill misses when the run has ended before its moment, or when there is no such process then.", ""]
    for result in wrong:
        lines += [f"## Round {result['round']['number']}", "", *(f"- {problem}" for problem in result["wrong"]), ""]
    return "\n".join(lines)


def _totals(results: Sequence[dict[str, Any]], about: dict[str, Any], wrong: Sequence[dict[str, Any]]) -> Iterator[str]:
    kills = [blow for result in results for blow in result["blows"]]
    verdict = f"{len(wrong)} went wrong, see below" if wrong else "none went wrong"
    yield f"**{len(results)} rounds, {verdict}.**"
    yield ""
    yield f"- {about['date']}, seed {about['seed']}, {about['store']}, {about['jobs']} rounds at a time on"
    yield f"  {about['cores']} cores, {statistics.median(result['seconds'] for result in results):.0f} s each (median)"
    several = sum(result["round"]["world_size"] > 1 for result in results)
    directory, rough = (sum(result["round"][name] for result in results) for name in ("directory", "rough"))
    yield f"- {several} rounds with two ranks, {directory} over a directory, {rough} in rough weather (of 100 requests"
    yield "  3 are cut, refused for now, or slow)"
    yield f"- {len(kills)} kills, {sum(blow['hit'] for blow in kills)} of which hit"
    epochs, commits = (sum(result[name] for result in results) for name in ("epochs", "commits"))
    restored = sum(result["restored"] for result in results)
    yield f"- {epochs} epochs, {restored} of which restored a checkpoint; {commits} commits"
    yield f"- again: `python -m tests.kill.campaign --seed {about['seed']} --rounds {len(results)} RESULTS`"


def _moments(blows: Sequence[dict[str, Any]]) -> Iterator[str]:
    names = [*PHASES, None]
    yield "| kills that hit | " + " | ".join(f"{name}" if name else "by the clock" for name in names) + " |"
    yield "|---|" + "---|" * len(names)
    count = Counter((blow["kill"]["kind"], blow["kill"]["moment"]["phase"]) for blow in blows if blow["hit"])
    for kind in KINDS:
        yield f"| {kind} | " + " | ".join(str(count[kind, name] or "") for name in names) + " |"
    when = Counter(blow["kill"]["moment"]["when"] for blow in blows if blow["hit"] and blow["kill"]["moment"]["phase"])
    yield ""
    yield (
        "Columns: the n-th request of a save, of a restore, the record that commits, starts, retires or finishes, or "
        f"any request. The blow came before the server had it ({when['before']}), in the midst of it "
        f"({when['during']}), or after the server had acted, before its answer or up to 0.3 s later ({when['after']})."
    )


def main() -> None:
    """Write the page."""
    about, *results = map(json.loads, Path(sys.argv[1]).read_text(encoding="utf-8").splitlines())
    results.sort(key=lambda result: int(result["round"]["number"]))
    PAGE.write_text(page(results, about), encoding="utf-8")


if __name__ == "__main__":
    main()
