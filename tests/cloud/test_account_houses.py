"""A whole house that buys from a fake account: the demo in small, once for each cloud.

Boot, join door, Ray node, agent and workers are the real ones, and so is the SDK. All machines are
lost at once; the final loss is that of plain python, the bill is that of the account's books,
nothing is left, and no secret is found in what the house wrote, shows, and starts.
"""

import io
import shutil
import sys
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))

from cloudfake.account.demo import AccountStage
from cloudfake.account.running import Cloud

from orchestrator.cli.demo import FOLDER, SCRIPT, Drill, play
from orchestrator.client import Client
from orchestrator.view import View

ROOT = Path(__file__).parents[2]
DRILLS = (Drill("all machines at once", 0.4, 0.0, "all"),)
CANARY = "a-canary-that-nobody-may-see"


class WatchedStage(AccountStage):
    """A stage that looks for secrets when the job is done and all its processes still run."""

    found: tuple[str, ...] = ("never looked",)

    def last_view(self, client: Client) -> View:
        view = super().last_view(client)
        folder = self.account.directory.parent
        secrets = [CANARY, self.account.secret]
        for token in (folder / "state").glob("*.token"):
            secrets += [x for x in token.read_text().split() if len(x) >= 32 and "=" not in x]
        self.found = tuple(_places_of([x.encode() for x in secrets], folder))
        return view


def _places_of(secrets: list[bytes], folder: Path) -> list[str]:
    """Return which files under a folder, and which command lines, have one of these in them."""
    found = []
    for path in folder.rglob("*"):
        private = path.suffix == ".token" and path.stat().st_mode & 0o077 == 0
        if path.is_file() and not private and any(x in path.read_bytes() for x in secrets):
            found.append(str(path.relative_to(folder)))
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes()
        except OSError:
            continue
        if any(x in words for x in secrets):
            found.append(words.replace(b"\0", b" ").decode())
    return found


@pytest.mark.processes
@pytest.mark.parametrize("cloud", ["aws", "azure"])
def test_house_on_machines_of_a_cloud_trains(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SPOT_CANARY", CANARY)
    (tmp_path / SCRIPT).parent.mkdir()
    shutil.copy(ROOT / SCRIPT, tmp_path / SCRIPT)
    stage, said = WatchedStage(cloud, steps=60, machines=2, drills=DRILLS), io.StringIO()
    code = play(Console(file=said, width=150), tmp_path, stage)
    assert code == 0, said.getvalue()
    assert said.getvalue().count("drill at step") == len(DRILLS), said.getvalue()
    assert "nothing: no machine, disk, interface or address" in said.getvalue()
    assert stage.found == ()
    assert not (tmp_path / FOLDER).exists()
