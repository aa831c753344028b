"""The applications of examples/paramserver are imported as a person's are: from their folder."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples" / "paramserver"
sys.path.insert(0, str(EXAMPLES))
