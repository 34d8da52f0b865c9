"""
The answer as ONE self-contained HTML file: for the engineer who gets a link, and for the printer.

Style and plots are inline, nothing is loaded from anywhere, there is no script; every string that came from
data is escaped. Synthetic data is called so in the title, in a banner, and next to each picture of it, so
that a cut-out figure still says it. The Oxide data at the end is real, and says that too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from html import escape

import pandas as pd

from rca import plots
from rca.findings import Finding
from rca.style import CSS
from rca.variance import PUBLISHED_OXIDE_SD, VarianceSplit
from rca.wafers import is_synthetic
from rca.wording import (
    NONE,
    VERDICTS,
    counted,
    explanation,
    headline,
    moment,
    percent,
    points,
    probability,
    ratio,
)

TABLE_ROWS = 12
# The findings table's number columns; `wide` ones are left out on a phone.
NUMBERS = (
    ("Bad lots through", "n"),
    ("Bad lots elsewhere", "n wide"),
    ("Mean effect, points", "n"),
    ("Odds ratio", "n wide"),
    ("95 % interval", "n wide"),
    ("p", "n wide"),
    ("q", "n"),
    ("SHAP", "n wide"),
)
SYNTHETIC_BADGE = '<span class="badge">SYNTHETIC DATA</span>'
REAL_BADGE = '<span class="badge real">MEASURED DATA</span>'


@dataclass(frozen=True, kw_only=True)
class ReportInput:
    """
    All that the report shows.

    `wafers` is the table that was analysed (see `rca.wafers`). `oxide` is the variance split of the Oxide
    data, or None to leave that section out. `facts` are further lines for the header, such as
    `{"Model": "40 rounds on cuda, resumed after round 20"}`.
    """

    run_key: str
    table: str
    snapshot_id: str
    created_at: datetime
    findings: Sequence[Finding]
    wafers: pd.DataFrame
    oxide: VarianceSplit | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    title: str = "Low-yield lots: which tool or chamber?"

    @property
    def synthetic(self) -> bool:
        """True if any row that was analysed, or any finding, is made up."""
        return is_synthetic(self.wafers) or any(finding.synthetic for finding in self.findings)


def render(report: ReportInput) -> str:
    """The whole report as one HTML document."""
    badge = SYNTHETIC_BADGE if report.synthetic else ""
    prefix = "SYNTHETIC DATA: " if report.synthetic else ""
    body = [_header(report, badge), _table(report.findings, badge), _pictures(report, badge)]
    if report.oxide is not None:
        body.append(_variance(report.oxide))
    body.append(_how_to_read())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(prefix + report.title)}</title><style>{CSS}</style></head>\n"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _header(report: ReportInput, badge: str) -> str:
    lots = report.wafers["lot"].nunique()
    pin = {
        "Table": report.table,
        "Snapshot": report.snapshot_id,
        "Run key": report.run_key,
        "Created": moment(report.created_at),
        "Lots, wafers": f"{lots} lots, {len(report.wafers)} wafers",
        **report.facts,
    }
    entries = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in pin.items())
    banner = (
        '<p class="banner"><strong>SYNTHETIC DATA.</strong> These lots, tools and yields were made up by a '
        "program, with a known answer, to show and test the analysis. They say nothing about any fab.</p>"
        if report.synthetic
        else ""
    )
    return (
        f'<p class="kicker"><span>{escape(report.title)}</span>{badge}</p>'
        f"<h1>{escape(headline(report.findings))}</h1>"
        f'<p class="lead">{escape(explanation(report.findings))}</p>{banner}'
        f'<dl class="pin">{entries}</dl>'
    )


def _table(findings: Sequence[Finding], badge: str) -> str:
    tested = [finding for finding in findings if finding.kind != "sensor"]
    rows = []
    for finding in tested[:TABLE_ROWS]:
        verdict = VERDICTS[finding.verdict]
        if finding.explained_by:
            verdict += f" by {finding.explained_by.split('=', 1)[-1]}"
        numbers = (
            counted(finding.lots_bad, finding.lots_exposed),
            counted(finding.lots_bad_other, finding.lots_other),
            points(finding.effect_points),
            ratio(finding.odds_ratio),
            f"{ratio(finding.odds_low)} to {ratio(finding.odds_high)}",
            probability(finding.p),
            probability(finding.q),
            NONE if finding.shap_mean_abs is None else f"{finding.shap_mean_abs:.2f}",
        )
        cells = "".join(
            f'<td class="{css}">{escape(number)}</td>' for number, (_, css) in zip(numbers, NUMBERS, strict=True)
        )
        rows.append(
            f'<tr class="{escape(finding.verdict)}"><td class="n rank">{finding.rank}</td>'
            f'<td>{escape(finding.factor)}</td><td class="wide">{escape(finding.step)}</td>'
            f'{cells}<td class="verdict">{escape(verdict)}</td></tr>'
        )
    head = "".join(f'<th class="{css}">{text}</th>' for text, css in NUMBERS)
    inconclusive = sum(finding.verdict == "inconclusive" for finding in tested)
    more = f"The best {len(rows)} of {len(tested)} factors. " if len(tested) > len(rows) else ""
    if inconclusive:
        more += f"{inconclusive} could not be tested: fewer than three lots on one side. "
    more += "A bad lot is in the lowest quarter of lot yield, each product measured against its own median."
    return (
        f'<section><h2>Findings {badge}</h2><p class="note">{escape(more)}</p><div class="scroll"><table>'
        f'<thead><tr><th class="n rank">#</th><th>Factor</th><th class="wide">Step</th>{head}'
        f"<th>Verdict</th></tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _pictures(report: ReportInput, badge: str) -> str:
    figures = []
    tested = [finding for finding in report.findings if finding.q is not None]
    if tested:
        top = tested[0]
        name = escape(top.factor)
        key = (
            f'<span class="key"><span><i class="h">◆</i> through {name}</span>'
            '<span><i class="c">●</i> other lots</span></span>'
        )
        figures += [
            (
                "Odds ratios",
                "With 95 % intervals. Right of 1: more bad lots than elsewhere.",
                plots.forest(tested),
            ),
            (
                f"Lot yield by {escape(top.step)} {top.kind}",
                f"One mark per lot; the bar is the median of the {top.kind}.",
                plots.by_factor(report.wafers, top),
            ),
            ("Lot yield over time", key, plots.over_time(report.wafers, top)),
        ]
    if any(finding.shap_mean_abs is not None for finding in report.findings):
        text = "Sensors included. A lead to follow, not a test: related factors share the credit."
        figures.append(("What the model leans on", text, plots.contributions(report.findings)))
    cards = "".join(
        f'<section><h2>{title} {badge}</h2><div class="note">{text}</div>{picture}</section>'
        for title, text, picture in figures
    )
    return f'<div class="grid">{cards}</div>' if cards else ""


def _variance(split: VarianceSplit) -> str:
    rows = []
    for name, sd in split.sds.items():
        published = PUBLISHED_OXIDE_SD[name]
        difference = percent(100 * (sd / published - 1))
        rows.append(
            f'<tr><td>{name}</td><td class="n">{sd:.3f}</td><td class="n">{published:.3f}</td>'
            f'<td class="n">{difference}</td><td class="n">{100 * split.shares[name]:.1f} %</td></tr>'
        )
    note = (
        f"Thickness of {split.n_values} sites on {split.n_wafers} wafers of {split.n_lots} lots (nlme's "
        "Oxide; the source names no unit). Standard deviations by REML, beside those of Pinheiro & Bates "
        "(2000)."
    )
    return (
        f"<section><h2>Where real oxide thickness varies {REAL_BADGE}</h2>"
        f'<p class="note">{escape(note)}</p><div class="split"><div>{plots.variance(split)}</div>'
        '<div class="scroll"><table><thead><tr><th>Component</th><th class="n">SD here</th>'
        '<th class="n">SD published</th><th class="n">Difference</th><th class="n">Share of variance</th>'
        f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div></div></section>"
    )


def _how_to_read() -> str:
    return (
        '<section class="read"><h2>How to read this</h2>'
        "<p>A lot went <em>through</em> a factor if at least half of its wafers did. <em>p</em> is Fisher’s "
        "exact test for an excess of bad lots; <em>q</em> corrects it for the number of factors tested "
        "(Benjamini–Hochberg). A suspect has q below 0.05. <em>Explained</em>: nothing is left of its excess "
        "without the lots of a better suspect. <em>Inconclusive</em>: fewer than three lots through it, or "
        "elsewhere, which is not the same as fine.</p>"
        "<p>Odds ratios have 0.5 added to each count, so that an empty cell gives a large number instead of "
        "an infinite one; with few lots the interval is wide, and the interval is what counts. The effect is "
        "the mean lot yield through the factor minus that of the others. SHAP is the mean absolute "
        "contribution to the model’s prediction, in yield points.</p>"
        "<p>Commonality finds what bad lots share. Whether it is the cause, the tool decides.</p></section>"
    )
