"""`python -m orchestrator.supervisor`."""

import sys

from orchestrator.supervisor.supervisor import main

if __name__ == "__main__":
    sys.exit(main())
