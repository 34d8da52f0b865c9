"""
How the report says things: numbers, verdicts, and the headline in plain language.

Typographic minus and no more digits than the data carry. A headline claims only what a verdict says: a
suspect is "lots through it yield less", never "is the cause", and with no suspect it says so and how close it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime

from rca.findings import Finding, Verdict

VERDICTS: dict[Verdict, str] = {
    "suspect": "suspect",
    "explained": "explained",
    "not_significant": "not significant",
    "inconclusive": "inconclusive",
    "not_tested": "not tested",
}
NONE = "–"
THIN_SPACE = "\u2009"


def points(value: float | None) -> str:
    """Yield points with one decimal and a sign: −6.1."""
    if value is None:
        return NONE
    rounded = round(value, 1)
    if rounded == 0:
        return "0.0"
    return f"{'−' if rounded < 0 else '+'}{abs(rounded):.1f}"


def ratio(value: float | None) -> str:
    """An odds ratio: two digits below 10, whole numbers above, thousands apart: 0.42, 5.8, 1 542."""
    if value is None:
        return NONE
    if value >= 9.95:
        return f"{value:,.0f}".replace(",", THIN_SPACE)
    return f"{value:.1f}" if value >= 0.995 else f"{value:.2f}"


def probability(value: float | None) -> str:
    """A p or q: 0.31, 0.0003, 2 × 10⁻⁶."""
    if value is None:
        return NONE
    if value >= 0.095:
        return f"{value:.2f}"
    if value >= 0.00095:
        return f"{value:.3f}"
    if value >= 0.000095:
        return f"{value:.4f}"
    if value <= 0:
        return "0"
    power = math.floor(math.log10(value))
    digit = round(value / 10.0**power)
    if digit == 10:
        digit, power = 1, power + 1
    return f"{digit} × 10{superscript(power)}"


def superscript(power: int) -> str:
    """An exponent: ⁻⁶."""
    return str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def percent(value: float) -> str:
    """A small difference in percent, with a sign unless it is zero: −0.02 %."""
    text = f"{value:+.2f} %".replace("-", "−")
    return "0.00 %" if text[1:] == "0.00 %" else text


def moment(value: datetime) -> str:
    """A time in UTC to the minute: 2026-01-24 06:00 UTC."""
    return f"{value:%Y-%m-%d %H:%M} UTC"


def counted(bad: int | None, total: int | None) -> str:
    """`7 of 8`, or a dash."""
    return NONE if bad is None or total is None else f"{bad} of {total}"


def headline(findings: Sequence[Finding]) -> str:
    """One sentence with the answer, honest when there is none."""
    suspects = [finding for finding in findings if finding.verdict == "suspect"]
    tested = [finding for finding in findings if finding.q is not None]
    if suspects:
        first = suspects[0]
        loss = f"{abs(first.effect_points or 0.0):.1f}"
        return f"{first.factor}: lots through it yield {loss} points less (q {probability(first.q)})"
    if tested:
        return "Nothing significant: no tool or chamber stands out among the bad lots"
    return "Inconclusive: no tool or chamber has enough lots on both sides to be tested"


def explanation(findings: Sequence[Finding]) -> str:
    """The sentences below the headline: the counts behind it, and what limits it."""
    suspects = [finding for finding in findings if finding.verdict == "suspect"]
    tested = [finding for finding in findings if finding.q is not None]
    if not tested:
        return "At least three lots through a factor and three not through it are needed. Collect more lots."
    best = (suspects or tested)[0]
    share = (
        f"{counted(best.lots_bad, best.lots_exposed)} lots through {best.factor} are in the worst quarter, "
        f"against {counted(best.lots_bad_other, best.lots_other)} of the others"
    )
    if not suspects:
        return f"Closest of {len(tested)} factors tested: {share} (q {probability(best.q)})."
    text = f"{share}. {len(tested)} factors were tested."
    if best.same_lots_as:
        twins = ", ".join(key.split("=", 1)[-1] for key in best.same_lots_as)
        text += f" The same lots went through {twins}: these data cannot tell them apart."
    if len(suspects) > 1:
        text += f" Also suspect: {', '.join(suspect.factor for suspect in suspects[1:])}."
    return text
