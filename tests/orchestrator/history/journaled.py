"""Entries of a journal, as a manager writes them when a worker is lost and another one comes."""

from agent.layout import data_parallel
from agent.messages import AgentJoined, NoticeSeen, Regrouped, WorkerLost, WorkerReady
from cloud.model import LaunchRequest, Machine, Notice, Pool
from orchestrator.actions import AnyAction, Launch, Note, Regroup, StartWorker
from orchestrator.events import AnyEvent, Launched, Tick
from orchestrator.world import Entry

T0 = 1_800_000_000.0
POOL = Pool(cloud="aws", region="us-east-1", zone="us-east-1a", type="g6.xlarge")


def entry(event: AnyEvent, *actions: AnyAction) -> Entry:
    return Entry(event=event, actions=actions)


def regroup(job: str, generation: int, *workers: str) -> Regroup:
    layout = data_parallel(generation, 8, workers)
    return Regroup(job=job, layout=layout, when="now", because=f"{len(workers)} workers")


def works(at_s: float, job: str, generation: int) -> Entry:
    step = 10 * generation
    return entry(Regrouped(at_s=T0 + at_s, job=job, generation=generation, step=step, pause_s=4.0))


def began(job: str) -> list[Entry]:
    """Its layout of two workers works; how it began is not in the journal any more."""
    starts = [StartWorker(job=job, worker=w, machine_id=f"i-{w}", slot=0, because="") for w in "ab"]
    first = entry(Tick(at_s=T0 - 9), *starts, regroup(job, 2, "a", "b"))
    return [first, works(-5, job, 2)]


def loss(job: str) -> list[Entry]:
    """Worker b is lost at 0 s, and the layout without it works at 5 s."""
    lost = WorkerLost(at_s=T0, job=job, worker="b", cause="exited")
    why = Note(who=job, because="RECOVERING: b on i-b lost (exited)")
    return [entry(lost, why, regroup(job, 3, "a")), works(5, job, 3)]


def growth(job: str) -> list[Entry]:
    """A machine is asked for at 10 s, joins at 50 s, and its worker is in the layout at 70 s."""
    tags = {"job": job}
    request = LaunchRequest(token="t-1", pool=POOL, market="spot", bid_usd_per_h=None, tags=tags)
    machine = Machine(
        id="i-c",
        token="t-1",
        pool=POOL,
        market="spot",
        state="pending",
        launched_at_s=T0 + 11,
        tags=tags,
    )
    start = StartWorker(job=job, worker="c", machine_id="i-c", slot=0, because="")
    ready = WorkerReady(
        at_s=T0 + 60,
        job=job,
        worker="c",
        machine_id="i-c",
        microbatches=8,
        steps_total=100,
        state_bytes=1,
    )
    return [
        entry(Tick(at_s=T0 + 10), Launch(request=request, because="")),
        entry(Launched(at_s=T0 + 12, token="t-1", machine=machine)),
        entry(AgentJoined(at_s=T0 + 50, machine_id="i-c", address="", slots=1), start),
        entry(ready),
        entry(Tick(at_s=T0 + 61), regroup(job, 4, "a", "c")),
        works(70, job, 4),
    ]


def notice(job: str) -> list[Entry]:
    """At 80 s machine i-c is announced to go; a change that keeps it comes first."""
    seen = Notice(machine_id="i-c", kind="terminate", deadline_s=T0 + 200)
    says = Note(who="i-c", because="i-c will be taken in 120 s")
    return [
        entry(NoticeSeen(at_s=T0 + 80, notice=seen), says),
        entry(Tick(at_s=T0 + 90), regroup(job, 5, "c", "a")),
        works(95, job, 5),
        entry(Tick(at_s=T0 + 180), regroup(job, 6, "a")),
        works(186, job, 6),
    ]
