"""
The production package with one thing broken: source text replaced exactly, loaded under another name.

A replacement that does not match exactly once is an error: a mutant that changes nothing would prove
nothing.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import airflow_gpu_burst.runlog

PACKAGE = "airflow_gpu_burst.runlog"
SOURCE = Path(airflow_gpu_burst.runlog.__file__).parent

Edit = tuple[str, str, str]


@dataclass(frozen=True)
class Mutant:
    """
    :param edits: (module, text, replacement).
    :param scenario: beginning of the name of the one that must notice.
    """

    name: str
    scenario: str
    edits: tuple[Edit, ...]


def load(mutant: Mutant, folder: Path) -> ModuleType:
    """Import the package with the edits applied."""
    name = "mutant_" + "".join(c if c.isalnum() else "_" for c in mutant.name)
    home = folder / name
    home.mkdir()
    texts = {path.stem: path.read_text() for path in SOURCE.glob("*.py")}
    for module, text, replacement in mutant.edits:
        found = texts[module].count(text)
        if found != 1:
            raise LookupError(f"mutant {mutant.name!r}: {module}.py has the text {found} times, not once:\n{text}")
        texts[module] = texts[module].replace(text, replacement)
    for module, text in texts.items():
        (home / f"{module}.py").write_text(text.replace(PACKAGE, name))
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


MUTANTS = (
    Mutant(
        "drop the fence",
        "two owners",
        (("history", "if last is None or last.seq != epoch:", "if last is None:"),),
    ),
    Mutant(
        "reuse a slot",
        "two owners",
        (("log", "self.store.create(key, data)", "self.store.put(key, data)"),),
    ),
    Mutant(
        "trust a listing",
        "a reader",
        (
            (
                "log",
                "        while True:\n"
                "            try:\n"
                "                record = self._get(history.tail + 1)\n"
                "            except ObjectMissing:\n"
                "                return history\n"
                "            history = history.then(record)\n",
                "        while history.tail < self._listed():\n"
                "            history = history.then(self._get(history.tail + 1))\n"
                "        return history\n",
            ),
        ),
    ),
    Mutant(
        "delete before retire",
        "retention",
        (
            (
                "epochs",
                "            self._log.append(build)\n"
                "        history = self._log.known\n"
                "        gone = [c for c in history.commits if c.seq in history.retired"
                " and c.seq not in self._handed_out]\n",
                "            going = build(self._log.read()).seqs\n"
                "            return tuple(c for c in self._log.known.commits if c.seq in going)\n"
                "        gone = []\n",
            ),
        ),
    ),
    Mutant(
        "skip the re-check after 412",
        "two owners",
        (
            (
                "log",
                "            record = build(history)\n"
                "            if record.seq:\n"
                "                return record\n"
                "            record = replace(record, seq=history.tail + 1)\n"
                "            history.permit(record)\n",
                "            if 'built' not in locals():\n"
                "                built = build(history)\n"
                "                if built.seq:\n"
                "                    return built\n"
                "            record = replace(built, seq=history.tail + 1)\n",
            ),
        ),
    ),
    Mutant(
        "newest by step",
        "a step back",
        (
            (
                "history",
                "for commit in reversed(self.restorable(generation)):",
                "for commit in sorted(self.restorable(generation), key=lambda c: -c.step):",
            ),
        ),
    ),
    Mutant(
        "no nonce in data keys",
        "a ghost of a deleted run",
        (("epochs", "/{rank:05d}-{nonce}", "/{rank:05d}"),),
    ),
    Mutant(
        "403 is none",
        "a reader",
        (
            (
                "log",
                "            except ObjectMissing:\n                return history\n",
                "            except (ObjectMissing, StoreForbidden):\n                return history\n",
            ),
            ("log", "import ObjectExists, ", "import StoreForbidden, ObjectExists, "),
        ),
    ),
    Mutant(
        "5xx is none",
        "a reader",
        (
            (
                "log",
                "            except ObjectMissing:\n                return history\n",
                "            except (ObjectMissing, StoreUnavailable):\n                return history\n",
            ),
        ),
    ),
    Mutant(
        "a superseded owner starts again",
        "two owners",
        (("history", "if last.owner != owner:", "if False:"),),
    ),
    Mutant(
        "a superseded pod starts again",
        "a pod, its replacement",
        (("history", "if pod in {uid for uid, _ in named}", "if False and pod in {uid for uid, _ in named}"),),
    ),
    Mutant(
        "a superseded boot starts again",
        "two boots of one pod",
        (("history", "if seat in named and seat not in last.members:", "if False:"),),
    ),
    Mutant(
        "a closed generation goes on",
        "a try that gives up",
        (
            (
                "history",
                "        if generation in self.closes:\n            close =",
                "        if False:\n            close =",
            ),
        ),
    ),
    Mutant(
        "a second result",
        "two owners",
        (
            (
                "history",
                "        if generation in self.finishes:\n            raise Finished",
                "        if False:\n            raise Finished",
            ),
        ),
    ),
    Mutant(
        "failed in spite of a result",
        "a try that gives up",
        (("generations", 'verdict="succeeded" if finish else verdict', "verdict=verdict"),),
    ),
    Mutant(
        "a clear does not close",
        "a clear",
        (("generations", "None if close else verdict, verdict)", "None, verdict)"),),
    ),
    Mutant(
        "open what others have opened",
        "three tries",
        (("generations", "if there is not None:", "if False:"),),
    ),
    Mutant(
        "retired commits stay restorable",
        "retention",
        (
            (
                "history",
                "live = tuple(commit for commit in self.live if commit.seq not in record.seqs)",
                "live = self.live",
            ),
        ),
    ),
    Mutant(
        "keep one",
        "retention",
        (
            ("epochs", "set(sound[-keep:])", "set(sound[-1:])"),
            ("history", "going & set(sound[-KEEP_AT_LEAST:])", "going & set(sound[-1:])"),
        ),
    ),
    Mutant(
        "retire what is being restored",
        "retention",
        (
            ("epochs", "{*extra_protected, self._start.restore_from}", "{*extra_protected}"),
            ("history", " or start.restore_from in going:", ":"),
        ),
    ),
    Mutant(
        "forget what is damaged",
        "a damaged checkpoint",
        (("epochs", "damaged = tuple(sorted({*self._join.damaged, seq}))", "damaged = self._join.damaged"),),
    ),
    Mutant(
        "never look for ranks that register anew",
        "liveness",
        (("epochs", "if join.seat != self._start.members[rank] or join.after >= self.number:", "if False:"),),
    ),
    Mutant(
        "name ghosts",
        "a rank and its ghost",
        (
            (
                "gathering",
                "if join is not None and not history.superseded(plan.generation, owner, join.seat):",
                "if join is not None:",
            ),
        ),
    ),
)
