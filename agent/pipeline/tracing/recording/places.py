"""The lines of the person's own code that a recording speaks of."""

import traceback
from pathlib import Path

import torch

from agent.source.tracebacks import shown

LIBRARY = str(Path(torch.__file__).parent)
HERE = str(Path(__file__).parents[2])


def where(error: BaseException) -> str:
    """Return the last line of the person's own code that an error came through."""
    frames = _own(traceback.extract_tb(error.__traceback__))
    if not frames:
        return "the model"
    return f"{shown(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name}"


def asking() -> str:
    """Return the line that runs now; its path begins at the folder of its library."""
    frames = _own(traceback.extract_stack())
    if not frames:
        return "the model"
    return f"{shown(frames[-1].filename).split('-packages/')[-1]}:{frames[-1].lineno}"


def _own(stack: traceback.StackSummary) -> list[traceback.FrameSummary]:
    return [frame for frame in stack if not frame.filename.startswith((LIBRARY, HERE, "<"))]
