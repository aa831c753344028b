"""The page as one file: it asks nobody for anything, runs nothing, and says what the page says."""

import re

import msgspec
from test_study import remember

from orchestrator.cli.money import mailed
from orchestrator.history.reader import History

EVIL = "<img src=x onerror=alert(1)><script>alert(1)</script>\"'"


def test_one_file_shows_all_and_needs_nothing(browser, house, tmp_path):
    """In a browser without a network: no request but for the file itself, nothing sticks out, light and dark."""
    history = History.open(house.places)
    remember(house.places, *house.source.now.jobs)
    text = mailed.page_of(house.source.now, history)
    assert len(text) < 300_000
    assert not re.search(r"<script|https?://|url\(|@import|<link|<img", text)
    (tmp_path / "page.html").write_text(text)
    browser.complaints.clear()
    for width, dark in ((1280, False), (390, True)):
        browser.shape(width, 900, dark=dark)
        browser.open((tmp_path / "page.html").as_uri())
        browser.wait_for("document.readyState == 'complete' && document.querySelector('main')")
        shown = browser.run("document.body.innerText")
        for words in ("$0.245", "67 % less than on demand", "Steps per second", "m-19c2", "redone"):
            assert words in shown, words
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert browser.run("performance.getEntriesByType('resource').length") == 0
    assert browser.complaints == []
    browser.open("about:blank")
    browser.wait_for("document.readyState == 'complete'")


def test_names_cannot_become_markup(house, make):
    view = make.view(
        deployment=EVIL,
        jobs=(make.job(id=EVIL, script=EVIL, because=EVIL),),
        machines=(make.machine(id=EVIL, pool=EVIL, why_bought=EVIL),),
    )
    text = mailed.page_of(view, History.open(house.places))
    assert "<script" not in text
    assert "<img" not in text


def test_without_a_history_it_is_the_present(make, tmp_path):
    from orchestrator.paths import Places

    view = msgspec.structs.replace(make.view(), jobs=())
    text = mailed.page_of(view, History.open(Places(tmp_path)))
    assert "$0.2451" in text


def test_what_is_live_is_in_it_however_much_has_ended(make, tmp_path):
    """A view has what lives first; of more than the file has room for, the live ones were left out."""
    from orchestrator.paths import Places

    live = [make.machine(id=f"live-{n:03}") for n in range(150)]
    ended = [make.machine(id=f"ended-{n:03}", ended_at_s=make.at_s) for n in range(100)]
    text = mailed.page_of(make.view(machines=(*live, *ended)), History.open(Places(tmp_path)))
    assert all(one.id in text for one in live)
