"""The page in a real browser: what a person sees, on a desk and on a phone."""

import re
import socket
import threading
import time

import httpx
import pytest
from msgspec.structs import replace
from past_hour import LIVE, READY

from agent.messages import OutputFile
from orchestrator.view import Sentence, ServerView

EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>\"'`${7*7}"


def text(page, selector: str) -> str:
    return page.run(f"document.querySelector({selector!r}).innerText")


def test_the_first_line_is_the_money(page):
    """What is spent, what it brings, and what comes: in that order, in dollars."""
    shown = page.run(
        "Object.fromEntries([...document.querySelectorAll('.cost')].map(x => [...x.children].map(y => y.innerText)).map(([name, ...rest]) => [name, rest]))"
    )
    assert list(shown) == [
        "Spent",
        "Reserved",
        "Budget left",
        "Now",
        "Cost of work",
        "On demand",
        "Saved",
        "Work lost",
        "Finish",
        "Final cost",
    ]
    assert shown["Spent"][:2] == ["$0.245", "of $5.00"]
    assert shown["Reserved"] == ["$0.031", "for what is held"]
    assert shown["Budget left"][0] == "$4.72"
    assert shown["Now"] == ["$0.156/h", "4 machines"]
    assert shown["Cost of work"][0] == "$0.0100"
    assert shown["Cost of work"][1].startswith("per 1,000 steps, \u25bc 87 % under")
    assert shown["On demand"][0] == "$0.742"
    assert shown["Saved"] == ["$0.497", "67 % less than on demand"]
    assert shown["Work lost"] == ["$0.00", "no step was lost"]
    assert shown["Finish"][1] == "in 6 min 7 s to 7 min 1 s"
    assert shown["Final cost"] == ["$0.261 to $0.366", "at its end"]
    assert page.complaints == []


def test_the_key_is_gone_and_another_port_hears_half_of_a_session(page, house):
    """What a person copies or photographs does not carry the key. The page opens after a reload. Of what opens it, a
    page on another port gets the cookie, which opens nothing."""
    assert house.key not in page.run("location.href")
    page.open(house.url)
    page.wait_for(READY)
    assert page.run("document.cookie") == ""
    assert house.key not in page.run("JSON.stringify(sessionStorage)")
    sent: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as other:
        thread = threading.Thread(target=overhear, args=(other, sent))
        thread.start()
        page.open(f"http://127.0.0.1:{other.getsockname()[1]}/api/view")
        page.wait_for("document.body?.innerText == 'other'")
        thread.join(30)
        assert page.run("JSON.stringify(sessionStorage) + document.cookie") == "{}"
    assert house.key.encode() not in sent[0]
    heard = next(x for x in sent[0].decode().split("\r\n") if x.lower().startswith("cookie: "))
    _, _, cookie = heard.partition(": ")
    for headers in ({}, {"X-Page-Token": ""}, {"X-Page-Token": cookie.partition("=")[2]}):
        with httpx.Client(headers={**headers, "Cookie": cookie}) as thief:
            assert thief.get(f"{house.url}api/view").status_code == 401


def overhear(other: socket.socket, sent: list[bytes]) -> None:
    """What another user's page on another port would hear of a browser that has ours open."""
    caller, _ = other.accept()
    with caller:
        sent.append(caller.recv(65536))
        caller.sendall(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\n\r\nother"
        )


def test_without_the_key_the_page_says_where_it_is(page, house):
    page.run("sessionStorage.clear()")
    page.open(house.url)
    page.wait_for(
        "document.querySelector('#away')?.innerText.includes('orchestrator tools dashboard')"
    )
    assert page.run("document.querySelector('main').getClientRects().length") == 0
    page.run(f"location.hash = {house.link.partition('#')[2]!r}")
    page.wait_for(READY)
    page.complaints.clear()  # the browser notes each 401


