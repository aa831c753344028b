"""What a person does on the page: cancel, resume, other bounds, the log; and what a read-only key does not."""

import pytest
from past_hour import READY

from orchestrator.events import JobCancelled, JobChanged, JobResumed

WOULD = "document.querySelector('#change-would').innerText"
OPEN = "document.querySelector('#change').open"


def press(page, name: str) -> None:
    """The first button of that name that can be seen."""
    page.run(
        f"[...document.querySelectorAll('button')].find(x => x.innerText == {name!r} && x.checkVisibility()).click()"
    )


def fill(page, number: int, text: str) -> None:
    page.run(
        f"{{ const x = document.querySelectorAll('#change-fields input')[{number}]; x.value = {text!r}; x.dispatchEvent(new Event('input')); }}"
    )


def test_a_job_is_cancelled_after_the_page_has_said_what_that_does(page, house):
    """The first press asks, the second does it, and says that it did."""
    press(page, "Cancel")
    page.wait_for(f"{WOULD}.startsWith('A checkpoint is written at step 2,412')")
    assert house.source.posted == []
    press(page, "Cancel the job")
    page.wait_for("!document.querySelector('#said').hidden")
    assert not page.run(OPEN)
    [event] = house.source.posted
    assert isinstance(event, JobCancelled)
    assert page.complaints == []


def test_a_change_that_is_left_changes_nothing(page, house):
    """By its button or by Escape; and what is refused is said in its place, and can be put right."""
    press(page, "Cancel")
    page.wait_for(f"{WOULD} != ''")
    press(page, "Leave it")
    assert not page.run(OPEN)
    press(page, "Budget and deadline")
    fill(page, 0, "0.1")
    page.wait_for(f"{WOULD}.includes('has spent or reserved $0.2152, more than $0.1000')")
    assert page.run("document.querySelector('#change-do').disabled")
    page.complaints.clear()  # the browser notes each refusal
    page.call(
        "Input.dispatchKeyEvent",
        type="keyDown",
        key="Escape",
        code="Escape",
        windowsVirtualKeyCode=27,
    )
    page.wait_for(f"!{OPEN}")
    assert house.source.posted == []


def test_another_budget_and_deadline_are_explained_while_they_are_typed(page, house):
    press(page, "Budget and deadline")
    page.wait_for(f"{WOULD}.startsWith('Fill in')")
    fill(page, 0, "3")
    page.wait_for(f"{WOULD}.includes('within the budget. It has no deadline.')")
    fill(page, 1, "2")
    page.wait_for(f"{WOULD}.includes('in time')")
    press(page, "Change")
    page.wait_for(f"!{OPEN}")
    [event] = house.source.posted
    assert isinstance(event, JobChanged)
    assert event.budget_usd == 3.0
    assert 7100 < event.deadline_s - event.at_s < 7300


def test_a_cancelled_job_is_resumed(page, house, make):
    """Its button is there in place of the other."""
    house.source.now = make.view(
        jobs=(make.job(status="CANCELLED", ended_at_s=make.at_s, chains=()),)
    )
    page.wait_for("document.querySelector('#jobs').innerText.includes('Resume')")
    assert "Cancel\n" not in page.run("document.querySelector('.buttons').innerText")
    press(page, "Resume")
    page.wait_for(f"{WOULD}.includes('goes on from step 2,412')")
    page.run("document.querySelector('#change-do').click()")
    page.wait_for(f"!{OPEN}")
    assert isinstance(house.source.posted[0], JobResumed)


def test_a_drill_without_a_local_cloud_says_how_else(page):
    press(page, "Drill")
    page.wait_for(f"{WOULD}.includes('orchestrator tools drill --cloud aws')")
    page.complaints.clear()
    page.run("document.querySelector('#change').close()")


