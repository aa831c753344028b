"""A simulated month on the real page: published to a real Redis, recorded, and looked at with a real browser."""

import msgspec
import pytest

from agent.keys import EVENTS, READING, VIEW
from orchestrator.brain.holdings import ledger
from orchestrator.cli.money import mailed
from orchestrator.history.meter import reading_of
from orchestrator.history.reader import History
from orchestrator.history.recorder import Recorder
from orchestrator.redis_client import connect
from orchestrator.simulated.runs import play
from orchestrator.simulated.scenario import month
from orchestrator.state import State
from orchestrator.view_builder import view_of

pytestmark = pytest.mark.processes
DAYS, EVERY_S = 30.0, 3600.0
LIVE = "document.querySelector('#link')?.textContent == 'live'"
DRAWN = "document.querySelectorAll('#footprint canvas').length > 0"
MARKS = "document.querySelector('#marks-count').innerText"
CARD = "document.querySelector('#footprint-card')"


def recorded(server, places) -> State:
    """Play the month, publish as a manager does every hour, and record all of it."""
    client = connect(server.url)
    places.history.unlink(missing_ok=True)
    recorder, told, states = Recorder(client, places.history), dict[int, object](), list[State]()

    def publish(state: State) -> None:
        for said in state.sentences:
            if told.setdefault(id(said), said) is said and said.at_s > (
                states[0].now_s - EVERY_S if states else 0.0
            ):
                client.xadd(EVENTS, {"e": msgspec.json.encode(said)}, id="*")
        view, read = view_of(state, state.now_s), reading_of(state, state.now_s)
        client.mset({VIEW: msgspec.json.encode(view), READING: msgspec.json.encode(read)})
        recorder.look(state.now_s)

    next_s = 0.0

    def watch(state: State) -> None:
        nonlocal next_s
        if state.now_s >= next_s:
            next_s = state.now_s + EVERY_S
            publish(state)
        states[:] = [state]

    play(month(DAYS, 2, seed=3), watch=watch)
    publish(states[0])
    recorder.look(states[0].now_s + EVERY_S, last=True)
    recorder.close()
    client.close()
    return states[0]


def test_a_month_is_opened_zoomed_and_read(browser, house, server) -> None:
    """All of it is shown at once; the money is the ledger's to the cent; a morning of it is as clear as the whole; a lost
    connection comes back; it fits a phone; and the file that is mailed says the same."""
    state = recorded(server, house.places)
    house.source.now = view = view_of(state, state.now_s)
    spent_usd = ledger.spent_usd(state.account, state.now_s)
    browser.shape(1280, 900)
    browser.complaints.clear()
    browser.open("about:blank")
    browser.open(house.link)
    browser.wait_for(f"{LIVE} && {DRAWN}")
    browser.run(
        "[...document.querySelectorAll('#ranges button')].find(x => x.innerText == 'All').click()"
    )
    browser.wait_for(f"parseInt({MARKS}) > 20")
    whole = browser.run(MARKS)

    total = "document.querySelector('#money .sum .number')?.innerText.replace(/[$,]/g, '')"
    browser.wait_for(f"{total} > 0")
    assert float(browser.run(total)) == pytest.approx(spent_usd, abs=0.01)

    browser.run(
        "{ const over = document.querySelector('.u-over'), at = over.getBoundingClientRect();"
        "over.dispatchEvent(new MouseEvent('mousemove', { bubbles: true, clientX: at.left + at.width / 2, clientY: at.top + 20 })); }"
    )
    browser.wait_for("document.querySelector('#tip').innerText.includes('\\u00d7')")
    for key, count in (("+", 6), ("ArrowLeft", 2), ("Home", 1)):
        before = browser.run(MARKS)
        press = f"{CARD}.dispatchEvent(new KeyboardEvent('keydown', {{ key: {key!r}, cancelable: true }}))"
        for _ in range(count):
            browser.run(press)
        browser.wait_for(f"{MARKS} != {before!r} || {key == 'ArrowLeft':d}")
    browser.wait_for(f"{MARKS} == {whole!r}")

    house.source.error = ConnectionError("nothing is running")
    browser.wait_for("document.querySelector('#link').textContent == 'away'")
    house.source.error = None
    browser.wait_for(LIVE)
    browser.shape(390, 844, dark=True)
    browser.wait_for("innerWidth == 390")
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert browser.complaints == []

    text = mailed.page_of(view, History.open(house.places))
    assert f"${view.cost.spent_usd:,.2f}" in text
    assert len(text) < 1_000_000
