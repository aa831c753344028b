"""`orchestrator`, and `python -m orchestrator`: Ctrl-C is no traceback either while the command is still being imported."""

import sys

INTERRUPTED = 130


def main() -> int:
    try:
        from orchestrator.cli import main as run

        return run()
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
