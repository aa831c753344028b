"""The picture of a step."""

from xml.etree import ElementTree

import msgspec
from blocks import make_profile

from agent.schedule import Kind
from orchestrator.morph import book, gantt, schedules, simulator
from orchestrator.morph.search import Task

SVG = "{http://www.w3.org/2000/svg}"


def test_every_action_has_its_bar():
    """The text is well-formed, with one labelled bar an action and one tail a stage."""
    schedule = schedules.make("1f1b", 3, 5)
    costs = simulator.costs(simulator.uniform(3, 1.0, 2.0))
    root = ElementTree.fromstring(gantt.svg(schedule, costs, title="a <plan>", tail_s=(1, 1, 1)))
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert len(titles) == 3 * 5 * 2 + 3
    assert titles[0] == "forward of microbatch 0, stage 0: 0 s to 1 s"
    assert any(text.text == "a <plan>" for text in root.iter(f"{SVG}text"))


def test_bars_stay_inside_the_picture():
    """No bar begins left of the axis or ends right of the edge."""
    profile, task = make_profile(12), Task(global_batch=64)
    root = ElementTree.fromstring(gantt.picture(profile, task, book.best(profile, task, 6)))
    for bar in [r for r in root.iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]:
        left, width = float(bar.get("x")), float(bar.get("width"))
        assert left >= gantt.LEFT - 0.01
        assert left + width <= gantt.WIDTH


def test_a_long_step_is_cut_and_says_so():
    """A picture holds a bounded number of bars, and names what it leaves out."""
    schedule = schedules.make("1f1b", 16, 2000)
    text = gantt.svg(schedule, simulator.costs(simulator.uniform(16, 1.0, 2.0)))
    assert text.count("<title>") <= gantt.BARS_MAX
    assert "the first" in text


def test_predicted_above_measured_on_one_scale():
    """Two panels: the same bar twice as long below is twice as wide, and rows bear their workers' names."""
    bar = simulator.Bar(worker=0, kind=Kind.REDUCE, stage=0, microbatch=0, start_s=0, end_s=1)
    slower = msgspec.structs.replace(bar, end_s=2)
    rows = ("w<1>",)
    drawn = [gantt.Panel("predicted", (bar,), rows), gantt.Panel("measured", (slower,), rows)]
    root = ElementTree.fromstring(gantt.panels("step 3", drawn))
    bars = [r for r in root.iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    widths = [float(each.get("width")) for each in bars]
    assert abs(widths[1] / widths[0] - 2) < 0.01
    assert [text.text for text in root.iter(f"{SVG}text")].count("w<1>") == 2
