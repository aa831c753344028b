"""The picture of a step."""

from xml.etree import ElementTree

import msgspec
from blocks import make_profile, uniform

from agent.layout import Layout, Replica
from agent.schedule import Kind
from agent.timeline import Timeline
from orchestrator.planner import gantt, plan_book
from orchestrator.planner.search import Task
from orchestrator.planner.simulation import schedules, simulator

SVG = "{http://www.w3.org/2000/svg}"


def test_every_action_has_its_bar():
    """The text is well-formed, with one labelled bar an action and one tail a stage."""
    schedule = schedules.make("1f1b", 3, 5)
    costs = simulator.costs(uniform(3, 1.0, 2.0))
    root = ElementTree.fromstring(gantt.svg(schedule, costs, title="a <plan>", tail_s=(1, 1, 1)))
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert len(titles) == 3 * 5 * 2 + 3
    assert titles[0] == "forward of microbatch 0, stage 0: 0 s to 1 s"
    assert any(text.text == "a <plan>" for text in root.iter(f"{SVG}text"))


def test_bars_stay_inside_the_picture():
    """No bar begins left of the axis or ends right of the edge."""
    profile, task = make_profile(12), Task(global_batch=64)
    root = ElementTree.fromstring(gantt.picture(profile, task, plan_book.best(profile, task, 6)))
    for bar in [r for r in root.iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]:
        left, width = float(bar.get("x")), float(bar.get("width"))
        assert left >= gantt.LEFT - 0.01
        assert left + width <= gantt.WIDTH


def test_a_long_step_is_cut_and_says_so():
    """A picture holds a bounded number of bars, and names what it leaves out."""
    schedule = schedules.make("1f1b", 16, 2000)
    text = gantt.svg(schedule, simulator.costs(uniform(16, 1.0, 2.0)))
    assert text.count("<title>") <= gantt.BARS_MAX
    assert "the first" in text


def test_predicted_above_measured_on_one_scale():
    """Two panels: the same bar twice as long below is twice as wide, since one scale does for both, and rows bear their workers' names."""
    bar = simulator.Bar(worker=0, kind=Kind.REDUCE, stage=0, microbatch=0, start_s=0, end_s=1)
    slower = msgspec.structs.replace(bar, end_s=2)
    rows = ("w<1>",)
    drawn = [gantt.Panel("predicted", (bar,), rows), gantt.Panel("measured", (slower,), rows)]
    root = ElementTree.fromstring(gantt.panels("step 3", drawn))
    bars = [r for r in root.iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    widths = [float(each.get("width")) for each in bars]
    assert abs(widths[1] / widths[0] - 2) < 0.01
    assert [text.text for text in root.iter(f"{SVG}text")].count("w<1>") == 2


def drawn_apart(factor: float) -> ElementTree.Element:
    bar = simulator.Bar(worker=0, kind=Kind.FORWARD, stage=0, microbatch=0, start_s=0, end_s=1)
    shorter = msgspec.structs.replace(bar, end_s=1 / factor)
    panels = [gantt.Panel("predicted", (bar,), ("w",)), gantt.Panel("measured", (shorter,), ("w",))]
    return ElementTree.fromstring(gantt.panels("step 3", panels))


def test_a_prediction_that_is_far_off_leaves_something_to_see_of_what_was_measured():
    """Each has a scale of its own then, and how far it is off is said in words."""
    root = drawn_apart(29)
    bars = [r for r in root.iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    assert bars[0].get("width") == bars[1].get("width")
    notes = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    like = ": worker by row, time from left to right, on a scale of its own"
    assert f"predicted 1 s{like}" in notes
    assert f"measured 34.5 ms, 29x faster{like}" in notes


def test_a_prediction_that_is_near_is_said_on_the_same_scale():
    """Bars can be compared with each other then."""
    notes = ["".join(text.itertext()) for text in drawn_apart(1.25).iter(f"{SVG}text")]
    assert "measured 800 ms, 1.2x faster: worker by row, time from left to right" in notes


def test_what_is_predicted_of_each_replica_bears_the_numbers_of_its_own_microbatches():
    """As what is measured does: the second of two has not the first ones again."""
    layout = Layout(
        generation=1,
        microbatches=4,
        replicas=(
            Replica(workers=("a",), first=0, count=2),
            Replica(workers=("b",), first=2, count=2),
        ),
    )
    seen = Timeline(job="j", step=3, at_s=0.0, layout=layout, cuts=(), workers={})
    bars = [b for b in gantt.predicted(seen, make_profile(12)) if b.kind == Kind.FORWARD]
    assert [(b.worker, b.microbatch) for b in bars] == [(0, 0), (0, 1), (1, 2), (1, 3)]


def test_a_page_in_the_dark_has_a_picture_in_the_dark():
    """Both kinds of picture have what is not a bar in classes, which the style gives other colours."""
    schedule = schedules.make("1f1b", 1, 2)
    plan = gantt.svg(schedule, simulator.costs(uniform(1, 1.0, 2.0)))
    for text in (plan, ElementTree.tostring(drawn_apart(1.0), encoding="unicode")):
        assert "prefers-color-scheme: dark" in text
        for name in ("paper", "words", "faint", "grid"):
            assert f'class="{name}"' in text
