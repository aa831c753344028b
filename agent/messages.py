"""The reports of instances and keeper to the manager, and its orders. No torch here.

Each is a value that encodes to JSON with its type in the field `type`, so that a journal of them
can be read by a person and replayed by a program. Times are seconds since the epoch.
"""

from typing import Literal

import msgspec

from agent.profile import Profile
from cloud.model import Notice

NanPolicy = Literal["fail", "skip"]
Sums = Literal["auto", "always", "never"]  # when they are sent: see `Vault.takes_sums`
LossCause = Literal["connection", "silent", "exited", "machine"]
FailureKind = Literal["exception", "nan", "no_session", "setup", "exit", "refused", "unsupported"]
When = Literal["boundary", "now"]

UNRECORDED = "its loop has not been recorded yet"


class JobOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What the keeper and every worker of a job need to know about it.

    If the job goes on from an earlier job's versions, they lie at `from_url`. The job begins with
    `begins_with` workers, if that is not 0; the next one joins as a newcomer, so that the script is
    tried with a newcomer early. Its loop ends after step `stop_at` at the latest, if that is not 0.
    """

    job: str
    script: str
    script_sha: str
    argv: tuple[str, ...] = ()
    nan: NanPolicy = "fail"
    backup_every_steps: int = 10
    sums: Sums = "always"
    checkpoint_every_s: float = 60.0
    from_url: str = ""
    begins_with: int = 0
    stop_at: int = 0
    output_files: int = 1000
    output_bytes: int = 1 << 30


class WorkerOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The order to start one worker.

    Its id is fresh each time, so that a ghost of an earlier worker is recognised. A `prover`
    reproduces a step of the job, and is not a worker of it.
    """

    job: str
    worker: str
    machine_id: str
    slot: int
    keeper_address: str
    secret: str
    prover: bool = False


class Report(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """Something that was seen, and when."""

    at_s: float


class AgentJoined(Report, frozen=True, kw_only=True):
    machine_id: str
    address: str
    slots: int


class AgentLost(Report, frozen=True, kw_only=True):
    machine_id: str
    why: str


class NoticeSeen(Report, frozen=True, kw_only=True):
    notice: Notice


class Unbuilt(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is built where its layers are kept.

    `training_bytes` is what training it takes, and `room_bytes` what the worker has room for.
    `mark` is the same on all workers that would give it the same initial values.
    """

    training_bytes: int
    room_bytes: int
    mark: str


class WorkerReady(Report, frozen=True, kw_only=True):
    """The script reached its session: the worker has built its model and waits for a layout.

    Sent again when its loop has been recorded. `uncuttable` says why the loop cannot be cut into
    stages, if so, and `stages_max` into how many at most. `exact` says that its numbers do not
    depend on the layout.
    """

    job: str
    worker: str
    machine_id: str
    microbatches: int
    steps_total: int
    state_bytes: int
    uncuttable: str = UNRECORDED
    stages_max: int = 1
    unbuilt: Unbuilt | None = None
    exact: bool = True


class WorkerProving(Report, frozen=True, kw_only=True):
    """The script reached its session, and the worker proves a step before it is ready."""

    job: str
    worker: str
    machine_id: str


class WorkerLost(Report, frozen=True, kw_only=True):
    """The worker is gone.

    If `signal` is set, its process crashed by that signal while its machine lives. Then `detail` is
    the script's own line where it happened, `printed` what the script printed last, and `lived_s`
    how long it had run.
    """

    job: str
    worker: str
    cause: LossCause
    detail: str = ""
    owed_state: bool = False  # it was outside the layout, which waits for the state that it held
    machine_id: str = ""
    signal: str = ""
    printed: tuple[str, ...] = ()
    lived_s: float = 0.0


class WorkerFailed(Report, frozen=True, kw_only=True):
    """The script itself failed; `detail` is its own traceback."""

    job: str
    worker: str
    kind: FailureKind
    detail: str
    step: int | None = None  # the step that the script's loop was in; None outside of it


class Progress(Report, frozen=True, kw_only=True):
    """The newest committed step. Sent at most a few times a second, whatever the step rate.

    `step_s` is 0 until a whole step of the layout has been seen, because the first one includes the
    change of layout before it.
    """

    job: str
    generation: int
    step: int
    steps_total: int
    loss: float | None  # not known before the first step that was not skipped
    step_s: float


class Regrouped(Report, frozen=True, kw_only=True):
    """The first step under a new generation has been committed."""

    job: str
    generation: int
    step: int
    pause_s: float


class JobProfiled(Report, frozen=True, kw_only=True):
    """The measurements by `worker` of the job's model.

    `microbatch_sizes[0]` is the script's own size.
    """

    job: str
    worker: str
    profile: Profile


class Paced(Report, frozen=True, kw_only=True):
    """How long a microbatch took lately on each worker of the layout.

    Sent when that has changed, and seldom.
    """

    job: str
    generation: int
    microbatch_s: dict[str, float]


class BackupHeld(Report, frozen=True, kw_only=True):
    """The newest state that the keeper has. Sent as often as `Progress`."""

    job: str
    step: int
    state_bytes: int


class SumsKept(Report, frozen=True, kw_only=True):
    """Whether the keeper, from now on, gets the sum of every step before its commit.

    `copies` is the number of machines that could go on alone. `sum_bytes` is 0 if no sum has come
    yet.
    """

    job: str
    kept: bool
    copies: int
    sum_bytes: int = 0


class CheckpointWritten(Report, frozen=True, kw_only=True):
    job: str
    step: int
    state_bytes: int
    uri: str


class CheckpointFailed(Report, frozen=True, kw_only=True):
    job: str
    step: int
    error: str


class CheckpointCopied(Report, frozen=True, kw_only=True):
    """A version is in the storage that outlives the manager's machine."""

    job: str
    step: int
    state_bytes: int
    uri: str


class CopyFailed(Report, frozen=True, kw_only=True):
    job: str
    step: int
    error: str


class Recalled(Report, frozen=True, kw_only=True):
    """The job's state was in no memory, and was found elsewhere; `because` says where."""

    job: str
    step: int
    because: str


class RecallFailed(Report, frozen=True, kw_only=True):
    """The stored state of the job could not be read; the keeper tries again."""

    job: str
    error: str


class RecordsDamaged(Report, frozen=True, kw_only=True):
    """The job cannot go on from its records in Redis; `error` names the key."""

    job: str
    error: str


class Rewound(Report, frozen=True, kw_only=True):
    """State newer than `to_step` is lost or damaged, so its steps are done again.

    It was lost with the keeper's memory, or is damaged on its disk.
    """

    job: str
    from_step: int
    to_step: int


class OutputFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a script's output folder, as it was after `step`.

    `marks` are its step, size and checksum after earlier steps, since it was last replaced whole.
    """

    path: str
    size: int
    step: int
    checksum: int = 0
    marks: tuple[tuple[int, int, int], ...] = ()


class OutputKept(Report, frozen=True, kw_only=True):
    """The job's stored output: how much it is, and the newest files.

    Sent as often as `Progress`.
    """

    job: str
    files: int
    total_bytes: int
    newest: tuple[OutputFile, ...]


class Logged(Report, frozen=True, kw_only=True):
    """The numbers that a script has logged in its newest step. Sent as often as `Progress`."""

    job: str
    step: int
    numbers: dict[str, float | None]  # None stands for a number that is not finite


class JobCompleted(Report, frozen=True, kw_only=True):
    job: str
    step: int
    loss: float | None
    weights_sha: str
    export_uri: str


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
    | JobCompleted
)
