"""The messages between a worker and the keeper, and those among workers.

Every message is small and travels in front of its payload, if it has one: see `agent.net.wire`.
`step` counts from 0 and names the work; `version` counts committed steps and names the state, so
step s turns version s into version s + 1. Every message that belongs to a layout carries its
generation.
"""

from functools import reduce
from itertools import zip_longest
from operator import or_
from typing import TYPE_CHECKING, Literal

import msgspec

from agent.layout import Layout
from agent.messages import (
    UNRECORDED,
    AnyReport,
    Entries,
    FailureKind,
    JobOrder,
    LossCause,
    OutputFile,
    Unbuilt,
)
from agent.profile import Profile, SumFormat
from agent.store.encoding.format import Layer
from agent.store.encoding.format import Part as StoredPart
from agent.store.shares import Extent, Stored
from agent.timeline import Moment
from cloud.ranges import (
    Amount,
    Count,
    Generation,
    Microbatches,
    Name,
    Positive,
    Slots,
    Step,
    Text,
)

STAYS_S = 30.0  # a machine that is still there so long after its notice ran out is not taken
PROVING = -2  # the generation of messages for a proof; no layout has it


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="m", tag=True):
    """Base of everything on the wire."""


# --- handshake: both sides prove that they know the secret ----------------------------------------


class Challenge(Message, frozen=True, kw_only=True):
    nonce: bytes


class Proof(Message, frozen=True, kw_only=True):
    """Proof that the caller knows the secret of `job`, or the one for all others if it is empty."""

    job: Name
    nonce: bytes
    mac: bytes


class Accepted(Message, frozen=True, kw_only=True):
    """Proof that the called side knows it, too, and why the caller may not come in, if it may not.

    The caller answers with its hello, because it may have given up meanwhile.
    """

    mac: bytes
    refusal: Text = ""


# --- worker to keeper -----------------------------------------------------------------------------


class Held(msgspec.Struct, frozen=True):
    """The layers that a worker has, if it does not have all; and how many there are in all."""

    layers: tuple[Name, ...]
    of: Count


class Hello(Message, frozen=True, kw_only=True):
    """A worker introduces itself, at first and after every reconnect.

    `version` is None for a worker that holds no state yet; `generation` is the one it is in. `held`
    belongs to that version. `promised` belongs to the next one: it is what this worker keeps once
    it hears that the step for which it is prepared is committed. `left` is the version with which
    its script left its loop. `proven` says that it took part in a committed step, or reproduced
    one. A `prover` reproduces a step, and does nothing else.
    """

    job: Name
    worker: Name
    machine_id: Name
    mesh_address: Name
    generation: Generation = -1
    version: Count | None = None
    held: Held | None = None
    promised: Held | None = None
    left: Count | None = None
    ready: "Ready | None" = None
    proven: bool = False
    prover: bool = False


class Shape(msgspec.Struct, frozen=True):
    """A table as its copies know it: rows of `columns` numbers, of which `width` are the value."""

    name: Name
    keys: Count
    width: Positive
    columns: Positive
    dtype: Name
    rule: Name = ""  # whose arrays are the other columns; an earlier worker does not say it

    def __str__(self) -> str:
        rule = f"the arrays of {self.rule!r}" if self.rule else f"{self.columns} columns"
        return f"{self.keys or 'any'} keys, {self.width} {self.dtype} and {rule}"

    def fits(self, other: "Shape") -> bool:
        """Whether rows mean the same in both, as far as both say it."""
        rules = {self.rule, other.rule} - {""}
        return len(rules) < 2 and self == msgspec.structs.replace(other, rule=self.rule)


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """What the keeper needs to know of a job whose tables are served: see `agent.served`."""

    items: Positive
    blocks: Microbatches
    grains: Positive
    batches: Positive
    partitions: Microbatches
    tables: tuple[Shape, ...]
    slack: Count | None = 0
    help_size: Count = 0
    clocks: Count = 0
    seconds: Amount = 0.0
    change: Amount = 0.0
    over: Positive = 10

    def unlike(self, other: "Serving") -> str:
        """Return what differs that all workers of a job have to say alike; empty if nothing."""
        alike = ("items", "blocks", "grains", "batches", "partitions")
        found = [one for one in alike if getattr(self, one) != getattr(other, one)]
        both = zip_longest(self.tables, other.tables)
        if not all(a is not None and b is not None and a.fits(b) for a, b in both):
            found.append("tables")
        return ", ".join(found)


