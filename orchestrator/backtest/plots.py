"""Plots as SVG text without scripts: steps, boxes and points on labelled axes."""

import math
from collections.abc import Iterator, Sequence
from html import escape

import msgspec

COLOURS = ("#1f6feb", "#d1502f", "#2da44e", "#8250df", "#bf8700", "#57606a", "#0f8b8d", "#cf3a8e")
WIDTH, HEIGHT = 860, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 16, 44
NOTHING = '<p class="note">Nothing to draw.</p>'


class PlotLine(msgspec.Struct, frozen=True, kw_only=True):
    """A named series of points; with `steps` each value holds until the next point.

    A value that is not a number is a gap. Without a `colour`, the line's index chooses one.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    steps: bool = False
    dots: bool = False
    colour: str = ""


class Axes(msgspec.Struct, frozen=True, kw_only=True):
    """The ranges and the labels of a plot's axes."""

    x: str
    y: str
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def at(self, x: float, y: float) -> tuple[float, float]:
        (x0, x1), (y0, y1) = self.x_range, self.y_range
        px = LEFT + (x - x0) / ((x1 - x0) or 1.0) * (WIDTH - LEFT - RIGHT)
        py = HEIGHT - BOTTOM - (y - y0) / ((y1 - y0) or 1.0) * (HEIGHT - TOP - BOTTOM)
        return round(px, 1), round(py, 1)


def nice(low: float, high: float) -> list[float]:
    """Return about five round numbers within a range."""
    span = (high - low) or abs(high) or 1.0
    step = 10.0 ** int(f"{span / 5:e}".split("e")[1])
    step *= next((m for m in (1.0, 2.0, 5.0) if span / (step * m) <= 6), 10.0)
    first = int(low // step) + (low % step > 1e-9 * step)
    count = int((high - first * step) / step + 1e-9) + 1
    return [round((first + i) * step, 10) for i in range(count)]


def frame(axes: Axes, label_x: bool = True) -> list[str]:
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(axes.y)}">']
    for y in nice(*axes.y_range):
        (x0, py), (x1, _) = axes.at(axes.x_range[0], y), axes.at(axes.x_range[1], y)
        parts.append(f'<line class="grid" x1="{x0}" x2="{x1}" y1="{py}" y2="{py}"/>')
        parts.append(f'<text class="tick" x="{x0 - 6}" y="{py + 4}" text-anchor="end">{y:g}</text>')
    for x in nice(*axes.x_range) if label_x else []:
        px, py = axes.at(x, axes.y_range[0])
        parts.append(f'<text class="tick" x="{px}" y="{py + 16}" text-anchor="middle">{x:g}</text>')
    parts.append(
        f'<text class="axis" x="{(WIDTH + LEFT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">'
        f"{escape(axes.x)}</text>"
    )
    parts.append(
        f'<text class="axis" transform="translate(14 {(HEIGHT - BOTTOM) / 2}) rotate(-90)" '
        f'text-anchor="middle">{escape(axes.y)}</text>'
    )
    return parts


def lines(series: Sequence[PlotLine], x: str, y: str, from_zero: bool = True) -> str:
    """Draw lines over common axes, with a legend."""
    if not any(s.x for s in series):
        return NOTHING
    xs = [v for s in series for v in s.x]
    ys = [v for s in series for v in s.y if not math.isnan(v)] or [0.0]
    low = 0.0 if from_zero else min(ys)
    top = max(*ys, low + 1e-9)
    axes = Axes(x=x, y=y, x_range=(min(xs), max(xs)), y_range=(low, top + 0.05 * (top - low)))
    parts = frame(axes)
    colours = _colours(series)
    for s, colour in zip(series, colours, strict=True):
        pieces = [[axes.at(a, b) for a, b in piece] for piece in _pieces(s)]
        path = "".join(_path(points, s.steps) for points in pieces)
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}"/>')
        if s.dots:
            parts += [
                f'<circle cx="{a}" cy="{b}" r="3.5" fill="{colour}"/>'
                for points in pieces
                for a, b in points
            ]
    parts.append("</svg>")
    return "".join(parts) + _legend([s.name for s in series], colours)


