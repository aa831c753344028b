"""The reports of instances and keeper to the manager, and its orders. No torch here.

Each is a value that encodes to JSON with its type in the field `type`, so that a journal of them
can be read by a person and replayed by a program. Times are seconds since the epoch.
"""

from typing import Annotated, Literal

import msgspec

from agent.profile import Profile, SumFormat
from cloud.model import Notice
from cloud.ranges import (
    Amount,
    Count,
    Finite,
    Generation,
    Microbatches,
    Name,
    Number,
    Period,
    Positive,
    Slots,
    Step,
    Text,
    Time,
)

NanPolicy = Literal["fail", "skip"]
Sums = Literal["auto", "always", "never"]  # when they are sent: see `Vault.takes_sums`
TransportKind = Literal["sockets", "nixl"]  # of blocks between machines: see `agent.transport`
LossCause = Literal["connection", "silent", "exited", "machine"]
FailureKind = Literal["exception", "nan", "no_session", "setup", "exit", "refused", "unsupported"]
When = Literal["boundary", "now"]

ENTRIES_MAX, KEY_CHARS_MAX, VALUE_CHARS_MAX = 16, 40, 120  # of `session.state`, as it is told
Entry = tuple[
    Annotated[str, msgspec.Meta(max_length=KEY_CHARS_MAX)],
    Annotated[str, msgspec.Meta(max_length=VALUE_CHARS_MAX)],
]
Entries = Annotated[tuple[Entry, ...], msgspec.Meta(max_length=ENTRIES_MAX)]

UNRECORDED = "its loop has not been recorded yet"
SERVED = "its tables are served, and it has no layers"


class JobOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What the keeper and every worker of a job need to know about it.

    If the job goes on from an earlier job's versions, they lie at `from_url`; after a `#` it may name
    the step that it goes on from, or else that is the newest. The job begins with
    `begins_with` workers, if that is not 0; the next one joins as a newcomer, so that the script is
    tried with a newcomer early. A step has `microbatches`, if it is known yet. The loop ends after step `stop_at` at the latest, if that is not 0. The
    workers of an `exact` job's layouts round alike.
    """

    job: Name
    script: Name
    script_sha: Name
    argv: tuple[Text, ...] = ()
    nan: NanPolicy = "fail"
    backup_every_steps: Positive = 10
    sums: Sums = "always"
    checkpoint_every_s: Period = 60.0
    max_replay_s: Period = 60.0
    tail_s: Period = 600.0
    checkpoints_kept: Positive = 2
    from_url: Text = ""
    begins_with: Count = 0
    microbatches: Count = 0
    stop_at: Count = 0
    output_files: Count = 1000
    output_bytes: Count = 1 << 30
    exact: bool = True
    transport: TransportKind = "sockets"


class WorkerOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The order to start one worker.

    Its id is fresh each time, so that a ghost of an earlier worker is recognised. A `prover`
    reproduces a step of the job, and is not a worker of it.
    """

    job: Name
    worker: Name
    machine_id: Name
    slot: Count
    keeper_address: Name
    secret: Name
    prover: bool = False


