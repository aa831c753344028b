"""The error tree of the planner.

MorphError
├── ProfileError       a profile is missing, old, corrupt or contradicts itself: calibrate again
├── ScheduleError      a schedule cannot run, because an action waits for ever or does not exist
├── DoesNotFit         no layout fits into memory; it says what would fit
└── BatchError         the global batch cannot be shared out as asked; it says what can
"""

from orchestrator.errors import OrchestratorError


class MorphError(OrchestratorError):
    """A request that the planner refuses, with a sentence that says what to do."""


class ProfileError(MorphError):
    """A profile is missing, old, corrupt or contradicts itself."""


class ScheduleError(MorphError):
    """A schedule cannot run."""


class DoesNotFit(MorphError):  # noqa: N818 - it names what happened
    """No layout fits into memory."""


class BatchError(MorphError):
    """The global batch cannot be shared out as asked."""
