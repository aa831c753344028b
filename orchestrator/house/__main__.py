"""`python -m orchestrator.house`."""

import sys

from orchestrator.house.house import main

if __name__ == "__main__":
    sys.exit(main())
