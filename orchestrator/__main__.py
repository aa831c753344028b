"""`orchestrator` and `python -m orchestrator`; Ctrl-C gives no traceback, even in imports."""

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
