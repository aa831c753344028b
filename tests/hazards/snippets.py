"""What may differ between the workers of a job, as scripts: the specification of the proof before joining."""

import functions
import kept_aside
import loop_names
import microbatches
import models
from frames import Snippet

TABLES = (
    *kept_aside.TABLES,
    *loop_names.TABLES,
    *microbatches.TABLES,
    *models.TABLES,
    *functions.TABLES,
)
SNIPPETS: dict[str, Snippet] = {
    name: snippet for table in TABLES for name, snippet in table.snippets.items()
}
# Those that have no meaning where no loop over microbatches is written by hand.
GONE: dict[str, str] = {**microbatches.GONE, **models.GONE, **functions.GONE}
