"""Every view of the page, for readers who hear it: axe finds nothing, light and dark, on a desk and on a phone."""

from importlib.resources import files

import pytest
from test_study import checkpoint, remember, timeline

DRAWN = "document.querySelectorAll('#footprint canvas').length > 0"
AXE = files("axe_core_python").joinpath("axe.min.js").read_text()
RUN = (
    "axe.run(document, {resultTypes: ['violations']}).then(found => found.violations.map("
    "one => `${one.id}: ${one.help}: ${one.nodes.map(node => node.html.slice(0, 160)).slice(0, 3).join(' | ')}`))"
)
DIALOGS = {
    "Cancel": "document.querySelector('#change-would').innerText != ''",
    "Budget and deadline": "document.querySelector('#change-would').innerText != ''",
    "Drill": "document.querySelector('#change-would').innerText != ''",
    "Log": "document.querySelectorAll('#logs-lines li').length > 0",
    "Checkpoints": "document.querySelectorAll('#study-body button').length > 0",
    "A step": "document.querySelectorAll('#study-body rect').length > 0",
    "useful": "document.querySelectorAll('#study-body tbody tr').length > 1",
    "Compare": "document.querySelectorAll('#study-body tr').length > 5",
}


@pytest.fixture(params=[(1280, False), (390, True)])
def page(request, page, house):
    width, dark = request.param
    house.source.stored, house.source.recorded = [checkpoint(2400)], timeline(2413)
    house.source.lines = [("1000-0", "w-1", "step 1")]
    remember(house.places, *house.source.now.jobs)
    page.shape(width, 900, dark=dark)
    page.wait_for(DRAWN)
    page.run(f"{AXE}; 0")
    return page


def press(page, name: str) -> None:
    page.run(
        f"[...document.querySelectorAll('button, #money a')].find(x => x.innerText == {name!r} && x.checkVisibility()).click()"
    )


def test_axe_finds_nothing_on_any_view(page):
    """The whole page with its lists open, and each dialog over it."""
    page.run("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    assert page.run(RUN) == []
    for name, ready in DIALOGS.items():
        press(page, name)
        page.wait_for(ready)
        assert page.run(RUN) == [], name
        page.run("document.querySelectorAll('dialog').forEach(one => one.close())")


def test_axe_finds_nothing_where_nothing_is_or_all_is_away(page, house, make):
    house.source.now = make.view(jobs=(), machines=(), pools=(), events=())
    page.wait_for("document.querySelector('#jobs').innerText.includes('No job yet')")
    assert page.run(RUN) == []
    house.source.error = ConnectionError("nothing is running")
    page.wait_for("!document.querySelector('#away').hidden")
    assert page.run(RUN) == []


@pytest.mark.parametrize("page", [(1280, False)], indirect=True)
def test_axe_itself_finds_what_is_wrong(page):
    """Else an empty list would say nothing."""
    page.run("document.querySelector('main').append(document.createElement('button'))")
    assert any(one.startswith("button-name") for one in page.run(RUN))
