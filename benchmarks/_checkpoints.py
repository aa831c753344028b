"""What the checkpoint benchmarks share: a place, a machine line, and a table."""

import os
import platform
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from agent.store.encoding.format import Manifest
from agent.store.layers import fill
from agent.store.places.sinks import Sink
from agent.store.reading import read

GIB = 1 << 30


@contextmanager
def place(bytes_needed: int) -> Iterator[Path]:
    """A folder in memory if there is room, so that both sides are measured without a slow disk."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 2 * bytes_needed
    with tempfile.TemporaryDirectory(dir=memory if roomy else None) as folder:
        yield Path(folder)


def load(sink: Sink, manifest: Manifest, objects: Mapping[str, Any]) -> None:
    """Give every object the state that lies in a sink, read by two threads."""
    fill(manifest.state, lambda wants: read(sink, manifest, wants, threads=2), objects)


def machine(folder: Path) -> str:
    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} cores {platform.machine()}, load {load:.1f}, Python "
        f"{platform.python_version()}, torch {torch.__version__}, files in {folder.parents[0]}"
    )


def middle(values: Sequence[float]) -> str:
    """Median, and where the middle half lies."""
    if len(values) < 3:
        return f"{statistics.median(values):.4g}"
    low, median, high = statistics.quantiles(values, n=4)
    return f"{median:.4g} ({low:.4g} to {high:.4g})"


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *notes: str) -> None:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    console = Console(width=130)
    console.print(table)
    for note in notes:
        console.print(note, highlight=False)
