"""Everything that the page can ask for and do, as one API with an OpenAPI document.

`GET` of a change says what the change would do, and `POST` of it does that. The guard stands before
all of it (`guard.py`), so a route says nothing about who may call it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, field_validator

from agent.output.controls import harmless
from cloud.errors import CloudError
from cloud.model import Machine
from orchestrator import wishes
from orchestrator.client import Checkpoint, local_cloud
from orchestrator.dashboard.comparison import Comparison, compared
from orchestrator.dashboard.feed import Feed, FeedSource, Snapshot
from orchestrator.dashboard.foresight import Foresight, Other, foresee
from orchestrator.dashboard.guard import SESSION_PATH, cookie_name, cookie_of
from orchestrator.dashboard.keys import Access, Keys, Role
from orchestrator.dashboard.measured import Step, step_of
from orchestrator.dashboard.past import Asked, Curves, Footprint, Past, curves, footprint
from orchestrator.formatting import plural
from orchestrator.history import metrics
from orchestrator.history.records import MEANING, Cause, Entry, Spent
from orchestrator.view import JobView, View

PAGES_MAX = 64
PAGES_OF_A_KEY_MAX = 8  # with all its sessions; as many are kept free for admins
LINES_MAX = 500
POINTS_MAX = 1_000
ENTRIES_MAX = 200
LINES_SEARCHED_MAX = 20_000
WARNING_S_MAX = 86_400.0
USD_MAX = 1e9
STEP_MAX = 10**15
COMPARED_MAX = 4
TIME_MAX = 1e11
BY = "the page"
NAME_SHOWN = 80
JSON = "application/json"
STREAM_ID = r"^([0-9]{1,19}(-[0-9]{1,19})?)?$"  # of 64 bits each, as Redis has them
REF = "#/components/schemas/{name}"


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """What a session may do; `token` is the half that the page keeps, "" if it has it already."""

    role: Role
    until_s: float
    token: str = ""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line that a script has printed; `id` begins with its time in milliseconds."""

    id: str
    worker: str
    line: str


