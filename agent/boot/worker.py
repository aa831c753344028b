"""Become a process of Ray's on this node: an actor's, or one that waits for an actor.

A node runs this where Ray has a script that prepares an environment of packages. Nobody here has
one, and that script imports most of Ray before it starts the interpreter that imports it again.
"""

import os
import sys

UNUSED = ("--language=", "--serialized-runtime-env-context=")


def main() -> None:
    words = [word for word in sys.argv[1:] if not word.startswith(UNUSED)]
    os.execv(sys.executable, [sys.executable, *words])  # noqa: S606 - no shell


if __name__ == "__main__":
    main()