def stacked(series: Sequence[PlotLine], x: str, y: str, until: float) -> str:
    """Draw stacked steps, the first series at the bottom; the last values hold until `until`."""
    if not series:
        return NOTHING
    xs = [*series[0].x, until]
    top = max(sum(at) for at in zip(*(s.y for s in series), strict=True))
    axes = Axes(x=x, y=y, x_range=(xs[0], until), y_range=(0.0, 1.05 * max(top, 1e-9)))
    parts, colours = frame(axes), _colours(series)
    below = [0.0] * len(series[0].x)
    for s, colour in zip(series, colours, strict=True):
        above = [a + b for a, b in zip(below, s.y, strict=True)]
        parts.append(
            f'<path d="{_band(axes, xs, below, above)}" fill="{colour}" fill-opacity="0.8"/>'
        )
        below = above
    parts.append("</svg>")
    return "".join(parts) + _legend([s.name for s in series], colours)


def _band(axes: Axes, xs: Sequence[float], below: Sequence[float], above: Sequence[float]) -> str:
    """Return the path of the area between two lines of steps, where they differ."""
    path, begin = "", 0
    for i in range(len(below)):
        last = i + 1 == len(below) or (below[i], above[i]) != (below[i + 1], above[i + 1])
        if last and above[i] > below[i]:
            (x0, y0), (x1, y1) = axes.at(xs[begin], below[i]), axes.at(xs[i + 1], above[i])
            path += f"M{x0} {y0}H{x1}V{y1}H{x0}Z"
        begin = i + 1 if last else begin
    return path


def _colours(series: Sequence[PlotLine]) -> list[str]:
    return [s.colour or COLOURS[i % len(COLOURS)] for i, s in enumerate(series)]


def _pieces(line: PlotLine) -> Iterator[list[tuple[float, float]]]:
    """Yield the parts of a line between gaps; a step lasts until the gap begins."""
    piece: list[tuple[float, float]] = []
    for x, y in zip(line.x, line.y, strict=True):
        if not math.isnan(y):
            piece.append((x, y))
        elif piece:
            yield [*piece, (x, piece[-1][1])] if line.steps else piece
            piece = []
    if piece:
        yield piece


def _path(points: Sequence[tuple[float, float]], steps: bool) -> str:
    path = f"M{points[0][0]} {points[0][1]}" if points else ""
    for x, y in points[1:]:
        path += f"H{x}V{y}" if steps else f"L{x} {y}"
    return path


def _legend(names: Sequence[str], colours: Sequence[str]) -> str:
    keys = (
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>'
        for name, colour in zip(names, colours, strict=True)
    )
    return f'<p class="legend">{"".join(keys)}</p>'


def boxes(groups: Sequence[tuple[str, Sequence[float]]], y: str) -> str:
    """Draw one box per group: the middle half, the median, and whiskers from 5 to 95 %."""
    top = max((max(five) for _, five in groups if five), default=1.0)
    axes = Axes(x="", y=y, x_range=(0, len(groups)), y_range=(0, top * 1.05))
    parts = frame(axes, label_x=False)
    for i, (name, (p5, p25, p50, p75, p95)) in enumerate(groups):
        x, _ = axes.at(i + 0.5, 0)
        y5, y25, y50, y75, y95 = (axes.at(0, v)[1] for v in (p5, p25, p50, p75, p95))
        colour = COLOURS[0] if name == "ours" else COLOURS[5]
        parts += [
            f'<line x1="{x}" x2="{x}" y1="{y5}" y2="{y95}" stroke="{colour}"/>',
            f'<rect x="{x - 14}" y="{y75}" width="28" height="{max(1.0, y25 - y75)}" fill="{colour}" '
            'fill-opacity="0.25" '
            f'stroke="{colour}"/>',
            f'<line x1="{x - 14}" x2="{x + 14}" y1="{y50}" y2="{y50}" stroke="{colour}" stroke-width="3"/>',
            f'<text class="tick" text-anchor="middle" x="{x}" y="{HEIGHT - BOTTOM + 15}">{i + 1}</text>',
        ]
    parts.append("</svg>")
    names = "".join(f"<li>{escape(name)}</li>" for name, _ in groups)
    return "".join(parts) + f'<ol class="names">{names}</ol>'