def test_jobs_machines_market_and_events_are_shown(page):
    """Everything in the view has its place, with its reason."""
    assert "step 2,412 of 4,000" in text(page, "#jobs").replace("\n", " ")
    assert page.run("document.querySelector('#jobs .bar i').style.width") == "60.3%"
    assert "replaces m-d41b" in text(page, "#machines")
    assert "admitted 2 s\nnode 5 s" in text(page, "#machines")
    events = text(page, "#events")
    assert events.index("m-f6d0 bought") < events.index("was submitted")
    assert "the provider announced it" in events


def test_each_pool_says_what_its_work_costs_what_is_left_and_when_it_is_asked_again(page, make):
    """Beside the prices stands the decision: its figures, its quotas, its refusals, and its sentence."""
    shown = {
        cells[0].splitlines()[0]: cells
        for cells in page.run(
            "[...document.querySelectorAll('#pools tbody tr')].map(row => [...row.cells].map(cell => cell.innerText))"
        )
    }
    names = page.run(
        "[...document.querySelectorAll('#pools thead th')].map(cell => cell.textContent)"
    )
    work, quota = names.index("Work $/slot-h"), names.index("Quota left")
    assert shown["local/local-a/local.small"][work] == "$0.033\non demand $0.098"
    assert shown["local/local-b/local.large"][work] == "$0.032\non demand $0.098\ncheapest"
    assert shown["local/local-a/local.small"][quota] == "14"
    assert shown["local/local-b/local.large"][quota] == "\N{EN DASH}"
    assert shown["local/local-c/local.large"][quota] == "0"
    at = page.run(f"new Date({(make.at_s + 130) * 1000}).toLocaleTimeString('en-GB')")
    refused = shown["local/local-b/local.small"][0]
    assert f"spot left alone for 2 min 10 s, until {at}: NoCapacity: no machine left" in refused
    dear = shown["local/local-c/local.large"][0]
    assert "on demand left alone for 1 min 10 s" in dear
    assert dear.endswith(": QuotaExceeded")
    why = page.run("document.querySelector('#pools .thought').innerText")
    assert why.startswith("For gpt-7f3a, decided at ")
    assert "4 machines for $0.1556/h do 4.329 steps/s" in why
    assert "next best: 3 machines for $0.1244/h" in why


def test_a_change_is_drawn_without_reloading(page, house, make):
    """The step moves, the curve grows, the title follows."""
    house.source.now = make.view(jobs=(make.job(step=3000, loss=1.5),))
    page.wait_for("document.querySelector('#jobs').innerText.includes('3,000')")
    page.wait_for("document.title.startsWith('75 %')")
    assert page.run("document.querySelectorAll('#jobs .curve svg').length") == 1


def test_of_hundreds_of_jobs_the_first_few_are_cards(page, house, make):
    """The rest are lines, so that machines and money stay near; a line opens into its card, and stays open."""
    live = [make.job(id=f"runs-{n}", submitted_at_s=make.at_s - n) for n in range(8)]
    over = [
        make.job(
            id=f"over-{n:03}",
            status="FAILED",
            ended_at_s=make.at_s,
            submitted_at_s=make.at_s - 100 - n,
        )
        for n in range(300)
    ]
    house.source.now = make.view(jobs=(*over, *live))
    page.wait_for("document.querySelector('#jobs').innerText.includes('300 more jobs have ended')")
    cards = "[...document.querySelectorAll('#jobs article code.quiet')].map(one => one.innerText)"
    assert page.run(cards) == [f"runs-{n}" for n in range(6)]
    shown = text(page, "#jobs")
    assert "runs-7" in shown
    assert "over-000" not in shown
    page.run("document.querySelector('#jobs > .card > details:last-child > summary').click()")
    page.wait_for("document.querySelector('#jobs').innerText.includes('over-299')")
    page.run("[...document.querySelectorAll('#jobs summary')].at(-1).click()")
    page.wait_for(f"{cards}.includes('over-299')")
    moved = make.job(id="runs-0", step=3_000, submitted_at_s=make.at_s)
    house.source.now = make.view(jobs=(*over, moved, *live[1:]))
    page.wait_for("document.querySelector('#jobs').innerText.includes('step 3,000')")
    assert page.run(cards) == [*(f"runs-{n}" for n in range(6)), "over-299"]
    page.run("[...document.querySelectorAll('#jobs article button')].at(-1).scrollIntoView()")
    assert "Resume" in text(page, "#jobs")
    assert page.complaints == []


