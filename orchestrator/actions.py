"""Actions: what to do, each with a sentence that says why, which the dashboard shows."""

import msgspec

from agent.layout import Layout
from agent.messages import JobOrder, When
from cloud.model import InstanceType, LaunchRequest, Place, Quote, Ref


class Action(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    because: str


class Launch(Action, frozen=True, kw_only=True):
    """The journal holds this action before the call is made: it is the intent."""

    request: LaunchRequest


class Terminate(Action, frozen=True, kw_only=True):
    """Ask for the end of a machine, or of what a launch left over."""

    ref: Ref

    @property
    def machine_id(self) -> str:
        return self.ref.id


class ListMachines(Action, frozen=True, kw_only=True):
    place: Place


class KeepQuotes(Action, frozen=True, kw_only=True):
    """Add prices to the history, which is kept outside the state; `bids` asks for `Odds` too."""

    quotes: tuple[Quote, ...]
    types: tuple[InstanceType, ...]
    bids: bool


class OpenJob(Action, frozen=True, kw_only=True):
    """Give the keeper the order of a job; doing it twice has no effect."""

    order: JobOrder


class StartWorker(Action, frozen=True, kw_only=True):
    job: str
    worker: str
    machine_id: str
    slot: int


class StopWorker(Action, frozen=True, kw_only=True):
    job: str
    worker: str
    machine_id: str


class Regroup(Action, frozen=True, kw_only=True):
    """Move the job to this layout, at the next step boundary or at once."""

    job: str
    layout: Layout
    when: When


class WriteCheckpoint(Action, frozen=True, kw_only=True):
    job: str


class CloseJob(Action, frozen=True, kw_only=True):
    job: str


class Note(Action, frozen=True, kw_only=True):
    """A sentence that a person should read. `who` is a job, a machine or a pool."""

    who: str


class Stop(Action, frozen=True, kw_only=True):
    """End the loop, because everything is given back."""


AnyAction = (
    Launch
    | Terminate
    | ListMachines
    | KeepQuotes
    | OpenJob
    | StartWorker
    | StopWorker
    | Regroup
    | WriteCheckpoint
    | CloseJob
    | Note
    | Stop
)
