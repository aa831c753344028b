"""Steps by their parts as stacked bars, in SVG."""

from itertools import accumulate, pairwise

from _job import Parts

WIDTH, ROW, LEFT, RIGHT, TOP, BOTTOM, BAR = 760, 26, 200, 60, 44, 46, 18
COLOURS = {
    "compute": "#4c78c8",
    "bubble": "#b8b8b8",
    "exposed exchange": "#c8504c",
    "snapshot": "#e0a53c",
}


def bars(rows: list[tuple[tuple[str, str, str], Parts]]) -> str:
    """One bar a row, all on one axis of seconds; a gap where the first word of the label changes."""
    most = max((parts.step_s for _, parts in rows), default=1.0)
    step = next(each for each in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if most / each <= 10)
    scale = (WIDTH - LEFT - RIGHT) / most
    gaps = [0, *accumulate(a[0][0] != b[0][0] for a, b in pairwise(rows))]
    height = TOP + ROW * len(rows) + 12 * gaps[-1] + BOTTOM
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        *_axis(int(most // step), step, scale, height - BOTTOM),
    ]
    for index, (name, colour) in enumerate(COLOURS.items()):
        x = LEFT + index * 140
        drawn.append(f'<rect x="{x}" y="14" width="11" height="11" fill="{colour}"/>')
        drawn.append(f'<text x="{x + 16}" y="24">{name}</text>')
    for index, (label, parts) in enumerate(rows):
        y = TOP + ROW * index + 12 * gaps[index]
        drawn += _bar(label, parts, y, scale)
    return "\n".join([*drawn, "</svg>", ""])


def _axis(ticks: int, step: int, scale: float, bottom: int) -> list[str]:
    drawn = []
    for tick in range(ticks + 1):
        x = round(LEFT + tick * step * scale, 1)
        drawn.append(f'<line x1="{x}" y1="{TOP - 6}" x2="{x}" y2="{bottom}" stroke="#e6e6e6"/>')
        drawn.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{tick * step}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    drawn.append(
        f'<text x="{middle}" y="{bottom + 36}" text-anchor="middle" fill="#555555">'
        "seconds of a step</text>"
    )
    return drawn


def _bar(label: tuple[str, str, str], parts: Parts, y: int, scale: float) -> list[str]:
    size, order, layout = label
    seconds = (parts.compute_s, parts.bubble_s, parts.exchange_s, parts.snapshot_s)
    edges = [LEFT + scale * at for at in accumulate(seconds, initial=0.0)]
    drawn = [
        f'<text x="12" y="{y + 14}" font-weight="bold">{size}</text>',
        f'<text x="56" y="{y + 14}">{order}</text>',
        f'<text x="{LEFT - 10}" y="{y + 14}" text-anchor="end">{layout}</text>',
    ]
    for (begin, end), colour in zip(pairwise(edges), COLOURS.values(), strict=True):
        drawn.append(
            f'<rect x="{begin:.1f}" y="{y}" width="{end - begin:.1f}" height="{BAR}" fill="{colour}"/>'
        )
    drawn.append(f'<text x="{edges[-1] + 6:.1f}" y="{y + 14}">{parts.step_s:.1f}</text>')
    return drawn