def test_what_a_script_writes_and_logs_is_shown(page, house, make):
    """The newest files and numbers; a name that looks like markup is a name."""
    files = (
        OutputFile(path="<b>plots</b>/a.png", size=2_500_000, step=2_400),
        OutputFile(path="config.json", size=90, step=-1),
    )
    job = make.job(
        logged={"accuracy": 0.925, "norm": None},
        output=files,
        output_files=11,
        output_bytes=3_000_000,
    )
    house.source.now = make.view(jobs=(job,))
    page.wait_for("document.querySelector('#jobs').innerText.includes('accuracy')")
    shown = text(page, "#jobs")
    assert "0.9250" in shown
    assert "Output: 11 files, 3.0 MB" in shown
    assert "<b>plots</b>/a.png 2.5 MB, step 2,400" in shown
    assert "config.json 90 B, before the first step" in shown
    assert "and 9 more: orchestrator output gpt-7f3a" in shown


def test_what_a_script_keeps_is_a_small_table(page, house, make):
    """Names and values as text, whatever they hold, and how many more there are."""
    kept = (("best", "0.25"), ("<img src=x onerror=alert(1)>", "'\\x1b[2J<b>'"))
    house.source.now = make.view(jobs=(make.job(state=kept, state_count=5, state_step=2_400),))
    page.wait_for("document.querySelector('#jobs .kept')?.innerText.includes('and 3 more')")
    rows = page.run(
        "[...document.querySelectorAll('#jobs .kept tr')].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    assert rows == [*map(list, kept), ["and 3 more"]]
    assert "session.state, behind step 2,400" in text(page, "#jobs")
    assert page.run("document.querySelectorAll('#jobs img, #jobs .kept b').length") == 0
    assert page.complaints == []


def test_work_that_was_given_to_faster_workers_stands_below_the_layout(page, house, make):
    """Where a slow one stands out, and only if there was any."""
    assert "faster workers" not in text(page, "#jobs")
    house.source.now = make.view(jobs=(make.job(given=12, computed=1_640),))
    page.wait_for("document.querySelector('#jobs .layout').innerText.includes('faster')")
    said = text(page, "#jobs .layout > p")
    assert said == "12 of the last 1,640 microbatches were given to faster workers."
    assert page.complaints == []


def test_what_the_last_bits_are_stands_among_a_jobs_facts(page, house, make):
    """Whether it is exact, and from which step on its bits are those of another kind of machine."""
    bits = "exact up to step 1,200 only: machines that round differently go on from there"
    house.source.now = make.view(jobs=(make.job(bits=bits, unlike_step=1_200),))
    page.wait_for("document.querySelector('#jobs .facts').innerText.includes('Last bits')")
    assert bits in text(page, "#jobs .facts")
    assert page.complaints == []


def test_who_serves_the_tables_of_a_job_is_shown(page, house, make):
    """The stage, and a row for each machine with all that it does; it stands in place of a layout."""
    servers = (
        ServerView(machine="", slot=0, serves=0, copies=8, blocks=0),
        ServerView(machine="m-19c2", slot=1, serves=5, copies=0, blocks=1),
        ServerView(machine="m-<b>", slot=0, serves=0, copies=0, blocks=7),
        ServerView(machine="gone", slot=0, serves=0, copies=0, blocks=0),
    )
    job = make.job(tables_stage=3, partitions=8, servers=servers, given=1, computed=64)
    house.source.now = make.view(jobs=(job,))
    page.wait_for(
        "document.querySelector('#jobs').innerText.includes('Parameter servers: stage 3')"
    )
    rows = page.run(
        "[...document.querySelectorAll('#jobs .layout tbody tr')].map(row => [...row.cells].map(cell => cell.innerText))"
    )
    assert rows == [
        ["the manager's", "BackupPS, 8 of 8 partitions"],
        ["m-19c2\nslot 2", "ActivePS, 5 of 8 partitions\nworker, 1 block"],
        ["m-<b>", "worker, 7 blocks"],
        ["gone", "nothing yet"],
    ]
    assert "1 of the last 64 grains were given to faster workers." in text(page, "#jobs .layout")
    assert page.complaints == []


def test_a_loss_that_falls_steeply_is_no_flat_line(page, house, make):
    """One high value at the beginning does not hide what came of it: the curve is logarithmic then, and says so."""
    heights = "(document.querySelector('#jobs path.line')?.getAttribute('d') ?? '').slice(1).split('L').map(p => +p.split(' ')[1])"
    for step, loss in ((3100, 300.0), (3200, 1.0), (3300, 0.1)):
        house.source.now = make.view(jobs=(make.job(step=step, loss=loss),))
        page.wait_for(f"document.querySelector('#jobs').innerText.includes('{step:,}')")
    page.wait_for("document.querySelector('#jobs .curve').innerText.includes('Loss, logarithmic')")
    highest, middle, lowest = page.run(f"{heights}.slice(-3)")
    assert 20 < middle - highest < 80
    assert 20 < lowest - middle < 80


def test_a_moment_of_another_day_has_its_date(page, house, make):
    """A deadline in three weeks was shown as "Sat 14:00", and last week's events had a time only."""
    view = house.source.now
    then_s, due_s = view.at_s - 9 * 86_400, view.at_s + 21 * 86_400
    said = Sentence(at_s=then_s, who="gpt-7f3a", what="note", because="it was long ago")
    due = make.job(deadline_s=due_s)
    house.source.now = replace(view, events=(said,), jobs=(due,))
    page.wait_for("document.querySelector('#events').innerText.includes('long ago')")
    date = {
        at: f"{time.localtime(at).tm_mday} {time.strftime('%b', time.localtime(at))}"
        for at in (then_s, due_s)
    }
    assert text(page, "#events time").startswith(date[then_s])
    assert re.search(rf"DEADLINE\s+{date[due_s]}\w* \d\d:\d\d", text(page, "#jobs"), re.I)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"eta_s": 60.0}, "in 2 h"),
        ({"eta_s": 9_000.0}, "at this pace 30 min 0 s too late"),
        ({"deadline_s": -10.0}, "passed 10 s ago"),
        ({"ended_at_s": 0.0, "status": "SUCCEEDED"}, "kept"),
        ({"ended_at_s": 7_205.0, "status": "SUCCEEDED"}, "missed by 5 s"),
    ],
)
def test_what_becomes_of_a_deadline_is_shown(page, house, make, changes, words):
    at = {
        key: make.at_s + (s or 0.0)
        for key, s in {"deadline_s": 7_200.0, **changes}.items()
        if key in ("deadline_s", "ended_at_s")
    }
    house.source.now = make.view(jobs=(make.job(**{**changes, **at}),))
    page.wait_for(f"document.querySelector('#jobs').innerText.includes({words!r})")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"eta_s": 36_000.0}, "of $1.00, at this cost $0.771 too little"),
        ({"eta_s": 371.0}, "of $1.00\n"),
    ],
)
def test_budget_that_will_not_do_is_shown(page, house, make, changes, words):
    house.source.now = make.view(jobs=(make.job(**changes),))
    page.wait_for(f"document.querySelector('#jobs').innerText.includes({words!r})")