class Ready(Message, frozen=True, kw_only=True):
    """The script reached its loop; sent again when its loop has been recorded.

    `exact` says that its numbers do not depend on the layout, and `exchange` in which format the
    script has gradients summed. `hardware` is the key of what it computes on: see
    `agent.tensors.device.hardware`. With `serving` the job is not one of steps that are summed: its
    workers are nodes of a parameter server.
    """

    microbatches: Microbatches
    steps_total: Count
    state_bytes: Count
    uncuttable: Text = UNRECORDED
    stages_max: Slots = 1
    unbuilt: Unbuilt | None = None
    exact: bool = True
    exchange: SumFormat = "float32"
    hardware: Name = ""
    serving: Serving | None = None


class Beat(Message, frozen=True, kw_only=True):
    """A sign of life from a worker.

    It carries the recent duration of a microbatch (0 if none was computed), the step that the
    worker is in, and for how long its script's thread has done nothing: see `agent.net.watchdog`.
    """

    microbatch_s: Amount = 0.0
    step: Step = -1
    hung_s: Amount = 0.0


class Slice(Message, frozen=True, kw_only=True):
    """This worker's slice of the summed gradient of a step; the bytes are the payload."""

    generation: Generation
    step: Count
    offset: Count
    total: Count


class Digest(msgspec.Struct, frozen=True, array_like=True):
    """A value that has to be alike on all workers: a sum over its bits, a norm of each tensor.

    Bits are compared where both sides round alike, the norms where they do not.
    """

    name: Name
    bits: int
    norms: tuple[float, ...] = ()


class Computed(msgspec.Struct, frozen=True, kw_only=True):
    """One microbatch of a commit, as a worker computed it.

    `gradients` has the layers that are looked at in this version: see `agent.proof.digest`. A
    worker of a pipeline has the layers of its stage, and a loss if that stage is the last.
    `written` is what the forward has left in the buffers of layers.
    `machine` says how the worker rounds, so workers with the same `machine` compute the same bits.
    It is empty where this is not known, and where a script's kernels are not deterministic.
    """

    version: Count
    microbatch: Count
    batch: Digest
    loss: float | None
    gradients: tuple[Digest, ...] = ()
    written: tuple[Digest, ...] = ()
    machine: Name = ""
    graph: int = 0  # the recorded graph of the loss, if computed in stages


