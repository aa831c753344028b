"""What can go wrong in training, in one tree.

AgentError
├── Misuse                   the script used its session in a way that has no meaning
├── CannotRecord             the script is right, but its model cannot be trained in stages here
├── NotFinite                the loss or a gradient of a step is not a finite number
├── StateError               a state cannot be written down, or what was read does not fit
├── WireError                a connection broke, or what came over it makes no sense
│   ├── Refused              the other side knows us and does not want us
│   ├── Altered              what came is not what the other side has sent
│   └── Unsound              a message arrived whole, and a value in it is out of its range
├── ParcelError              what travels with a script makes no sense
├── Fenced                   a newer writer has taken over the commits of this job
├── RecordError              what Redis has of a job is damaged, or gone
└── CheckpointError          a checkpoint is torn, or could not be written
"""


class AgentError(Exception):
    """Base of everything the training side raises."""


class Misuse(AgentError):  # noqa: N818 - it names what happened
    """The script used its session in a way that has no meaning."""


class CannotRecord(AgentError):  # noqa: N818
    """The model's code cannot be turned into a graph, which is our limit.

    The message names the line.
    """


class Unplayed(CannotRecord):
    """A stage failed; its cause is what the script would have raised, if it is the script's."""


class NotFinite(AgentError):  # noqa: N818
    """The loss or a gradient of a step is not a finite number."""


class StateError(AgentError):
    """A state cannot be written down, or what was read does not fit."""


class WireError(AgentError):
    """A connection broke, or what came over it makes no sense."""


class Refused(WireError):  # noqa: N818
    """The other side knows us and does not want us."""


class Altered(WireError):  # noqa: N818
    """What came is not what the other side has sent."""


class Unsound(WireError):  # noqa: N818
    """A message arrived whole, and a value in it is out of its range, which is its sender's fault."""

    def __init__(self, why: str, said: object) -> None:
        super().__init__(why)
        self.said = said  # the message as plain values


class ParcelError(AgentError):
    """What travels with a script makes no sense, or may not be put on a disk."""


class Fenced(AgentError):  # noqa: N818
    """A newer writer has taken over the commits of this job."""


class RecordError(AgentError):
    """What Redis has of a job is damaged, or gone; the message names the key."""


class CheckpointError(AgentError):
    """A checkpoint is torn, or could not be written."""
