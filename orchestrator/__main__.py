"""`orchestrator` and `python -m orchestrator`; Ctrl-C gives no traceback, even in imports."""

import signal
import sys

INTERRUPTED = 130


def main() -> int:
    # Where Ctrl-C is ignored, as in the background of a script, SIGTERM has to end us all the same.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        from orchestrator.cli import main as run

        return run()
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