class Reached(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a version at which a script's step begins, in the layers looked at there.

    `aside` names some values that the script keeps beside it, and that have changed here.
    """

    version: Count
    layers: tuple[Digest, ...]
    machine: Name = ""
    aside: tuple[Name, ...] = ()


class Prepared(Message, frozen=True, kw_only=True):
    """This worker holds the sum of the step, of its own layers or of all, and can apply it.

    `script_step` is the count of the script's own loop, and `phase` says which of its calls of
    `backward` in that step this is. `reached` is the state that the script's step began with; it
    comes with phase 0.
    """

    generation: Generation
    step: Count
    loss: float
    present: bytes
    script_step: Count
    phase: Count = 0
    idle: Count = 0  # turns of the script's loop so far that trained nothing
    held: Held | None = None
    computed: tuple[Computed, ...] = ()
    reached: Reached | None = None
    told: bool = True  # the keeper has this worker's part of the sum, or is being sent it
    given: Count = 0  # microbatches of this worker's share that others have computed


class Arrived(Message, frozen=True, kw_only=True):
    """This worker's script begins a step after a snapshot.

    It is sent at once, so that a joining worker need not wait for the end of the step.
    """

    generation: Generation
    script_step: Count
    reached: Reached


class Proved(Message, frozen=True, kw_only=True):
    """The result of a step that this worker was asked to reproduce: see `Prove`.

    `reached` has the state that the step began with, and the state after it if that was asked for.
    The former then also shows the layers that are shown of the latter, because the amount by which
    they changed says how close two results have to be.
    """

    version: Count
    computed: tuple[Computed, ...] = ()
    reached: tuple[Reached, ...] = ()


class Untried(Message, frozen=True, kw_only=True):
    """The second process of this worker has ended, or could not be started.

    `final` says that a different process could not be started either.
    """

    why: Text
    final: bool = False


class Holding(Message, frozen=True, kw_only=True):
    """This worker has loaded the state of that version."""

    generation: Generation
    version: Count
    held: Held | None = None


class LoopLeft(Message, frozen=True, kw_only=True):
    """This worker's script has left its loop with that version."""

    version: Count


class Unled(Message, frozen=True, kw_only=True):
    """A leader's side effects in a committed step (printing, saving) were not finished."""

    step: Count


class Snapshot(Message, frozen=True, kw_only=True):
    """Some of this worker's share of the state: see `agent.store.shares`.

    `last` says that with it the share is complete, `final` that the script's loop is over with this
    version. Of a `stored` share the bytes lie in `parts` in the store; `why` says why they do not.
    """

    generation: Generation
    version: Count
    forms: tuple[Layer, ...]
    extents: tuple[Extent, ...]
    last: bool
    final: bool = False
    stored: bool = False
    parts: tuple[StoredPart, ...] = ()
    why: Text = ""


class Unread(Message, frozen=True, kw_only=True):
    """What this manifest names is damaged in the store, so no worker can go on from it."""

    manifest: Name
    why: Text


class LayersAsked(Message, frozen=True, kw_only=True):
    """A worker that keeps only its own layers asks for those that it needs of the backup.

    No worker has them any more, and by now this one knows which layers it needs.
    """

    generation: Generation
    layers: tuple[Name, ...]


class RedoAsked(Message, frozen=True, kw_only=True):
    """A worker that catches up has room for this committed step's sum, or these bytes of it."""

    generation: Generation
    step: Count
    spans: tuple[tuple[Count, Count], ...] = ()


class PeerBroken(Message, frozen=True, kw_only=True):
    generation: Generation
    peer: Name


class ProfileAsked(Message, frozen=True, kw_only=True):
    """A worker asks whether a profile with this key exists already.

    See `agent.calibration.calibrate.key_of`.
    """

    key: Name


class Recording(Message, frozen=True, kw_only=True):
    """This worker begins to record the script's loop.

    If it is lost now, recording may be the cause.
    """


class Measured(Message, frozen=True, kw_only=True):
    """This worker has measured the job's model."""

    profile: Profile


class Traced(Message, frozen=True, kw_only=True):
    """What this worker did in a step whose timeline was asked for."""

    generation: Generation
    step: Count
    cuts: tuple[Step, ...]
    moments: tuple[Moment, ...]


class Lines(Message, frozen=True, kw_only=True):
    lines: tuple[Text, ...]


class OutputSent(Message, frozen=True, kw_only=True):
    """A change of one output file by the steps from `since` to `step`.

    The payload begins at `at` of `size`.

    begun     it was there before the first step, and counts if the job has no such file
    whole     it was replaced
    append    bytes were added at its end
    lines     these steps made it on this worker, and it continues lines that others wrote before
    gone      it was deleted

    If `again` is set, a different worker led in these steps, so only what the storage lacks counts.
    A `stray` file lies in the script's working folder.
    """

    serial: Count
    generation: Generation
    path: Name
    how: Literal["begun", "whole", "append", "lines", "gone"]
    since: Step
    step: Step
    size: Count = 0
    at: Count = 0
    again: bool = False
    stray: bool = False


class OutputWhole(Message, frozen=True, kw_only=True):
    """The storage has what was written up to this step; the state after it may follow."""

    step: Step


class OutputAsked(Message, frozen=True, kw_only=True):
    """A worker asks for what was kept after this step: the list, or a piece of the file `path`."""

    serial: Count
    step: Step
    path: Name = ""
    at: Count = 0


class Strayed(Message, frozen=True, kw_only=True):
    """The script has written this file in a place that is not kept."""

    path: Name


class Numbers(Message, frozen=True, kw_only=True):
    """What the script has logged in some steps, the newest last.

    `again` is set by a worker that begins to lead and has these numbers as well.
    """

    steps: tuple[tuple[int, dict[str, float]], ...]
    again: bool = False


class ScriptValues(Message, frozen=True, kw_only=True):
    """What the script keeps in `session.state` behind this step, in words; `count` is all of it."""

    step: Step
    entries: Entries
    count: Count


class Failed(Message, frozen=True, kw_only=True):
    kind: FailureKind
    detail: Text
    step: Count | None = None  # the step that the script was in; None outside of its loop


class Unable(Message, frozen=True, kw_only=True):
    """This worker ends, and its script is not at fault."""

    cause: LossCause
    why: Text


class Ended(Message, frozen=True, kw_only=True):
    """The script ran to its end."""


# --- agent to keeper, and back --------------------------------------------------------------------


class AgentHello(Message, frozen=True, kw_only=True):
    """The agent of a machine; it proves that it knows the deployment's secret."""

    machine_id: Name


class Told(Message, frozen=True, kw_only=True):
    """A report for the manager; it is sent again until the manager has it."""

    serial: Count
    report: AnyReport


class Heard(Message, frozen=True, kw_only=True):
    """Every report up to `serial` is in the manager's inbox."""

    serial: Count


# --- keeper to worker -----------------------------------------------------------------------------


class Welcome(Message, frozen=True, kw_only=True):
    """The keeper's answer to a worker that it accepts.

    The payload is the script with the files that go along, as in `agent.source.parcel`, for a
    worker that has not begun it. `state_bytes` is the size of the state that a newcomer will be
    sent; 0 if it is not known.
    """

    order: JobOrder
    state_bytes: Count = 0
    microbatches: Count = 0


class Dismissal(Message, frozen=True, kw_only=True):
    """The worker is not needed, or not any more."""

    why: Text


class Peers(Message, frozen=True, kw_only=True):
    """The addresses of the job's workers, so that they connect before they need to."""

    addresses: dict[Name, Name]


class Shards(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker writes its share of a state, and how fast it may.

    The files lie in the folder of the version that is `ahead` of the state's.
    """

    place: Name
    bytes_s: Positive
    ahead: Count = 0


class Enter(Message, frozen=True, kw_only=True):
    """A new generation begins at `version`.

    `holders` have that version and send it, in slices, to the workers of the layout that have not.
    If some holders have only the layers in `held`, or workers are to keep only their own layers,
    each worker asks for what it lacks. If there are no holders, the keeper sends its own copy, or
    the layers that a worker asks for if it is to keep only its own; and each worker asks for the
    `redo` sums after that copy. `snapshot` and `sums` are as in `Commit`. `record` asks the first
    worker whether the script can be cut, because that is not known yet; the others begin their
    first share by waiting for its word (`agent.worker.survey.helper`). `unled` is the committed step that
    the first worker leads once more when it applies it again.
    """

    layout: Layout
    version: Count
    holders: tuple[Name, ...]
    addresses: dict[Name, Name]
    held: dict[Name, tuple[Name, ...]] = {}
    redo: Count = 0
    snapshot: bool = False
    record: bool = False
    unled: Count | None = None
    sums: bool = True
    # Workers that are not holders get the state from the keeper even if there are holders, and
    # apply the `redo` sums.
    catch_up: bool = False
    # Whether the workers of the layout outside `unproven` have reproduced a committed step, or took
    # part in one.
    proven: bool = False
    # Workers that hold only their own layers and have reproduced nothing yet; their chain does so
    # together. With no holders it computes the microbatch `proves` of the first of the `redo`
    # steps; else each chain computes a microbatch of a different chain.
    unproven: tuple[Name, ...] = ()
    proves: Count | None = None
    shards: Shards | None = None  # as in `Commit`


class Commit(Message, frozen=True, kw_only=True):
    """Version `version` is committed.

    `snapshot` asks for its state in the background, `trace` for a timeline of the step that begins
    now, and `sums` for the sum of that step. With `shards` the state goes there, and not to the
    keeper.
    """

    generation: Generation
    version: Count
    snapshot: bool = False
    trace: bool = False
    sums: bool = True
    shards: Shards | None = None


class State(Message, frozen=True, kw_only=True):
    """A state, or the layers asked for.

    The payload is these layers, end to end, unless they are `stored`.
    """

    generation: Generation
    version: Count
    layers: tuple[Layer, ...]
    stored: Stored | None = None


class Redo(Message, frozen=True, kw_only=True):
    """The sum of a committed step, sent on request, to be applied again."""

    generation: Generation
    step: Count
    present: bytes


class Prove(Message, frozen=True, kw_only=True):
    """A worker has to reproduce a committed step before it counts.

    The step is the script's step `script_step`, which begins with `version`. After this message
    come the `State` of that version, and a `Redo` for each of the `commits` of the step, all of
    generation `PROVING`. `microbatches` has an entry for each phase that is to be played: the
    microbatch to compute, or None to compute none. `reaches` asks for the state after the step as
    well; without it, the step is left as soon as the last microbatch is computed.
    """

    version: Count
    script_step: Count
    microbatches: tuple[Count | None, ...]
    commits: Count
    reaches: bool = True


class ProofWanted(Message, frozen=True, kw_only=True):
    """Start a second process of this worker, which proves a step: see `agent.keeper.lone_proof`."""


class Noticed(Message, frozen=True, kw_only=True):
    """The worker's machine will be taken away in `left_s`; its own clock may show any time."""

    left_s: Amount


class ProfileKnown(Message, frozen=True, kw_only=True):
    """Whether a profile with this key is known; if so, it need not be measured.

    The profile comes along if its network is not measured yet.
    """

    key: Name
    known: bool
    unprobed: Profile | None = None


class OutputTaken(Message, frozen=True, kw_only=True):
    """The answer to `OutputSent`.

    more      go on from `at`
    done      it is stored, or does not count
    again     begin again, because some of it was lost
    has       the storage has this file as it was after step `at`
    lacks     the storage has no such file to add to, so it is needed whole
    refused   `why` it is not kept; `for_now` because of the storage, which may take it later
    """

    serial: Count
    state: Literal["more", "done", "again", "has", "lacks", "refused"]
    at: Step = 0
    why: Text = ""
    for_now: bool = False


class OutputGiven(Message, frozen=True, kw_only=True):
    """The answer to `OutputAsked`: the files, or the piece as the payload; none if it is gone.

    `whole` says that nothing of that step is still to come from another worker.
    """

    serial: Count
    files: tuple[OutputFile, ...] = ()
    whole: bool = False


class Done(Message, frozen=True, kw_only=True):
    """The final state is stored safely, so the script may go on after its loop."""


class Over(Message, frozen=True, kw_only=True):
    """The other workers' scripts left their loop with this version.

    This worker is in the step after it.
    """

    version: Count


# --- worker to worker -----------------------------------------------------------------------------


class PeerHello(Message, frozen=True, kw_only=True):
    """A worker introduces itself to a peer; `serial` grows with each of its connections."""

    worker: Name
    serial: Count


class Part(Message, frozen=True, kw_only=True):
    """A piece of a step for a peer: `tag` says which, and the payload holds it."""

    generation: Generation
    step: Count
    tag: Name
    extra: bytes = b""


class FlowHello(Message, frozen=True, kw_only=True):
    """A worker opens one of the flows of blocks to a peer.

    `serial` grows with each of its meetings; the flows of one meeting have the same.
    """

    worker: Name
    serial: Count
    flow: Count


class Chunk(Message, frozen=True, kw_only=True):
    """A piece of a block of `size` bytes, from `offset` on; `extra` is said once for the block.

    The piece is the payload, or `there` in the sender's segment.
    """

    generation: Generation
    step: Count
    kind: Name
    block: Count
    offset: Count
    size: Count
    extra: bytes = b""
    there: "Lying | None" = None


class Lying(msgspec.Struct, frozen=True):
    """Bytes in a slot of a segment; no two that lie in it one after the other have one serial.

    The tag is for peers of other machines, past whose processors the bytes come.
    """

    slot: Count
    serial: Count
    count: Count
    tag: bytes = b""


class Segment(Message, frozen=True, kw_only=True):
    """Memory of a worker that others of its host may read, as an open file of its process.

    If it has a `reach`, others may read it over the network, from this address on.
    """

    process: Count
    file: Count
    nonce: bytes
    slots: Count
    slot_bytes: Count
    reach: bytes = b""
    address: Count = 0


class Readable(Message, frozen=True, kw_only=True):
    """Whether the peer's segment can be read here."""

    is_so: bool


class Freed(Message, frozen=True, kw_only=True):
    """What lay there in the peer's segment is not needed any more."""

    there: Lying


if TYPE_CHECKING:
    AnyMessage = Message
else:  # every message above, so that a decoder takes each
    AnyMessage = reduce(or_, Message.__subclasses__())