def test_final_cost_that_leaves_no_reserve_is_over_the_budget(page, house, make):
    """The job would be ended before, since what gives its machines back is kept."""
    cost = replace(make.view().cost, budget_usd=0.39)
    house.source.now = make.view(cost=cost)
    page.wait_for("document.querySelector('.cost.over')?.innerText.includes('over the budget')")


def test_where_the_model_is_can_be_typed(page, house, make):
    """A path, not an address in which blanks are %20; one that is no encoding is shown as it is."""
    for uri, shown in (
        ("file:///tmp/Mein%20%C3%9Cbungs/m.pt", "/tmp/Mein \u00dcbungs/m.pt"),
        ("file:///tmp/%ff", "file:///tmp/%ff"),
        ("s3://bucket/a%20b", "s3://bucket/a%20b"),
    ):
        house.source.now = make.view(jobs=(make.job(export_uri=uri),))
        page.wait_for(f"document.querySelector('#jobs .long dd')?.innerText === {shown!r}")


def test_names_cannot_become_markup(page, house, make):
    """A job, a script, a machine, a pool or a sentence called like markup is shown as it is."""
    base = make.view()
    house.source.now = make.view(
        jobs=(make.job(id=EVIL, script=EVIL, because=EVIL, layout=EVIL, export_uri=EVIL),),
        machines=(make.machine(id=EVIL, pool=EVIL, why_bought=EVIL, state=EVIL),),
        pools=tuple(
            type(p)(**{**{f: getattr(p, f) for f in p.__struct_fields__}, "pool": EVIL})
            for p in base.pools[:1]
        ),
        events=tuple(
            type(e)(at_s=e.at_s, who=EVIL, what=EVIL, because=EVIL) for e in base.events[:1]
        ),
        deployment=EVIL,
    )
    page.wait_for("document.querySelector('#jobs').innerText.includes('onerror')")
    assert page.run("document.querySelectorAll('main img, main script').length") == 0
    assert page.run("document.title").startswith("60 %")
    for part in ("#jobs", "#machines", "#pools", "#events"):
        assert "${7*7}" in text(page, part)
    assert page.complaints == []


