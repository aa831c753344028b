"""Whoever wrote it, anybody reads it: only what is wanted, and never what is not as it was written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_sink import MemorySink
from states import make_state, read_state, tensors_of, write_state

from agent.store.encoding.format import BLOCK_BYTES, file_of, lay_out
from agent.store.errors import Damaged
from agent.store.reading import Index, Want, read

seeds = st.integers(0, 10**6)


class Counting(MemorySink):
    """A memory sink that notes how much is read of it."""

    def __init__(self):
        super().__init__()
        self.ranges = []

    def open(self, key):
        manager = super().open(key)
        owner = self

        class Opened:
            def __enter__(self):
                read = manager.__enter__()

                def counted(offset, views):
                    owner.ranges.append((offset, sum(view.nbytes for view in views)))
                    read(offset, views)

                return counted

            def __exit__(self, *why):
                return manager.__exit__(*why)

        return Opened()


@given(seeds, st.integers(1, 6), st.integers(1, 4))
def test_what_any_number_of_holders_wrote_is_read_whole(seed, holders, threads):
    """States of drawn shapes, written by 1 to 6 holders, come back byte for byte."""
    state, sink = make_state(seed, most=20_000), MemorySink()
    manifest = write_state(sink, state, holders=holders)
    assert read_state(sink, manifest, threads) == tensors_of(state)


@given(seeds, st.data())
def test_any_ranges_can_be_wanted(seed, data):
    """Drawn ranges of a layer of several blocks, overlapping or not, land where they should."""
    layer = lay_out("block", [("m/w", "U8", (3 * BLOCK_BYTES + 1000,)), ("m/v", "F64", (500,))])
    whole = bytes((at * 31 + seed) % 251 for at in range(1009)) * (layer.layer_bytes // 1009 + 1)
    whole = whole[: layer.layer_bytes]
    sink = MemorySink()
    manifest = write_state(sink, {layer: whole}, holders=data.draw(st.integers(1, 3)))
    ends = st.integers(0, layer.layer_bytes)
    ranges = data.draw(st.lists(st.tuples(ends, ends).map(sorted), min_size=1, max_size=6))
    places = [bytearray(high - low) for low, high in ranges]
    wants = [
        Want(layer="block", start=low, into=memoryview(place))
        for (low, _), place in zip(ranges, places, strict=True)
    ]
    read(sink, manifest, wants)
    assert places == [whole[low:high] for low, high in ranges]


def test_only_the_blocks_that_are_wanted_are_read():
    """A small tensor in a large part costs the blocks that it lies in, not the part."""
    forms = [("m/a", "U8", (40 * BLOCK_BYTES,)), ("m/b", "U8", (10,))]
    layer = lay_out("block", forms)
    sink = Counting()
    manifest = write_state(sink, {layer: bytes(layer.layer_bytes)}, holders=1)
    count = read(sink, manifest, [Index([layer]).want("m/b", memoryview(bytearray(10)))])
    assert count <= 2 * BLOCK_BYTES
    assert sum(length for _, length in sink.ranges) == count


@given(seeds, st.data())
def test_any_change_to_any_file_is_found(seed, data):
    """Flip a byte, cut or remove any file: a full read says damaged, headers included."""
    state, sink = make_state(seed), MemorySink()
    manifest = write_state(sink, state)
    if not manifest.parts:
        return
    part = data.draw(st.sampled_from(manifest.parts))
    content = bytearray(sink.get(part.key))
    at = data.draw(st.integers(0, len(content) - 1))
    how = data.draw(st.sampled_from(["flip", "cut", "remove"]))
    sink.delete([part.key])
    if how == "flip":
        content[at] ^= 1 << data.draw(st.integers(0, 7))
        sink.put(part.key, [content])
    elif how == "cut":
        sink.put(part.key, [content[:at]])
    with pytest.raises(Damaged):
        read_state(sink, manifest)


def test_every_sink_gives_the_same_state(sink):
    """What was written to any sink is read from it whole, and damage in it is found."""
    layer = lay_out("block", [("m/a", "U8", (3 * BLOCK_BYTES,)), ("m/b", "F32", (100, 3))])
    state = {layer: bytes(range(256)) * (layer.layer_bytes // 256) + bytes(layer.layer_bytes % 256)}
    manifest = write_state(sink, state)
    assert read_state(sink, manifest) == tensors_of(state)
    part = manifest.parts[1]
    content = bytearray(sink.get(part.key))
    content[BLOCK_BYTES // 2] ^= 4
    sink.delete([part.key])
    sink.put(part.key, [content])
    with pytest.raises(Damaged, match="checksum"):
        read_state(sink, manifest)


def test_a_tensor_under_an_alias_is_found_by_both_names():
    """Tied tensors are stored once and can be wanted by every name."""
    layer = lay_out("block", [("m/a", "U8", (4,))], aliases={"m/tied": "m/a"})
    other = file_of(layer, 1, 0, 4, [b"abcd"])
    sink = MemorySink()
    sink.put(other.part.key, other.pieces)
    manifest = write_state(sink, {layer: b"abcd"}, holders=1)
    place = bytearray(4)
    read(sink, manifest, [Index([layer]).want("m/tied", memoryview(place))])
    assert place == b"abcd"
    with pytest.raises(Damaged, match="no tensor m/other"):
        Index([layer]).want("m/other", memoryview(place))
    with pytest.raises(Damaged, match="has 4 bytes, not 3"):
        Index([layer]).want("m/a", memoryview(place)[:3])
