"""How the planner's time grows with stages, microbatches, workers and sections, up to 10,000 workers.

Processor time of one thread, the least of three rounds.

python benchmarks/planner/growth.py [file.svg]
"""

import sys
import time
from math import ceil, floor, log10
from pathlib import Path

from _greedy import uniform
from speed import blocks

from orchestrator.planner import plan_book
from orchestrator.planner.search import Task
from orchestrator.planner.simulation import schedules, simulator

WIDTH, HEIGHT, EDGE, RIGHT = 720, 440, 64, 40
MARGIN, KEY = 14, 17
COLOURS = ("#4c78c8", "#3a9d6a", "#e0a53c", "#9c6bb5", "#c8504c")


def once(work) -> float:
    work()
    found = []
    for _ in range(3):
        start_s = time.process_time()
        work()
        found.append(time.process_time() - start_s)
    return min(found)


def step(depth: int, share: int) -> float:
    programs = schedules.pack("1f1b", depth, share)
    costs = simulator.costs(uniform(depth, 0.04, 0.08))
    return once(lambda: simulator.run(programs, costs))


def searched(sections: int, workers: int) -> float:
    profile = blocks(sections, (4,))
    return once(lambda: plan_book.best(profile, Task(global_batch=8192), workers))


def booked(sections: int, workers: int) -> float:
    profile = blocks(sections, (4,))
    return once(lambda: plan_book.book(profile, Task(global_batch=8192), workers))


def series() -> dict[str, list[tuple[int, float]]]:
    return {
        "a step, 512 microbatches, by stages": [(p, step(p, 512)) for p in (2, 8, 32, 128, 512)],
        "a step, 32 stages, by microbatches": [(m, step(32, m)) for m in (8, 32, 128, 512, 2048)],
        "a search, 32 sections, by workers": [
            (g, searched(32, g)) for g in (1, 10, 100, 1000, 10_000)
        ],
        "a book, 32 sections, by workers": [(g, booked(32, g)) for g in (1, 10, 100, 1000, 10_000)],
        "a book for 256, by sections": [(k, booked(k, 256)) for k in (4, 8, 16, 32, 64)],
    }


def plot(found: dict[str, list[tuple[int, float]]]) -> str:
    """Both axes by powers of ten, whole powers at the edges."""
    points = [point for line in found.values() for point in line]
    low, high = floor(log10(min(y for _, y in points))), ceil(log10(max(y for _, y in points)))
    right = ceil(log10(max(x for x, _ in points)))
    top, bottom = 2 * MARGIN + KEY * len(found), HEIGHT - EDGE

    def place(x: float, y: float) -> tuple[float, float]:
        across = EDGE + log10(x) / right * (WIDTH - EDGE - RIGHT)
        return round(across, 1), round(bottom - (log10(y) - low) / (high - low) * (bottom - top), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for power in range(right + 1):
        x, _ = place(10**power, 10**low)
        parts.append(f'<line x1="{x}" y1="{top}" x2="{x}" y2="{bottom}" stroke="#e6e6e6"/>')
        parts.append(f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{10**power:,}</text>')
    for power in range(low, high + 1):
        _, y = place(1, 10**power)
        parts.append(
            f'<line x1="{EDGE}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}" stroke="#e6e6e6"/>'
            f'<text x="{EDGE - 8}" y="{y + 4}" text-anchor="end">{seconds(power)}</text>'
        )
    middle = (EDGE + WIDTH - RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{bottom + 40}" text-anchor="middle" fill="#555555">'
        "how many: stages, microbatches, workers or sections, as the line says</text>"
    )
    for index, (name, line) in enumerate(found.items()):
        drawn = " ".join(f"{x},{y}" for x, y in (place(*point) for point in line))
        parts.append(
            f'<polyline points="{drawn}" fill="none" stroke="{COLOURS[index]}" stroke-width="2"/>'
        )
        for x, y in (place(*point) for point in line):
            parts.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{COLOURS[index]}"/>')
        y = MARGIN + KEY * index
        parts.append(
            f'<rect x="{EDGE}" y="{y}" width="11" height="11" fill="{COLOURS[index]}"/>'
            f'<text x="{EDGE + 17}" y="{y + 10}">{name}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def seconds(power: int) -> str:
    """Ten to this power, as people say it."""
    unit, name = next((u, n) for u, n in ((0, "s"), (-3, "ms"), (-6, "us")) if power >= u)
    return f"{10 ** (power - unit)} {name}"


def main() -> None:
    found = series()
    for name, line in found.items():
        print(name)
        print("  " + "  ".join(f"{x}: {seconds * 1e3:.2f} ms" for x, seconds in line))
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(plot(found), encoding="utf-8")


if __name__ == "__main__":
    main()
