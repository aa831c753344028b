"""Plain values come back exactly, and what is not plain is named."""

import base64
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent.errors import StateError
from agent.store.encoding.plain import Unsavable, described, packed, unpacked
from agent.store.encoding.sharing import Sharing


def again(value, here=None):
    state = packed(value)
    copied = {
        key: [t.clone() for t in item] if isinstance(item, list) else item
        for key, item in state.items()
    }
    return unpacked(copied, here)


def same(one, other):  # noqa: PLR0911 - one line per kind
    """Equal in value and in type, to the bit and at any depth."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return np.float64(one).tobytes() == np.float64(other).tobytes()
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, np.ndarray):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same(a, b) for a, b in zip(one.items(), other.items(), strict=True)
        )
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.text(alphabet=st.characters(categories=["Cs"]))
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
KEYS = st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.none()
KEYS |= st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=24)
        | st.lists(inner, max_size=4).map(tuple)
        | st.lists(inner, max_size=4).map(deque)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.lists(st.tuples(st.integers(), st.floats()), min_size=15, max_size=18)
        | st.sets(st.integers() | st.text())
    ),
    max_leaves=40,
)


@given(VALUES)
def test_any_plain_value_comes_back_exactly(value):
    assert same(again(value), value)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 300, 70_000])
@pytest.mark.parametrize(
    "odd", [None, True, 3, -0.0, math.nan, math.inf, 1 << 70, "x", (1,), [1.0]]
)
def test_a_long_list_with_one_odd_element_comes_back_exactly(count, odd):
    for place in {0, count // 2, count - 1}:
        history = [0.5 * at for at in range(count)]
        history[place] = odd
        assert same(again(history), history)


@pytest.mark.parametrize("row", [(1, 0.5), [1, 0.5], {"step": 1, "loss": 0.5}])
def test_rows_come_back_exactly(row):
    rows = [type(row)(row) for _ in range(50)]
    assert same(again(rows), rows)
    rows[7] = None
    assert same(again(rows), rows)


def test_a_number_that_is_a_bool_stays_one():
    found = again({"a": True, 1: 1, "flags": [True] * 40 + [1]})
    assert found["a"] is True
    assert found["flags"][0] is True
    assert type(found["flags"][-1]) is int


def test_what_is_in_two_places_is_one_thing_again():
    rows = [{"loss": 0.1} for _ in range(20)]
    shared, tensor = [1], torch.ones(2)
    value = {"a": shared, "b": shared, "t": tensor, "u": tensor, "rows": rows, "last": rows[-1]}
    value["me"] = [value["a"]]
    found = again(value)
    assert found["a"] is found["b"] is found["me"][0]
    assert found["t"] is found["u"]
    assert found["last"] is found["rows"][-1]
    same_row = [shared] * 20
    assert len({*map(id, again(same_row))}) == 1


def test_what_contains_itself_comes_back():
    value = [1]
    value.append(value)
    found = again(value)
    assert found[1] is found


def test_containers_of_the_standard_library_keep_their_kinds():
    value = {
        "deque": deque([1, 2], maxlen=3),
        "ordered": OrderedDict(b=1, a=2),
        "counter": Counter("aab"),
        "default": defaultdict(list, {"x": [1]}),
        "set": {"a", 1, (2, None)},
        "frozen": frozenset([1.5]),
        "bytes": bytearray(b"x"),
    }
    found = again(value)
    assert same(found, value)
    assert found["deque"].maxlen == 3
    assert found["default"]["new"] == []


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_keep_type_shape_and_whether_they_want_gradients(dtype, shape):
    tensor = torch.ones(shape).to(dtype)
    assert same(again([tensor])[0], tensor)
    if dtype.is_floating_point:
        assert again({"w": tensor.requires_grad_()})["w"].requires_grad


@pytest.mark.parametrize("kind", ["float32", "float64", "int8", "int64", "bool", "float16"])
def test_numpy_arrays_and_scalars_come_back_as_such(kind):
    array = np.arange(6).reshape(2, 3).astype(kind)
    assert same(again({"a": array})["a"], array)
    assert same(again(array[:, ::-1]), np.ascontiguousarray(array[:, ::-1]))
    if kind != "float64":
        assert same(again([array[0, 1]])[0], array[0, 1])


def test_a_numpy_float64_comes_back_as_the_number_that_it_is():
    assert same(again([np.float64(0.1)] * 30), [0.1] * 30)


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: np.random.default_rng(3), lambda rng: rng.normal()),
        (lambda: np.random.Generator(np.random.MT19937(3)), lambda rng: rng.normal()),
        (lambda: np.random.Generator(np.random.SFC64(3)), lambda rng: rng.integers(1 << 30)),
        (lambda: np.random.RandomState(3), lambda rng: rng.normal()),
        (lambda: random.Random(3), lambda rng: rng.gauss(0, 1)),
        (lambda: torch.Generator().manual_seed(3), lambda rng: torch.rand(1, generator=rng).item()),
    ],
)
def test_a_stream_of_random_numbers_goes_on_where_it_was(make, draw):
    """In the object that is here, which an environment may have handed on, or in a new one."""
    stream = make()
    draw(stream)
    state = packed([stream, {"again": stream}])
    wanted = [draw(stream) for _ in range(3)]
    here = make()
    for found in (unpacked(state, [here, {}]), unpacked(state)):
        assert found[1]["again"] is found[0]
        assert type(found[0]) is type(stream)
        assert [draw(found[0]) for _ in range(3)] == wanted
    assert unpacked(state, [here, {}])[0] is here


class OwnBits(np.random.PCG64):
    """Of a library, for instance."""


def test_a_stream_that_could_not_be_made_again_is_refused():
    with pytest.raises(Unsavable, match="OwnBits, which nothing here can make"):
        packed([np.random.Generator(OwnBits(3))])
    state = packed([np.random.default_rng(3)])
    sound = base64.b64decode(state["~values"])
    state["~values"] = base64.b64encode(sound.replace(b"numpy PCG64", b"numpy bytes")).decode()
    with pytest.raises(StateError, match="'numpy bytes' is no stream"):
        unpacked(state)


def test_the_streams_of_the_process_are_left_to_the_session():
    """Which seeds them in every step; a state that was loaded does not move them."""
    own = [np.random.mtrand._rand, random._inst, torch.default_generator]
    state = packed(own)
    before = random.getstate()
    random.random()
    assert unpacked(state, [*own]) == own
    assert random.getstate() != before


def test_sets_are_written_in_one_order():
    one, other = {"a", "b", "c", "d"}, {"d", "c", "b", "a"}
    assert packed(one) == packed(other)


def test_what_is_here_is_filled_in_its_place():
    here = {"list": [0], "dict": {"x": 1, "old": 2}, "t": torch.zeros(2), "wide": torch.zeros(3)}
    kept = dict(here)
    found = again(
        {"list": [1, 2], "dict": {"y": 3}, "t": torch.ones(2), "wide": torch.ones(2)}, here
    )
    assert found is here
    assert found["list"] is kept["list"] == [1, 2]
    assert found["dict"] is kept["dict"] == {"y": 3}
    assert found["t"] is kept["t"]
    assert found["wide"].shape == (2,)
    assert kept["t"].tolist() == [1, 1]


def test_a_row_of_the_data_is_not_written_to():
    """Else the data of this worker would change, and only its own."""
    data = torch.arange(6.0)
    here = {"last": data[2], "in a list": [data[3]]}
    found = again({"last": data[4], "in a list": [data[5]]}, here)
    assert found["last"] is here["last"]
    assert same(found, {"last": torch.tensor(4.0), "in a list": [torch.tensor(5.0)]})
    assert data.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("order", [("flat", "part"), ("part", "flat")])
def test_a_part_of_a_memory_stays_one_and_another_part_is_let_go(order):
    """A parameter of a flat vector stays in it; the newest row of a table is another one here."""

    def state(first, row):
        flat = torch.arange(first, first + 4)
        value = {"flat": flat, "part": [flat[:2], flat[row], flat.view(2, 2)]}
        return {key: value[key] for key in order}

    saved, here = state(10, 3), state(0, 2)
    found = again(saved, here)
    assert same(found, saved)
    found["flat"].zero_()
    assert found["part"][0].tolist() == [0, 0]
    assert found["part"][1].item() == 13
    assert found["part"][2].tolist() == [[0, 0], [0, 0]]


def test_two_lists_are_not_filled_into_one_that_is_here_twice():
    shared = [0]
    found = again({"a": [1], "b": [2]}, {"a": shared, "b": shared})
    assert found == {"a": [1], "b": [2]}


class Plain:
    pass


@pytest.mark.parametrize(
    ("value", "path", "what"),
    [
        (
            {"net": {"x": torch.nn.Conv2d(1, 1, 1)}},
            '["net"]["x"]',
            "is a Conv2d: give it to Session",
        ),
        ({"h": [1, (2, object())]}, '["h"][1][1]', "is a object: keep numbers"),
        ({"h": [0.5] * 99 + [Plain()]}, '["h"][99]', "is a Plain"),
        ({1: lambda: 0}, "[1]", "is a function"),
        ({Plain: 1}, "'s key <class", "is a type"),
        ({torch.nn.Linear(1, 1): 1}, "'s key Linear(", "take its name, as named_modules() and"),
        ({torch.nn.Parameter(torch.ones(1)): 1}, "'s key Param", "take its name, as named_modules"),
        (
            {"w": torch.nn.Parameter(torch.zeros(1))},
            '["w"]',
            "is a Parameter: put it into a module",
        ),
        ({"l": torch.ones(1, requires_grad=True) * 2}, '["l"]', "still has its graph"),
        ({"s": torch.eye(2).to_sparse()}, '["s"]', "sparse"),
        ({"c": torch.zeros(1, dtype=torch.complex64)}, '["c"]', "view_as_real"),
        ({"m": torch.zeros(1, device="meta")}, '["m"]', "on meta"),
        ({"d": defaultdict(lambda: 0)}, '["d"]', "is a defaultdict of"),
        ({"o": np.array(["a"])}, '["o"]', "is a ndarray of <U1"),
        ({"o": np.array([object()])}, '["o"]', "is a ndarray of object"),
        ([iter([])], "[0]", "is a list_iterator"),
    ],
)
def test_what_cannot_be_saved_is_named_with_its_place(value, path, what):
    with pytest.raises(Unsavable) as raised:
        packed(value)
    assert raised.value.path.startswith(path)
    assert what in raised.value.what


def test_a_value_that_is_nested_too_deep_is_refused():
    value = []
    for _ in range(500):
        value = [value]
    with pytest.raises(Unsavable, match="nested more than"):
        packed(value)


class Row(NamedTuple):
    """As the rows of a replay memory are."""

    seen: np.ndarray
    reward: float


def test_a_named_tuple_comes_back_as_one_of_its_class() -> None:
    (row,) = again([Row(np.ones(2), 0.5)])
    assert type(row) is Row
    assert same([*row], [np.ones(2), 0.5])
    state = packed(Row(np.ones(2), 0.5))
    assert same(described(state)[1], 0.5)


def test_one_thing_in_two_objects_stays_one() -> None:
    """Else the state of a worker that has loaded it would be of other things than that of the rest."""
    now, seen = np.arange(3.0), [1, 2]
    objects = {"a": [{"last": now}, seen], "b": [(now, 0.0), now, seen, torch.ones(1)]}
    for _ in range(2):
        writing, states = Sharing(), {}
        for key, thing in objects.items():
            with writing.of(key):
                states[key] = packed(thing)
        assert same(described(states["b"]), objects["b"])
        reading = Sharing()
        for key, state in states.items():
            with reading.of(key):
                objects[key] = unpacked(state)
        one, other = objects["a"], objects["b"]
        assert one[0]["last"] is other[0][0] is other[1]
        assert one[1] is other[2]
        assert same(other, [(np.arange(3.0), 0.0), np.arange(3.0), [1, 2], torch.ones(1)])
