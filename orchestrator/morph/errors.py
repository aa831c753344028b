"""The error tree of the planner.

MorphError
├── ProfileError       a profile is missing, old, corrupt or contradicts itself: calibrate again
├── ScheduleError      a schedule cannot run: an action waits for what never comes
├── DoesNotFit         no layout fits into memory; says what would do
└── BatchError         the global batch cannot be shared out as asked; says what can
"""

from orchestrator.errors import OrchestratorError


class MorphError(OrchestratorError):
    """Something that the planner refuses, in a sentence that says what to do."""


class ProfileError(MorphError):
    """A profile is missing, old, corrupt or contradicts itself."""


class ScheduleError(MorphError):
    """A schedule cannot run."""


class DoesNotFit(MorphError):  # noqa: N818 - it names what happened
    """No layout fits into memory."""


class BatchError(MorphError):
    """The global batch cannot be shared out as asked."""
