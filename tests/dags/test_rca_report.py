"""The report: one file, all that it must say, nothing that data could inject, honest when there is no answer."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from xml.etree import ElementTree

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rca import features, findings, model, plots, svg, wording
from rca.commonality import analyse
from rca.report import ReportInput, render
from rca.synthetic import make_fab
from rca.variance import VarianceSplit

OXIDE = VarianceSplit(11.3977, 5.9888, 3.5453, 2000.15, 8, 24, 72, -227.011)
HOSTILE = "<script>alert('x')</script>&\"E/1"


def report_of(frame: pd.DataFrame, *, with_model: bool = True, **changes: object) -> ReportInput:
    attributions = []
    if with_model:
        matrix = features.build(frame)
        booster = model.train(matrix, matrix.target, rounds=10, every=10)
        attributions = model.attribute(booster, matrix)
    now = datetime(2026, 1, 24, 6, 0, tzinfo=UTC)
    synthetic = "synthetic" in frame and bool(frame["synthetic"].any())
    found = findings.combine(
        analyse(frame),
        attributions,
        run_key="yield_rca/train/manual/-1",
        table="fab.wafers",
        snapshot_id="8744736658442914487",
        synthetic=synthetic,
        created_at=now,
    )
    report = ReportInput(
        run_key="yield_rca/train/manual/-1",
        table="fab.wafers",
        snapshot_id="8744736658442914487",
        created_at=now,
        findings=found,
        wafers=frame,
    )
    return replace(report, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def report() -> ReportInput:
    return report_of(make_fab(7).frame, oxide=OXIDE, facts={"Model": "10 rounds on cpu"})


@pytest.fixture(scope="module")
def html(report: ReportInput) -> str:
    return render(report)


class Outline(HTMLParser):
    """Collects tags and what they would load, and checks that tags are closed in order."""

    VOID = frozenset({"meta", "line", "rect", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def outline(html: str) -> Outline:
    parser = Outline()
    parser.feed(html)
    parser.close()
    assert not parser.open
    return parser


def test_it_says_what_it_must(html: str) -> None:
    for text in (
        "ETCH-03/B: lots through it yield 7.8 points less (q 0.0008)",
        "7 of 7 lots through ETCH-03/B are in the worst quarter, against 8 of 53 of the others",
        "8744736658442914487",
        "fab.wafers",
        "yield_rca/train/manual/-1",
        "2026-01-24 06:00 UTC",
        "60 lots, 720 wafers",
        "10 rounds on cpu",
        "4.2 to 1\u2009542",
        "11.398",
        "MEASURED DATA",
    ):
        assert text in html, text


def test_it_is_one_file_that_loads_nothing(html: str) -> None:
    parsed = outline(html)
    assert not {"script", "link", "img", "iframe", "object", "image", "use"} & set(parsed.tags)
    assert not {"src", "href", "srcset", "onload", "onclick"} & {name for name, _ in parsed.attributes}
    assert "url(" not in html and "@import" not in html and "http" not in html
    assert len(html) < 100_000


def test_plots_are_whole_pictures(html: str) -> None:
    pictures = re.findall(r"<svg.*?</svg>", html)
    assert len(pictures) == 5
    for picture in pictures:
        root = ElementTree.fromstring(picture)
        assert root.get("aria-label")
        width, height = (float(part) for part in root.get("viewBox", "").split()[2:])
        for element in root.iter():
            for name in ("x", "x1", "x2", "cx"):
                assert -1 <= float(element.get(name, 0)) <= width + 1
            for name in ("y", "y1", "y2", "cy"):
                assert -1 <= float(element.get(name, 0)) <= height + 1


def test_synthetic_data_is_called_so_everywhere_and_real_data_is_not(html: str) -> None:
    assert "<title>SYNTHETIC DATA:" in html
    sections = re.findall(r"<section.*?</section>", html, flags=re.DOTALL)
    shown = [part for part in sections if "<svg" in part or "<table" in part]
    for part in shown:
        assert ("SYNTHETIC DATA" in part) != ("MEASURED DATA" in part)
    assert len(shown) == 6
    real = make_fab(7).frame.drop(columns="synthetic")
    assert "SYNTHETIC" not in render(report_of(real, with_model=False))


def test_strings_from_data_are_escaped() -> None:
    frame = make_fab(7).frame
    frame["etch_chamber"] = frame["etch_chamber"].replace({"ETCH-03/B": HOSTILE})
    frame = frame.rename(columns={f"etch_{kind}": f"et<b>ch_{kind}" for kind in ("tool", "chamber")})
    html = render(
        report_of(
            frame,
            run_key=HOSTILE,
            table=HOSTILE,
            snapshot_id=HOSTILE,
            title=HOSTILE,
            facts={HOSTILE: HOSTILE},
        )
    )
    assert "<script" not in html and "<b>" not in html
    assert html.count("&lt;script&gt;") > 8
    outline(html)


def test_without_a_cause_it_says_so() -> None:
    html = render(report_of(make_fab(3, cause=None).frame))
    assert "Nothing significant: no tool or chamber stands out" in html
    assert "Closest of 51 factors tested" in html
    assert "lots through it yield" not in html


def test_with_too_few_lots_it_is_inconclusive_and_draws_no_odds() -> None:
    html = render(report_of(make_fab(3, lots=4).frame))
    assert "Inconclusive: no tool or chamber has enough lots" in html
    assert "45 could not be tested" in html
    assert html.count("<svg") == 1  # the model's contributions
    outline(html)


def test_a_report_without_model_and_oxide_leaves_those_parts_out() -> None:
    html = render(report_of(make_fab(7).frame, with_model=False))
    assert html.count("<svg") == 3
    assert "MEASURED" not in html


def test_it_is_the_same_for_the_same_input(report: ReportInput, html: str) -> None:
    assert render(report) == html


def test_many_chambers_and_long_names_stay_inside() -> None:
    frame = make_fab(7).frame
    names = {f"ETCH-0{i}/{c}": f"VERY-LONG-CLUSTER-TOOL-NAME-{i}/{c}" for i in range(1, 5) for c in "AB"}
    frame["etch_chamber"] = frame["etch_chamber"].replace(names)
    picture = plots.forest(report_of(frame, with_model=False).findings)
    assert "VERY-LONG-CL…OOL-NAME-3/B" in picture
    assert "VERY-LONG-CLUSTER-TOOL-NAME-3/B" not in picture


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (wording.points, -6.14, "−6.1"),
        (wording.points, 0.5, "+0.5"),
        (wording.points, -0.04, "0.0"),
        (wording.points, None, "–"),
        (wording.ratio, 1541.6, "1\u2009542"),
        (wording.ratio, 21.3, "21"),
        (wording.ratio, 9.96, "10"),
        (wording.ratio, 5.82, "5.8"),
        (wording.ratio, 0.419, "0.42"),
        (wording.probability, 1.0, "1.00"),
        (wording.probability, 0.0513, "0.051"),
        (wording.probability, 0.00034, "0.0003"),
        (wording.probability, 0.0000167, "2 × 10⁻⁵"),
        (wording.probability, 9.7e-8, "1 × 10⁻⁷"),
        (wording.probability, 0.0, "0"),
        (wording.probability, None, "–"),
        (wording.percent, -0.004, "0.00 %"),
        (wording.percent, -0.02, "−0.02 %"),
    ],
)
def test_numbers_are_written_as_people_do(write: object, value: float | None, text: str) -> None:
    assert write(value) == text  # type: ignore[operator]


def test_suspects_that_no_lot_tells_apart_are_named() -> None:
    frame = make_fab(7, cause="IMPL-02/A").frame
    found = report_of(frame, with_model=False).findings
    assert wording.headline(found).startswith("IMPL-02/A: lots through it yield")
    assert "The same lots went through IMPL-02: these data cannot tell them apart." in wording.explanation(found)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_are_few_round_and_cover_the_data(low: float, span: float) -> None:
    ticks = svg.nice_ticks(low, low + span)
    tolerance = 1e-6 * (abs(low) + span)
    assert ticks[0] <= low + tolerance and ticks[-1] >= low + span - tolerance
    assert 2 <= len(ticks) <= 8
    assert ticks == sorted(set(ticks))


@given(st.floats(1e-6, 1e6), st.floats(1, 1e6))
def test_decades_cover_the_data(low: float, factor: float) -> None:
    ticks = svg.decades(low, low * factor)
    assert ticks[0] <= low * 1.000001 and ticks[-1] >= low * factor * 0.999999
    assert len(ticks) >= 2


def test_a_scale_keeps_values_on_the_canvas() -> None:
    scale = svg.Scale(1.0, 100.0, 0.0, 200.0, log=True)
    assert [round(scale(value), 6) for value in (0.0, 1.0, 10.0, 100.0, 1e9)] == [0, 0, 100, 200, 200]
