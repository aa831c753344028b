"""`python train.py`: what a script writes, logs and saves, with nobody else anywhere."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from agent.errors import Misuse

SCRIPT = """
import torch
from orchestrator import Session

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = Session(model, optimizer)


def loss_of(x):
    return model(x).square().mean(), {"size": x.abs().mean()}


for step in session.steps(4):
    result = session.backward(loss_of, [torch.ones(2, 4), torch.ones(2, 4)])
    optimizer.step()
    optimizer.zero_grad()
    session.log(step=step, lr=0.1, loss=result.loss)
    with (session.output / "metrics.csv").open("a") as file:
        file.write(f"{step}\\n")
    session.save("plots/../best.pt" if BAD else "kept/best.pt")
session.save("last.pt", {"steps": 4})
"""


def test_alone_everything_lies_below_the_working_folder(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("BAD", "False"))
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    output = tmp_path / "output"
    assert (output / "metrics.csv").read_text() == "0\n1\n2\n3\n"
    assert torch.load(output / "kept" / "best.pt").keys() == {"weight", "bias"}
    assert torch.load(output / "last.pt") == {"steps": 4}
    names = sorted(str(path.relative_to(output)) for path in output.rglob("*"))
    assert names == ["kept", "kept/best.pt", "last.pt", "metrics.csv"]


def test_alone_a_path_that_leads_out_is_refused_as_in_a_job(
    tmp_path: Path, by_hand: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    says = (
        r"session\.save\(path\): 'plots/\.\./best\.pt' cannot lie in session\.output: "
        "it may not lead out of the folder$"
    )
    with pytest.raises(Misuse, match=says):
        by_hand(SCRIPT.replace("BAD", "True"))