class Lines(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of a log, the oldest first; `more` says whether older ones were left out."""

    lines: tuple[Line, ...]
    more: bool


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a change would do, or does now."""

    would: str
    done: bool


class Money(msgspec.Struct, frozen=True, kw_only=True):
    """Lines that add up to what was spent, and what each cause means."""

    lines: tuple[Spent, ...]
    meaning: dict[Cause, str]


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """The dearest lines that a cause consists of, and what all of it cost, also what is left out."""

    cause: Cause
    usd: float
    entries: tuple[Entry, ...]
    more: bool


class Checkpoints(msgspec.Struct, frozen=True, kw_only=True):
    """The states of a job that can be gone on from, the newest first."""

    checkpoints: tuple[Checkpoint, ...]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    error: str


ANSWERS = (
    Snapshot,
    View,
    Opened,
    Lines,
    Plan,
    Footprint,
    Curves,
    Money,
    Ledger,
    Foresight,
    Comparison,
    Checkpoints,
    Step,
    Failure,
)
StateOf = Callable[[str], Awaitable[bytes]]


class Said(BaseModel):
    """Numbers that a caller says, in a body or in the address, where each is a text."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _number(cls, value: object) -> object:
        if value is True or value is False:
            raise ValueError("true and false are no numbers")
        return value


class Bounds(Said):
    """Other bounds for a job; what is left out stays, and 0 takes a bound away."""

    budget_usd: Annotated[float | None, Field(ge=0, le=USD_MAX)] = None
    deadline_s: Annotated[float | None, Field(ge=0, le=TIME_MAX)] = None


class Terms(Bounds):
    """Other terms of a job; what is left out stays as it is."""

    regions: Annotated[str | None, Field(max_length=1000)] = None
    slots_max: Annotated[int | None, Field(ge=1, le=10_000)] = None


class From(Said):
    """The step of a checkpoint, from which a new job goes on."""

    step: Annotated[int, Field(ge=0, le=STEP_MAX)]


class Drill(Said):
    """How many spot machines of the local cloud to take away, and with how much notice."""

    nodes: Annotated[int, Field(ge=1, le=10_000)] = 1
    warning_s: Annotated[float, Field(ge=0, le=WARNING_S_MAX)] = 120.0


def router(feed: Feed, keys: Keys, past: Past, state_of: StateOf) -> APIRouter:
    """Return every route of the API."""
    api = APIRouter()
    _add_session(api, keys)
    _add_reading(api, feed)
    _add_past(api, feed, past)
    _add_stream(api, feed)
    _add_foresight(api, feed, state_of)
    _add_steps(api, feed)
    _add_branches(api, feed)
    _add_changes(api, feed)
    _add_drill(api, feed)
    return api


def described(kind: type[msgspec.Struct], media: str = JSON) -> dict[str, Any]:
    """Return the keywords with which a route names its answer in the OpenAPI document."""
    schema = {"$ref": REF.format(name=kind.__name__)}
    failure: dict[str, Any] = {
        "description": "Why not",
        "content": {JSON: {"schema": {"$ref": REF.format(name="Failure")}}},
    }
    plain: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    refusal = {"description": "Not with this key, or not so often", "content": plain}
    malformed = {**failure, "content": {**failure["content"], **plain}}
    return {
        "response_class": Response,
        "responses": {
            200: {"description": "Done", "content": {media: {"schema": schema}}},
            **dict.fromkeys((401, 403, 429), refusal),
            400: malformed,
            **dict.fromkeys((404, 409, 422, 503), failure),
        },
    }


def answer(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=JSON)


def _add_session(api: APIRouter, keys: Keys) -> None:
    @api.post(SESSION_PATH, **described(Opened))
    def exchange(request: Request) -> Response:
        """Exchange a key for a session: a cookie, and a token that each request names."""
        access = _access(request)
        if access.session:
            raise HTTPException(409, "This is a session; only a key can be exchanged.")
        made = keys.exchange(access, cookie_of(request.scope))
        opened = Opened(role=access.role, until_s=made.access.until_s, token=made.token)
        response = answer(opened)
        response.set_cookie(
            cookie_name(request.scope),
            made.cookie,
            max_age=max(1, int(made.access.until_s - time.time())),
            path="/api",
            httponly=True,
            samesite="strict",
        )
        return response

    @api.get(SESSION_PATH, **described(Opened))
    def opened(request: Request) -> Response:
        """Say what this key or session may do."""
        access = _access(request)
        return answer(Opened(role=access.role, until_s=access.until_s))

    @api.delete(SESSION_PATH, **described(Opened))
    def leave(request: Request) -> Response:
        """End this session or key at once, wherever it is used."""
        access = _access(request)
        keys.end(access)
        return answer(Opened(role=access.role, until_s=time.time()))


def _add_reading(api: APIRouter, feed: Feed) -> None:
    @api.get("/api/view", **described(Snapshot))
    async def view() -> Response:
        """Return what the page shows now."""
        return Response(feed.message, media_type=JSON)

    @api.get("/metrics", response_class=PlainTextResponse)
    async def prometheus() -> Response:
        """Return the present as text for Prometheus; while the manager is away, that it is."""
        shown = None if feed.away else feed.view
        return Response(metrics.text(shown), headers={"Content-Type": metrics.CONTENT_TYPE})

    @api.get("/api/jobs/{job}/logs", **described(Lines))
    def logs(
        job: str,
        before: Annotated[str, Query(pattern=STREAM_ID)] = "",
        contains: Annotated[str, Query(max_length=200)] = "",
    ) -> Response:
        """Return the last lines that a job's script has printed, before an id, with a text."""
        source = _source(feed)
        return answer(_lines(source, _job(source, job).id, before, contains.casefold()))


def _lines(source: FeedSource, job: str, before: str, word: str) -> Lines:
    """Return the newest lines with a word; it is looked for page by page, until there are enough."""
    found: list[Line] = []
    searched = 0
    while searched < LINES_SEARCHED_MAX:
        page = source.last_lines(job, before, LINES_MAX)
        searched += len(page)
        for key, worker, line in reversed(page):
            if word not in line.casefold():
                continue
            if len(found) == LINES_MAX:
                return Lines(lines=tuple(reversed(found)), more=True)
            found.append(Line(id=key, worker=worker, line=harmless(line)))
        if len(page) < LINES_MAX:
            return Lines(lines=tuple(reversed(found)), more=False)
        before = page[0][0]
    return Lines(lines=tuple(reversed(found)), more=True)


def _add_past(api: APIRouter, feed: Feed, past: Past) -> None:
    @api.get("/api/footprint", **described(Footprint))
    def over_time(
        from_s: Annotated[float | None, Query(ge=0, le=TIME_MAX)] = None,
        to_s: Annotated[float | None, Query(ge=0, le=TIME_MAX)] = None,
        last_s: Annotated[float | None, Query(gt=0, le=TIME_MAX)] = None,
        points: Annotated[int, Query(ge=2, le=POINTS_MAX)] = 300,
    ) -> Response:
        """Return machines, throughput, costs, layouts and marks of a time, or of all times."""
        return answer(footprint(past, Asked(from_s=from_s, to_s=to_s, last_s=last_s), points))

    @api.get("/api/curves", **described(Curves))
    def curves_shown() -> Response:
        """Return the losses of the jobs and the prices of the pools that are shown now."""
        view = _source(feed).view()
        jobs = [job.id for job in view.jobs] if view is not None else []
        pools = [pool.pool for pool in view.pools] if view is not None else []
        return answer(curves(past, jobs, pools))

    @api.get("/api/money", **described(Money))
    def money(job: Annotated[str | None, Query(max_length=200)] = None) -> Response:
        """Return where the money of a job, or of all, went, the dearest cause first."""
        return answer(Money(lines=tuple(past.money(job)), meaning=MEANING))

    @api.get("/api/money/{cause}", **described(Ledger))
    def ledger(cause: Cause, job: Annotated[str | None, Query(max_length=200)] = None) -> Response:
        """Return the lines of the ledger that make what a cause cost, the dearest first."""
        found = past.entries(cause, job, ENTRIES_MAX + 1)
        usd = sum(line.usd for line in past.money(job) if line.key == cause)
        shown, more = tuple(found[:ENTRIES_MAX]), len(found) > ENTRIES_MAX
        return answer(Ledger(cause=cause, usd=usd, entries=shown, more=more))

    @api.get("/api/compare", **described(Comparison))
    def compare(
        job: Annotated[list[str], Query(min_length=2, max_length=COMPARED_MAX)],
    ) -> Response:
        """Return jobs side by side: what each cost and brought, and its loss by step."""
        known = {one.id: one for one in past.jobs()}
        if unknown := [name for name in job if name not in known]:
            raise HTTPException(404, f"The history has no job {unknown[0][:NAME_SHOWN]}.")
        return answer(Comparison(jobs=tuple(compared(past, known[name]) for name in job)))


def _add_stream(api: APIRouter, feed: Feed) -> None:
    pages: dict[str, int] = {}

    async def stream(name: str) -> AsyncIterator[bytes]:
        pages[name] = pages.get(name, 0) + 1
        try:
            async for message in feed.messages():
                yield message
        finally:
            pages[name] -= 1
            if not pages[name]:
                del pages[name]

    @api.get("/api/stream", **described(Snapshot, "text/event-stream"))
    async def changes(request: Request) -> Response:
        """Send what the page shows now, and every change of it, as server-sent events."""
        access = _access(request)
        most = PAGES_MAX if access.role == "admin" else PAGES_MAX - PAGES_OF_A_KEY_MAX
        if sum(pages.values()) >= most or pages.get(access.root, 0) >= PAGES_OF_A_KEY_MAX:
            raise HTTPException(503, "Too many pages are open with this key or in all; close some.")
        return StreamingResponse(stream(access.root), media_type="text/event-stream")


def _add_foresight(api: APIRouter, feed: Feed, state_of: StateOf) -> None:
    @api.get("/api/jobs/{job}/what-if", **described(Foresight))
    async def what_if(job: str, terms: Annotated[Terms, Query()]) -> Response:
        """Return what the manager would decide for a job under other terms; nothing is done."""
        source = await asyncio.to_thread(_source, feed)
        asked = Other(
            budget_usd=terms.budget_usd,
            deadline_s=terms.deadline_s,
            regions=tuple(terms.regions.split(",")) if terms.regions else None,
            slots_max=terms.slots_max,
        )
        found = await foresee(await state_of(source.house().redis_url), job, asked)
        if found is None:
            raise HTTPException(404, "The manager has no job of that name any more.")
        return answer(found)


def _add_steps(api: APIRouter, feed: Feed) -> None:
    @api.get("/api/jobs/{job}/step", **described(Step))
    def step(job: str) -> Response:
        """Return the step that was recorded last, as predicted and as measured."""
        source = _source(feed)
        name = _job(source, job).id
        if (seen := source.timeline(name)) is None:
            raise HTTPException(404, "No step of this job was recorded yet.")
        return answer(step_of(seen, source.profile(name)))

    @api.post("/api/jobs/{job}/step", **described(Plan))
    def record(job: str) -> Response:
        """Have one of the next steps recorded, in place of the one that was recorded last."""
        source = _source(feed)
        one = _job(source, job)
        if one.status != "RUNNING":
            raise HTTPException(409, f"{one.id} is {one.status}; only a running job has steps.")
        source.ask_timeline(one.id)
        return answer(Plan(would=f"The next step of {one.id} is recorded.", done=True))


def _add_branches(api: APIRouter, feed: Feed) -> None:
    def planned(job: str, step: int) -> tuple[FeedSource, wishes.Wish]:
        source = _source(feed)
        one = _job(source, job)
        has_script = source.has_script(one.script_sha)
        return source, wishes.branch(one, source.checkpoints(one.id), step, has_script, _asker())

    @api.get("/api/jobs/{job}/checkpoints", **described(Checkpoints))
    def checkpoints(job: str) -> Response:
        """Return the states of a job that are stored and sound, the newest first."""
        source = _source(feed)
        return answer(Checkpoints(checkpoints=tuple(source.checkpoints(_job(source, job).id))))

    @api.get("/api/jobs/{job}/resume-from", **described(Plan))
    def would_branch(job: str, begin: Annotated[From, Query()]) -> Response:
        """Say what a new job from an earlier step of this one would do."""
        return answer(Plan(would=planned(job, begin.step)[1].would, done=False))

    @api.post("/api/jobs/{job}/resume-from", **described(Plan))
    def branch(job: str, begin: From) -> Response:
        """Begin a new job like this one, from a step that is stored."""
        return _post(*planned(job, begin.step))


def _add_changes(api: APIRouter, feed: Feed) -> None:
    def planned(what: Literal["cancel", "resume"], job: str) -> tuple[FeedSource, wishes.Wish]:
        source = _source(feed)
        one, asker = _job(source, job), _asker()
        if what == "cancel":
            return source, wishes.cancel(one, asker)
        has_script = one.status in wishes.RESUMABLE and source.has_script(one.script_sha)
        return source, wishes.resume(one, has_script, asker)

    def bounded(job: str, bounds: Bounds) -> tuple[FeedSource, wishes.Wish]:
        source = _source(feed)
        return source, wishes.change(
            _job(source, job), _bound(bounds.budget_usd), _bound(bounds.deadline_s), _asker()
        )

    @api.get("/api/jobs/{job}/bounds", **described(Plan))
    def would_bound(job: str, bounds: Annotated[Bounds, Query()]) -> Response:
        """Say what another budget or deadline of a job would do."""
        return answer(Plan(would=bounded(job, bounds)[1].would, done=False))

    @api.post("/api/jobs/{job}/bounds", **described(Plan))
    def bound(job: str, bounds: Bounds) -> Response:
        """Give a job another budget or deadline."""
        return _post(*bounded(job, bounds))

    @api.get("/api/jobs/{job}/cancel", **described(Plan))
    def would_cancel(job: str) -> Response:
        """Say what cancelling a job would do."""
        return answer(Plan(would=planned("cancel", job)[1].would, done=False))

    @api.post("/api/jobs/{job}/cancel", **described(Plan))
    def cancel(job: str) -> Response:
        """Cancel a job."""
        return _post(*planned("cancel", job))

    @api.get("/api/jobs/{job}/resume", **described(Plan))
    def would_resume(job: str) -> Response:
        """Say what resuming a job would do."""
        return answer(Plan(would=planned("resume", job)[1].would, done=False))

    @api.post("/api/jobs/{job}/resume", **described(Plan))
    def resume(job: str) -> Response:
        """Resume a job."""
        return _post(*planned("resume", job))


def _add_drill(api: APIRouter, feed: Feed) -> None:
    @api.get("/api/drill", **described(Plan))
    async def would_drill(drill: Annotated[Drill, Query()]) -> Response:
        """Say which machines a drill would take away."""
        source = await asyncio.to_thread(_source, feed)
        async with _cloud(source) as cloud:
            return answer(Plan(would=_of_drill(drill, await _running(cloud)), done=False))

    @api.post("/api/drill", **described(Plan))
    async def drill(drill: Drill) -> Response:
        """Take machines of the local cloud away, as a market would."""
        source = await asyncio.to_thread(_source, feed)
        async with _cloud(source) as cloud:
            taken = await cloud.drill(warning_s=drill.warning_s, nodes=drill.nodes)
        if not taken:
            raise HTTPException(409, "No spot machine is running, so none was taken.")
        said = f"{plural(len(taken), 'machine')} taken: {', '.join(taken)}."
        return answer(Plan(would=said, done=True))


def _cloud(source: FeedSource) -> Any:
    house = source.house()
    if not house.local_cloud:
        raise HTTPException(
            409,
            "The local cloud is off, so it has no machine to take; on a real cloud: "
            "orchestrator tools drill --cloud aws",
        )
    return local_cloud(house)


async def _running(cloud: Any) -> list[Machine]:
    found: list[Machine] = []
    for place in await cloud.places():
        try:
            listing = await cloud.list(place)
        except CloudError:
            continue
        found += [one for one in listing.machines if one.state == "running"]
    return [one for one in found if one.market == "spot"]


def _of_drill(drill: Drill, running: list[Machine]) -> str:
    if not running:
        raise HTTPException(409, "No spot machine is running, so none would be taken.")
    notice = f"with {drill.warning_s:g} s of notice" if drill.warning_s else "without notice"
    taken = min(drill.nodes, len(running))
    return (
        f"{taken} of {plural(len(running), 'spot machine')} would be taken away {notice}. The jobs on "
        "them go on with what is left, and replacements are bought."
    )


def _post(source: FeedSource, wish: wishes.Wish) -> Response:
    source.post(wish.event)
    return answer(Plan(would=wish.would, done=True))


def _bound(value: float | None) -> wishes.Bound:
    return "kept" if value is None else value or None


def _asker() -> wishes.Asker:
    return wishes.Asker(by=BY, at_s=time.time())


def _source(feed: Feed) -> FeedSource:
    if feed.source is None:
        raise HTTPException(503, feed.away or "The manager has not been found yet.")
    return feed.source


def _job(source: FeedSource, name: str) -> JobView:
    view = source.view()
    for one in view.jobs if view is not None else ():
        if one.id == name:
            return one
    raise HTTPException(404, "There is no job of that name.")


def _access(request: Request) -> Access:
    access = request.state.access
    assert isinstance(access, Access)
    return access