def test_a_read_only_key_shows_all_and_offers_no_change(browser, house):
    """The page says so, and the server would refuse: that is tested with every route."""
    browser.open("about:blank")
    browser.open(f"{house.url}#key={house.keys.make('read-only')}")
    browser.wait_for(f"{READY} && document.querySelector('#role').checkVisibility()")
    assert (
        browser.run("[...document.querySelectorAll('.admin')].some(x => x.checkVisibility())")
        is False
    )
    assert (
        browser.run("[...document.querySelectorAll('.buttons')][0].innerText")
        == "Log\nWhat if\nCheckpoints\nA step\nCompare"
    )


def test_the_focus_stays_while_numbers_move(page, house, make):
    """The card is drawn again every second; who goes by the keyboard stays where they are."""
    page.run(
        "[...document.querySelectorAll('.buttons button')].find(x => x.innerText == 'Cancel').focus()"
    )
    house.source.now = make.view(jobs=(make.job(step=2500),))
    page.wait_for("document.querySelector('#jobs').innerText.includes('2,500')")
    assert page.run("document.activeElement.innerText") == "Cancel"


def test_the_log_follows_and_a_word_is_found(page, house):
    """Lines are text, also if they look like markup; colours are left out."""
    house.source.lines = [(f"{n}000-0", "w-1", f"step {n}") for n in range(1, 31)]
    house.source.lines.append(("31000-0", "w-2", "\x1b[31m<b>warning</b>\x1b[0m: a\x07bell"))
    press(page, "Log")
    page.wait_for("document.querySelectorAll('#logs-lines li').length == 31")
    last = page.run("[...document.querySelectorAll('#logs-lines code')].at(-1).innerText")
    assert last == "<b>warning</b>: a\\x07bell"
    house.source.lines.append(("32000-0", "w-1", "step 32"))
    page.wait_for("document.querySelectorAll('#logs-lines li').length == 32")
    page.run(
        "{ const x = document.querySelector('#logs-find'); x.value = 'WARN'; x.dispatchEvent(new Event('input')); }"
    )
    page.wait_for("document.querySelectorAll('#logs-lines mark').length == 1")
    page.run("document.querySelector('#logs-close').click()")
    assert page.complaints == []


def test_the_layout_is_a_picture_of_machines(page):
    """A row for each replica; the slow place stands out."""
    cells = page.run(
        "[...document.querySelectorAll('.layout td')].map(x => [x.innerText, x.className])"
    )
    assert [text.split("\n")[0] for text, _ in cells] == ["m-19c2", "m-88e0", "m-88e0"]
    assert [kind for _, kind in cells] == ["", "", "slow"]
    assert "1.6 times slower" in cells[2][0]


def test_where_the_money_goes_adds_up(page):
    page.wait_for("document.querySelectorAll('#money tr').length == 5")
    rows = page.run(
        "[...document.querySelectorAll('#money tr')].map(x => [...x.children].map(y => y.innerText))"
    )
    assert [row[0] for row in rows] == ["useful", "waiting", "manager", "redone", "Together"]
    assert rows[0][1:3] == ["$0.170", "69.4 %"]
    assert rows[-1][1] == "$0.245"
    useful, *others, whole = page.run(
        "(() => { const bar = document.querySelector('#money .parts'); return [...[...bar.children].map(x => x.clientWidth), bar.clientWidth]; })()"
    )
    assert useful + sum(others) > 0.97 * whole  # less the gaps: small sums fill it, too
    assert useful == pytest.approx(0.694 * whole, rel=0.03)


def test_two_tabs_go_on_side_by_side(page, house, make):
    """A browser has one cookie for both, and each tab has its own token and its own rights."""
    with page.other_tab():
        page.open(f"{house.url}#key={house.keys.make('read-only')}")
        page.wait_for(f"{READY} && document.querySelector('#role').checkVisibility()")
    house.source.now = make.view(jobs=(make.job(step=2600),))
    page.wait_for("document.querySelector('#jobs').innerText.includes('2,600')")
    press(page, "Cancel")
    page.wait_for(f"{WOULD}.startsWith('A checkpoint is written at step 2,600')")
    page.run("document.querySelector('#change').close()")
    assert page.complaints == []
