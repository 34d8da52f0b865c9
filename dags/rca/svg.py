"""
A small canvas for inline SVG: scales, ticks, a few shapes, and escaping in one place.

Why not matplotlib: its pictures have fixed colours and a font of their own. Drawn by hand, a plot takes the
page's font and colours, follows light and dark, stays sharp in print, and the whole report is a tenth of the
size. Colours are class names (`hot`, `cool`, `muted` …) that the page's style sheet defines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

# Width of a character of the page's font in canvas units: at the larger text size that phones get, and bold.
CHARACTER = 7.7


@dataclass(frozen=True)
class Scale:
    """Maps `low … high` to the canvas range `start … end`, linearly or by logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Canvas coordinate of `value`; values outside are put on the edge."""
        low, high, value = (
            (math.log(v) for v in (self.low, self.high, max(value, 1e-300)))
            if self.log
            else (self.low, self.high, value)
        )
        share = (value - low) / (high - low)
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2, 5 times a power of ten) from at or below `low` to at or above `high`."""
    span = max(high - low, 1e-9)
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 10) for index in range(first, max(last, first + 1) + 1)]


def decades(low: float, high: float) -> list[float]:
    """Powers of ten from at or below `low` to at or above `high`, at least two."""
    first = math.floor(math.log10(low) + 1e-9)
    last = max(math.ceil(math.log10(high) - 1e-9), first + 1)
    return [10.0**power for power in range(first, last + 1)]


def shorten(text: str, width: float) -> str:
    """`text`, or as much of it as fits into `width` canvas units, with an ellipsis in its middle."""
    room = max(int(width / CHARACTER), 3)
    # The end stays: chambers of one tool differ there.
    tail = room // 2
    return text if len(text) <= room else f"{text[: room - 1 - tail]}…{text[-tail:]}"


@dataclass
class Canvas:
    """An SVG picture of `width` x `height` units; `label` is what a screen reader says."""

    width: float
    height: float
    label: str
    parts: list[str] = field(default_factory=list)

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str) -> None:
        """A straight line."""
        self.parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{escape(css)}"/>')

    def rect(self, x: float, y: float, width: float, height: float, css: str) -> None:
        """A rectangle."""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" class="{escape(css)}"/>'
        )

    def dot(self, x: float, y: float, css: str, tip: str = "", *, diamond: bool = False) -> None:
        """A point: a circle, or a diamond, so that two groups differ by more than colour."""
        title = f"<title>{escape(tip)}</title>" if tip else ""
        if diamond:
            shape = f'<path d="M{x:.1f} {y - 5.4:.1f}l5.4 5.4l-5.4 5.4l-5.4 -5.4z" class="{escape(css)}">'
            self.parts.append(f"{shape}{title}</path>")
        else:
            self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.6" class="{escape(css)}">{title}</circle>')

    def text(self, x: float, y: float, text: str, css: str = "", anchor: str = "start") -> None:
        """A line of text; `y` is its baseline, `anchor` is start, middle or end."""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{escape(anchor)}" class="{escape(css)}">{escape(text)}</text>'
        )

    def x_axis(self, scale: Scale, ticks: Sequence[tuple[float, str]], top: float, bottom: float) -> None:
        """Vertical grid lines from `top` to `bottom`, with the tick labels below."""
        for value, label in ticks:
            self.line(scale(value), top, scale(value), bottom, "grid")
            self.text(scale(value), bottom + 16, label, "tick", "middle")

    def svg(self) -> str:
        """The picture as an `<svg>` element."""
        return (
            f'<svg viewBox="0 0 {self.width:.0f} {self.height:.0f}" role="img" '
            f'aria-label="{escape(self.label)}">{"".join(self.parts)}</svg>'
        )