def test_a_house_that_goes_away_is_said(page, house):
    """The page does not pretend to be live; it says what to do, and recovers by itself."""
    house.source.error = ConnectionError("nothing is running; start it with: orchestrator up")
    page.wait_for("document.querySelector('#link').textContent == 'away'")
    assert "orchestrator up" in text(page, "#away")
    house.source.error = None
    page.wait_for(LIVE)


def test_an_empty_house_says_what_to_do_next(page, house, make):
    """Before the first job the page explains itself instead of showing empty boxes."""
    house.source.now = make.view(jobs=(), machines=(), pools=(), events=())
    page.wait_for("document.querySelector('#jobs').innerText.includes('orchestrator submit')")
    assert "nothing is charged" in text(page, "#machines")


def test_before_anything_is_known_no_empty_boxes_are_shown(page, house, make):
    """A manager that starts has said nothing yet: one word says so, and all of it comes with the first news."""
    known, house.source.now = house.source.now, None
    page.open(house.url)  # a script that reloads answers before the page has gone
    page.wait_for("document.querySelector('#link')?.textContent == 'starting'")
    assert page.run("document.querySelector('main').getClientRects().length") == 0
    house.source.now = known
    page.wait_for(LIVE)
    assert page.run("document.querySelector('main').getClientRects().length") == 1


def test_a_thousand_machines_are_drawn(page, house, make):
    """The table is bounded and says how many more there are; how many are held is the manager's own count."""
    view = make.view(machines=tuple(make.machine(id=f"m-{i}") for i in range(1000)))
    house.source.now = replace(view, cost=replace(view.cost, machines=1200))
    page.wait_for("document.querySelector('#machines').innerText.includes('and 900 more')")
    assert text(page, "#machines-count") == "1,200 held"


@pytest.mark.parametrize(
    ("width", "dark"),
    [(320, False), (360, False), (390, True), (768, False), (1280, True), (1920, False)],
)
def test_nothing_sticks_out_at_any_width(page, width, dark):
    """From a phone to a wide screen, light and dark, there is no sideways scrolling once the curves are drawn anew."""
    page.shape(width, 900, dark=dark)
    page.wait_for(f"innerWidth == {width} && document.documentElement.scrollWidth <= innerWidth")
    cards = "[...document.querySelectorAll('.card, .cost')]"
    assert page.run(f"{cards}.every(card => card.scrollWidth <= card.clientWidth)")
    background = page.run("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(14, 18, 24)" if dark else "rgb(246, 247, 249)")
