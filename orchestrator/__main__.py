"""`orchestrator`, and `python -m orchestrator`; Ctrl-C during imports gives no traceback either."""

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
