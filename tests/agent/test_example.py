"""The example is a script as a person would write it, and trains the same model wherever it runs."""

from pathlib import Path

import pytest
from crews import Crew, Nursery

pytestmark = pytest.mark.processes

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt.py"
SMALL = [
    "--steps",
    "12",
    "--d-model",
    "32",
    "--layers",
    "1",
    "--heads",
    "2",
    "--context",
    "32",
    "--batch",
    "2",
    "--microbatches",
    "6",
    "--warmup",
    "4",
    "--eval-every",
    "5",
]
OURS = {
    "from orchestrator import Session": (),
    "session = Session(model, optimizer, scheduler, microbatches=options.microbatches)": (),
    "for step in session.steps(options.steps):": ("for step in range(options.steps):",),
    "session.backward(lambda pair: loss_of(model, *pair), batches)": (
        "for inputs, targets in batches:",
        "    (loss_of(model, inputs, targets) / options.microbatches).backward()",
    ),
    "session.clip_grad_norm_(options.clip)": (
        "nn.utils.clip_grad_norm_(model.parameters(), options.clip)",
    ),
}
DIGEST = """
import runpy, sys
from agent.session import made
from agent.tensors.shards import weights_sha
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
print(weights_sha(made()[0].replica.objects["model"].state_dict()))
"""


def plain() -> str:
    """The script of somebody who has never heard of us."""
    lines = []
    for line in EXAMPLE.read_text().splitlines():
        code = line.strip()
        lines += [line.replace(code, other) for other in OURS.get(code, (code,))]
    return "\n".join(lines) + "\n"


def digested(crew: Crew, *arguments: str) -> list[str]:
    """What the example prints alone, and the sum of its weights."""
    script = crew.folder / "digest.py"
    script.write_text(DIGEST)
    return crew.nursery.play([str(script), str(EXAMPLE), *arguments], crew.folder).splitlines()


def test_five_lines_differ_from_a_plain_script(tmp_path: Path, nursery: Nursery) -> None:
    """Without our five lines nothing of us is left, and the script still trains, to the same loss."""
    script = tmp_path / "plain.py"
    script.write_text(plain())
    before, after = EXAMPLE.read_text().splitlines(), plain().splitlines()
    assert len([line for line in before if line not in after]) == len(OURS) == 5
    code = plain().partition('"""')[2].partition('"""')[2].lower()
    assert "session" not in code
    assert "agent" not in code
    theirs, ours = (
        nursery.play([str(path), *SMALL, "--dropout", "0"], tmp_path) for path in (script, EXAMPLE)
    )
    assert _final(ours) == pytest.approx(_final(theirs), abs=2e-4)


def test_cut_into_stages_it_gives_the_same_bits(crew: Crew) -> None:
    """The example, unchanged, as 2 x 2 and after a loss as a chain of 3: weights and printed losses are those of
    a run alone."""
    layers = ("--layers", "3")
    *lines, sha = digested(crew, *SMALL, *layers)
    crew.depth, crew.owned = 2, True
    first, *_ = crew.begin(4, EXAMPLE.read_text(), *SMALL, *layers)
    crew.reach(4)
    crew.shape(3)
    crew.reach(7)
    crew.kill(first)
    done = crew.completed()
    assert done.weights_sha == sha
    assert crew.printed()[-1] == lines[-1]
    assert set(crew.printed()) <= set(lines)


def _final(printed: str) -> float:
    last = printed.splitlines()[-1]
    assert last.startswith("final held-out loss ")
    return float(last.rpartition(" ")[2])
