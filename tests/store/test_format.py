"""The form of what is written: shares, safetensors files, manifests."""

from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_sink import MemorySink
from safetensors.numpy import load
from states import make_state, write_state

from agent.store.archive import assemble
from agent.store.encoding.format import Manifest, decode, encode, file_of, lay_out, share
from agent.store.errors import Damaged
from agent.store.places.sinks import check_key

seeds = st.integers(0, 10**6)


@given(st.integers(0, 10**7), st.integers(1, 300))
def test_shares_cover_every_byte_once(total, holders):
    """The ranges of all holders follow each other from 0 to the end, and differ by a line at most."""
    ranges = [share(total, holders, at) for at in range(holders)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == total
    assert all(one[1] == two[0] for one, two in pairwise(ranges))
    sizes = [end - start for start, end in ranges]
    assert max(sizes) - min(sizes) <= 128


@given(seeds, st.integers(1, 5))
def test_every_part_is_a_plain_safetensors_file(seed, holders):
    """The safetensors library reads each part; put together, its tensors are the layer's bytes."""
    state, sink = make_state(seed), MemorySink()
    manifest = write_state(sink, state, holders=holders)
    for layer, data in state.items():
        whole = b""
        for part in manifest.parts:
            if part.layer == layer.name:
                entries = msgspec.json.decode(sink.get(part.key)[8 : part.header_bytes])
                entries.pop("__metadata__")
                _check_readable(sink.get(part.key), entries)
                whole += sink.get(part.key)[part.header_bytes :]
                assert check_key(part.key)
        assert whole == data


def _check_readable(data, entries):
    """bfloat16 is unknown to numpy, so files that hold it are not given to this reader."""
    if all(entry["dtype"] != "BF16" for entry in entries.values()):
        tensors = load(data)
        assert set(tensors) == set(entries)
        for name, entry in entries.items():
            start, end = entry["data_offsets"]
            assert tensors[name].tobytes() == data[len(data) - _body(entries) :][start:end]


def _body(entries):
    return max((entry["data_offsets"][1] for entry in entries.values()), default=0)


def test_a_tensor_that_is_cut_is_named_by_its_elements():
    """Two holders of one tensor: each file says which elements it has."""
    layer = lay_out("block", [("m/w", "F32", (8, 8))])
    data = np.arange(64, dtype=np.float32)
    files = [
        file_of(layer, 7, low, high, [data.tobytes()[low:high]])
        for low, high in (share(256, 2, at) for at in (0, 1))
    ]
    loaded = [load(b"".join(bytes(piece) for piece in file.pieces)) for file in files]
    assert [list(item) for item in loaded] == [["m/w[0:32]"], ["m/w[32:64]"]]
    assert np.array_equal(np.concatenate([*loaded[0].values(), *loaded[1].values()]), data)


@given(seeds, st.integers(0, 10**9), st.integers(0, 7))
def test_a_manifest_with_any_byte_changed_is_damaged(seed, place, bit):
    """Flip a byte anywhere in a manifest, or cut it anywhere: it is not taken for one."""
    manifest = write_state(MemorySink(), make_state(seed))
    text = encode(manifest)
    assert decode(text, manifest.key) == manifest
    at = place % len(text)
    flipped = bytearray(text)
    flipped[at] ^= 1 << bit
    for wrong in (bytes(flipped), text[:at]):
        with pytest.raises(Damaged):
            decode(wrong, manifest.key)


def test_a_manifest_under_another_name_is_damaged():
    """A manifest that was copied to another version's place does not pass for that version."""
    manifest = write_state(MemorySink(), make_state(1))
    with pytest.raises(Damaged, match="holds the manifest"):
        decode(encode(manifest), "manifests/0000000002-0000000001.json")


@given(seeds, st.data())
def test_a_state_with_a_part_missing_cannot_be_assembled(seed, data):
    """Take any part away, or give a layer that nobody wrote: there is no manifest of that."""
    state = make_state(seed, layers=4)
    manifest = write_state(MemorySink(), state)
    if manifest.parts:
        gone = data.draw(st.sampled_from(manifest.parts))
        rest = [part for part in manifest.parts if part != gone]
        with pytest.raises(Damaged, match="not whole"):
            assemble("job", 1, 1, state, rest)
        with pytest.raises(Damaged, match="unknown layers"):
            others = [layer for layer in state if layer.name != gone.layer]
            assemble("job", 1, 1, others, manifest.parts)


def test_holders_that_disagree_are_found():
    """Two holders that describe one layer differently do not make one state."""
    one = lay_out("block", [("m/w", "F32", (4,))])
    two = lay_out("block", [("m/w", "I32", (4,))])
    with pytest.raises(Damaged, match="two holders disagree about layer block"):
        assemble("job", 1, 1, [one, two], [])


def test_what_was_written_before_sums_were_aligned_is_read_where_there_are_none():
    """The state itself lies as it did."""
    assert Manifest(job="job", version=3, generation=1, layers=(), parts=(), format=1).version == 3
    with pytest.raises(ValueError, match="format 1"):
        Manifest(job="job", version=3, generation=1, layers=(), parts=(), redo=1, format=1)
