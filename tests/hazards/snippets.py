"""What may differ between the workers of a job, as scripts: the specification of the proof before joining."""

import kept_aside
import loop_names
import loss_inputs
import microbatches
import model_changes
from frames import Snippet

TABLES = (
    *kept_aside.TABLES,
    *loop_names.TABLES,
    *microbatches.TABLES,
    *model_changes.TABLES,
    *loss_inputs.TABLES,
)
SNIPPETS: dict[str, Snippet] = {
    name: snippet for table in TABLES for name, snippet in table.snippets.items()
}
# Those that have no meaning where no loop over microbatches is written by hand.
GONE: dict[str, str] = {**microbatches.GONE, **model_changes.GONE, **loss_inputs.GONE}