class Report(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """Something that was seen, and when."""

    at_s: Time


class AgentJoined(Report, frozen=True, kw_only=True):
    machine_id: Name
    address: Name
    slots: Slots


class AgentLost(Report, frozen=True, kw_only=True):
    machine_id: Name
    why: Text


class NoticeSeen(Report, frozen=True, kw_only=True):
    notice: Notice


class Unbuilt(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is built where its layers are kept.

    `training_bytes` is what training it takes, and `room_bytes` what the worker has room for.
    `mark` is the same on all workers that would give it the same initial values.
    """

    training_bytes: Count
    room_bytes: Positive
    mark: Name


class WorkerReady(Report, frozen=True, kw_only=True):
    """The script reached its session: the worker has built its model and waits for a layout.

    Sent again when its loop has been recorded. `uncuttable` says why the loop cannot be cut into
    stages, if so, and `stages_max` into how many at most. `exact` says that its numbers do not
    depend on the layout, and `exchange` in which format the script has gradients summed.
    `hardware` is the key of what it computes on; workers with unlike keys may round differently.
    """

    job: Name
    worker: Name
    machine_id: Name
    microbatches: Microbatches
    steps_total: Count
    state_bytes: Count
    uncuttable: Text = UNRECORDED
    stages_max: Slots = 1
    unbuilt: Unbuilt | None = None
    exact: bool = True
    exchange: SumFormat = "float32"
    hardware: Name = ""  # of an earlier worker, which does not say it


class WorkerProving(Report, frozen=True, kw_only=True):
    """The script reached its session, and the worker proves a step before it is ready."""

    job: Name
    worker: Name
    machine_id: Name
    hardware: Name = ""


class WorkerLost(Report, frozen=True, kw_only=True):
    """The worker is gone.

    If `signal` is set, its process crashed by that signal while its machine lives. Then `detail` is
    the script's own line where it happened, `printed` what the script printed last, and `lived_s`
    how long it had run.
    """

    job: Name
    worker: Name
    cause: LossCause
    detail: Text = ""
    owed_state: bool = False  # it was outside the layout, which waits for the state that it held
    machine_id: Name = ""
    signal: Name = ""
    printed: tuple[Text, ...] = ()
    lived_s: Amount = 0.0


class WorkerFailed(Report, frozen=True, kw_only=True):
    """The script itself failed; `detail` is its own traceback."""

    job: Name
    worker: Name
    kind: FailureKind
    detail: Text
    step: Count | None = None  # the step that the script's loop was in; None outside of it


class Progress(Report, frozen=True, kw_only=True):
    """The newest committed step. Sent at most a few times a second, whatever the step rate.

    `step_s` is 0 until a whole step of the layout has been seen, because the first one includes the
    change of layout before it. Of the last so many parts of the work that were `computed` (microbatches,
    or grains where tables are served), slower workers have `given` so many to faster ones.
    """

    job: Name
    generation: Generation
    step: Count
    steps_total: Count
    loss: Finite | None  # not known before the first step that was not skipped
    step_s: Amount
    given: Count = 0
    computed: Count = 0


class Regrouped(Report, frozen=True, kw_only=True):
    """The first step under a new generation has been committed."""

    job: Name
    generation: Generation
    step: Count
    pause_s: Number


class JobProfiled(Report, frozen=True, kw_only=True):
    """The measurements by `worker` of the job's model.

    `microbatch_sizes[0]` is the script's own size.
    """

    job: Name
    worker: Name
    profile: Profile


class Paced(Report, frozen=True, kw_only=True):
    """How long a microbatch took lately on each worker of the layout; where tables are served, a grain.

    Sent when that has changed, and seldom.
    """

    job: Name
    generation: Generation
    microbatch_s: dict[Name, Amount]


class BackupHeld(Report, frozen=True, kw_only=True):
    """The newest state that the keeper has. Sent as often as `Progress`."""

    job: Name
    step: Count
    state_bytes: Count


class SumsKept(Report, frozen=True, kw_only=True):
    """Whether the keeper, from now on, gets the sum of every step before its commit.

    `copies` is the number of machines that could go on alone. `sum_bytes` is 0 if no sum has come
    yet. `stored` says that the state goes straight from the workers to the store.
    """

    job: Name
    kept: bool
    copies: Count
    sum_bytes: Count = 0
    stored: bool = False


class CheckpointWritten(Report, frozen=True, kw_only=True):
    job: Name
    step: Count
    state_bytes: Count
    uri: Text


class CheckpointFailed(Report, frozen=True, kw_only=True):
    job: Name
    step: Count
    error: Text


class CheckpointCopied(Report, frozen=True, kw_only=True):
    """A version is in the storage that outlives the manager's machine."""

    job: Name
    step: Count
    state_bytes: Count
    uri: Text


class CopyFailed(Report, frozen=True, kw_only=True):
    job: Name
    step: Count
    error: Text
    on_disk: bool = True  # the disk of the manager's machine has it


class Recalled(Report, frozen=True, kw_only=True):
    """The job's state was in no memory, and was found elsewhere; `because` says where."""

    job: Name
    step: Count
    because: Text


class RecallFailed(Report, frozen=True, kw_only=True):
    """The stored state of the job could not be read; the keeper tries again."""

    job: Name
    error: Text


class RecordsDamaged(Report, frozen=True, kw_only=True):
    """The job cannot go on from its records in Redis; `error` names the key."""

    job: Name
    error: Text


class Rewound(Report, frozen=True, kw_only=True):
    """State newer than `to_step` is lost or damaged, so its steps are done again.

    It was lost with the keeper's memory, or is damaged on its disk.
    """

    job: Name
    from_step: Count
    to_step: Count


class OutputFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a script's output folder, as it was after `step`.

    `marks` are its step, size and checksum after earlier steps, since it was last replaced whole.
    A `stray` one was written to the script's working folder. What steps from `until` on made of it
    was refused.
    """

    path: Name
    size: Count
    step: Step
    checksum: int = 0
    marks: tuple[tuple[int, int, int], ...] = ()
    stray: bool = False
    until: Step | None = None


class OutputKept(Report, frozen=True, kw_only=True):
    """The job's stored output: how much it is, and the newest files.

    Sent as often as `Progress`.
    """

    job: Name
    files: Count
    total_bytes: Count
    newest: tuple[OutputFile, ...]


class Logged(Report, frozen=True, kw_only=True):
    """The numbers that a script has logged in its newest step. Sent as often as `Progress`."""

    job: Name
    step: Count
    numbers: dict[Name, Finite | None]  # None stands for a number that is not finite


class StateSeen(Report, frozen=True, kw_only=True):
    """What a script keeps in `session.state` behind a step, in words; `count` is all entries.

    Sent as often as `Progress`, if it has changed.
    """

    job: Name
    step: Step
    entries: Entries
    count: Count


class TablesNode(msgspec.Struct, frozen=True, kw_only=True):
    """What a node of a job of served tables does; a `reliable` one is no worker, but the keeper."""

    worker: Name
    reliable: bool
    serves: Count  # partitions
    copies: Count  # partitions of which it has the copy, and another node serves them
    blocks: Count  # that it computes


class TablesServed(Report, frozen=True, kw_only=True):
    """Who serves tables, holds copies of them, and computes. Sent as often as `Progress`, if it has changed.

    `nodes` are the first of them, and `partitions` is how many there are of the tables.
    """

    job: Name
    stage: Count
    partitions: Count
    nodes: tuple[TablesNode, ...]


class JobCompleted(Report, frozen=True, kw_only=True):
    """The job has come to its end; `why` says what it met, if that is not its number of steps.

    `aside` names what its script kept for itself and changed.
    """

    job: Name
    step: Count
    loss: Finite | None
    weights_sha: Name
    export_uri: Text
    aside: tuple[Name, ...] = ()
    why: Text = ""


AnyReport = (
    AgentJoined
    | AgentLost
    | NoticeSeen
    | WorkerReady
    | WorkerProving
    | WorkerLost
    | WorkerFailed
    | Progress
    | Regrouped
    | JobProfiled
    | Paced
    | BackupHeld
    | SumsKept
    | CheckpointWritten
    | CheckpointFailed
    | CheckpointCopied
    | CopyFailed
    | Recalled
    | RecallFailed
    | RecordsDamaged
    | Rewound
    | OutputKept
    | Logged
    | StateSeen
    | TablesServed
    | JobCompleted
)
