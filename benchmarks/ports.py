"""How many lines does the port of a public script change, and does it hold when workers come and go?

    python benchmarks/ports.py [name ...]

For each folder of `examples/ports`: the lines that the port adds to its original (`#+` stands behind
them, and `#-` before those that it leaves out), and what `orchestrator rehearse` says of it, where
a worker joins, one is killed, all are killed and the job is resumed, with the model whole and in
two stages; the state has to end with the bits of the same file run alone. Prints a table. A script
takes one to three minutes on two cores.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

PORTS = Path(__file__).resolve().parents[1] / "examples" / "ports"
CHANGED_MAX = 8


def changed(folder: Path) -> int:
    """Count the lines that are new in the port; what is only taken out costs nothing."""
    lines = (folder / "train.py").read_text().splitlines()
    return sum(line.endswith("#+") and line != "#+" for line in lines)


def rehearsed(folder: Path) -> dict[str, object]:
    """Return the verdict of a rehearsal, played in an empty folder."""
    command = [sys.executable, "-m", "orchestrator", "rehearse", str(folder / "train.py"), "--json"]
    with tempfile.TemporaryDirectory(prefix="port-") as place:
        said = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    return json.loads(said.stdout[said.stdout.index("{") :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=sorted(path.name for path in PORTS.iterdir()))
    good = 0
    names = parser.parse_args().names
    for name in names:
        count, verdict = changed(PORTS / name), rehearsed(PORTS / name)
        good += bool(verdict["passed"]) and count <= CHANGED_MAX
        bits = "equal bits" if verdict["passed"] else verdict["line"]
        print(f"{name:18} {count:3} lines   {bits}", flush=True)
    print(f"{good} of {len(names)} hold with at most {CHANGED_MAX} changed lines")


if __name__ == "__main__":
    main()
