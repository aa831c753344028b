"""Profiles: what is written can be read, and what is wrong is refused in one line."""

import msgspec
import pytest
from blocks import make_profile, network

from agent.profile import Link, render
from orchestrator.morph import profiles
from orchestrator.morph.errors import ProfileError


def test_a_profile_survives_its_text(tmp_path):
    """Written and read again it is the same, one section a line."""
    profile = make_profile(5, seed=1)
    path = tmp_path / "profile.json"
    path.write_text(render(profile), encoding="utf-8")
    assert profiles.load(path) == profile
    assert sum("block" in line for line in path.read_text().splitlines()) == 5 + 1


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        (lambda text: text[: len(text) // 2], "no usable profile"),
        (lambda _: "", "no usable profile"),
        (lambda _: "[1, 2]", "no usable profile"),
        (lambda text: text.replace('"version": 1', '"version": 0'), "written in format 0"),
        (lambda text: text.replace("[1,2,4]", "[4,2,1]"), "must be positive and rising"),
        (lambda text: text.replace("[1,2,4]", "[1,2]"), r"\[3\] times for 2 sizes"),
        (lambda text: text.replace("16000000000.0", "-1.0"), "memory_bytes is -1.0"),
        (lambda text: text.replace('"sections": [', '"sections": [], "x": ['), "no sections"),
    ],
)
def test_a_bad_profile_is_refused_in_one_line(tmp_path, change, answer):
    """Torn, old, empty or contradictory: one line names the file, the reason and what to do."""
    path = tmp_path / "p.json"
    path.write_text(change(render(make_profile(3))), encoding="utf-8")
    with pytest.raises(ProfileError, match=answer) as refusal:
        profiles.load(path)
    text = str(refusal.value)
    assert "\n" not in text
    assert str(path) in text
    assert "calibrate again" in text


def test_a_missing_profile_asks_for_calibration(tmp_path):
    """No file: calibrate first."""
    with pytest.raises(ProfileError, match="no such profile; calibrate first"):
        profiles.load(tmp_path / "none.json")
    (tmp_path / "blob").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileError, match="cannot be read"):
        profiles.load(tmp_path / "blob")


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_cost_is_a_number(value):
    """A latency below nothing, or none at all, is no latency."""
    with pytest.raises(ValueError, match="latency_s"):
        Link(bandwidth_bytes_per_s=1.0, latency_s=value)
    with pytest.raises(ValueError, match="backward_s"):
        section = make_profile(1).sections[0]
        msgspec.structs.replace(section, backward_s=(value,) * 3)


GRAPH = """node1 -- Input0 -- forward_compute_time=0.000, backward_compute_time=0.000, activation_size=0.0, parameter_size=0.000
node2 -- Linear(4, 4) -- forward_compute_time=1.500, backward_compute_time=2.500, activation_size=[64.0; 32.0], parameter_size=80.000
node3 -- ReLU -- forward_compute_time=0.500, backward_compute_time=0.500, activation_size=64.0, parameter_size=0.000
\tnode1 -- node2
\tnode2 -- node3
"""


def test_pipedream_profiles_are_imported():
    """Milliseconds become seconds, lists of sizes their sum, and the input is dropped."""
    graph = profiles.parse_pipedream(GRAPH)
    assert [node.name for node in graph.nodes] == ["node2", "node3"]
    assert graph.nodes[0].forward_s == pytest.approx(0.0015)
    assert graph.nodes[0].activation_bytes == 96
    assert graph.edges == ((0, 1),)
    chain = profiles.chain(graph, model="m", samples=8, network=network(), memory_bytes=1e9)
    assert [section.activation_bytes for section in chain.sections] == [12, 0]


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        (lambda text: text + "\tnode3 -- node2\n", "run in a circle"),
        (lambda text: text + "\tnode3 -- node9\n", "names node9, which is not there"),
        (lambda text: text.replace("1.500", "fast"), "line 2: .*fast"),
        (lambda text: text.replace("1.500", "-1.5"), "line 2: node2 has a cost below 0"),
        (lambda text: text + "what\n", "line 6: no node and no edge"),
        (lambda _: "", "0 layers"),
    ],
)
def test_a_bad_graph_is_refused_in_one_line(change, answer):
    """The line is named where there is one."""
    with pytest.raises(ProfileError, match=answer) as refusal:
        profiles.parse_pipedream(change(GRAPH))
    assert "\n" not in str(refusal.value)


def test_a_file_that_was_cut_off_at_the_end_of_a_line_is_refused():
    """Without its last edges the layers would be there, and would have nothing to say to each other."""
    with pytest.raises(ProfileError, match="no edge joins node3 to the other layers"):
        profiles.parse_pipedream(GRAPH[: GRAPH.rindex("\t")])


def test_a_layer_that_is_there_twice_is_refused():
    """Of two files in one the first would be forgotten."""
    with pytest.raises(ProfileError, match="line 2: node1 is there already"):
        profiles.parse_pipedream(GRAPH.splitlines()[0] + "\n" + GRAPH)


def test_all_measured_graphs_can_be_read(pipedream_profiles):
    """Every profile of the collection is a graph whose chain survives its text."""
    paths = sorted(pipedream_profiles.glob("*.txt"))
    assert len(paths) == 14
    for path in paths:
        graph = profiles.load_pipedream(path)
        chain = profiles.chain(
            graph, model=path.stem, samples=64, network=network(), memory_bytes=16e9
        )
        assert profiles.parse(render(chain)) == chain
