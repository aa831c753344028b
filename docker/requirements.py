"""Print what the project depends on, one requirement a line: `requirements.py PYPROJECT [--without NAME] [--extra NAME]`.

An image installs these before it copies the project, so that its large layer changes seldom.
"""

import argparse
import re
import sys
import tomllib
from pathlib import Path


def name_of(requirement: str) -> str:
    """The bare name: without version, extras and markers."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return found.group().lower() if found else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pyproject", type=Path)
    parser.add_argument("--without", action="append", default=[], metavar="NAME")
    parser.add_argument("--extra", action="append", default=[], metavar="NAME")
    options = parser.parse_args()
    project = tomllib.loads(options.pyproject.read_text())["project"]
    names = {name_of(requirement) for requirement in project["dependencies"]}
    extras = project["optional-dependencies"]
    if unknown := {*options.without} - names | {*options.extra} - {*extras}:
        print(f"{options.pyproject} does not depend on {', '.join(unknown)}", file=sys.stderr)  # noqa: T201
        return 1
    more = [requirement for name in options.extra for requirement in extras[name]]
    for requirement in [*project["dependencies"], *more]:
        if name_of(requirement) not in options.without:
            print(requirement)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
