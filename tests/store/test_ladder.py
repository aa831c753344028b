"""From which copies everyone goes on: always one version, never an older one than need be."""

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from agent.store.ladder import Recovery, Rung, Source, recover


def whole(rung, version, holder="h", reaches=-1, **layers):
    holds = {name: ((0, size),) for name, size in layers.items()}
    return Source(rung=rung, holder=holder, version=version, reaches=reaches, holds=holds)


def rungs_of(recovery, sources):
    return {pick.layer: sources[pick.source].rung for pick in recovery.picks}


def test_the_best_rung_of_the_same_version_is_taken():
    """Of five whole copies of one version, each rung is taken when those above it are gone."""
    sources = [whole(rung, 7, a=100) for rung in reversed(Rung)]
    for best in Rung:
        left = [source for source in sources if source.rung >= best]
        found = recover({"a": 100}, left, committed=7)
        assert found.version == 7
        assert rungs_of(found, left) == {"a": best}
        assert best.words in found.because


def test_a_committed_step_is_worth_more_than_a_fast_copy():
    """Object storage with the newest version goes before a peer's memory with an older one."""
    sources = [whole(Rung.PEER, 6, a=10), whole(Rung.OBJECT, 7, a=10)]
    found = recover({"a": 10}, sources, committed=7)
    assert (found.version, rungs_of(found, sources)) == (7, {"a": Rung.OBJECT})


def test_the_redo_log_lets_the_backup_meet_the_survivors():
    """A lost layer comes from the backup and is rolled forward to where the others are."""
    sources = [whole(Rung.LIVE, 9, a=10), whole(Rung.BACKUP, 5, reaches=9, a=10, b=10)]
    found = recover({"a": 10, "b": 10}, sources, committed=9)
    assert found.version == 9
    assert rungs_of(found, sources) == {"a": Rung.LIVE, "b": Rung.BACKUP}
    assert "up to 4 steps applied again from their sums" in found.because


def test_without_a_log_all_meet_at_the_version_that_the_backup_holds():
    """Survivors go back to their host copy of the backup's version, and the loss is said."""
    sources = [
        whole(Rung.LIVE, 9, a=10),
        whole(Rung.PEER, 5, a=10),
        whole(Rung.BACKUP, 5, b=10),
    ]
    found = recover({"a": 10, "b": 10}, sources, committed=9)
    assert found.version == 5
    assert rungs_of(found, sources) == {"a": Rung.PEER, "b": Rung.BACKUP}
    assert "4 committed steps are lost, since nobody holds byte 0 of layer b" in found.because


def test_equal_copies_share_the_work():
    """Four replicas each give a quarter of the layer."""
    sources = [whole(Rung.LIVE, 3, holder=str(at), a=4096) for at in range(4)]
    picks = recover({"a": 4096}, sources, committed=3).picks
    assert [(pick.start, pick.end, pick.source) for pick in picks] == [
        (0, 1024, 0),
        (1024, 2048, 1),
        (2048, 3072, 2),
        (3072, 4096, 3),
    ]


def test_shares_of_many_peers_make_one_layer():
    """Each peer's memory has its own share; what one lacks comes from the rung below."""
    parts = [(0, 40), (40, 80), (80, 100)]
    sources = [
        Source(rung=Rung.PEER, holder=str(at), version=3, holds={"a": (part,)})
        for at, part in enumerate(parts[:2])
    ]
    sources.append(whole(Rung.DISK, 3, a=100))
    found = recover({"a": 100}, sources, committed=3)
    assert [(pick.start, pick.end, pick.source) for pick in found.picks] == [
        (0, 40, 0),
        (40, 80, 1),
        (80, 100, 2),
    ]


def test_what_was_never_committed_is_not_looked_at():
    """A copy that is ahead of the commit does not pull the others there."""
    sources = [whole(Rung.LIVE, 8, a=10), whole(Rung.DISK, 4, a=10)]
    assert recover({"a": 10}, sources, committed=7).version == 4


def test_nothing_anywhere_starts_anew():
    """Without a whole copy there is no version, and the reason names what is missing."""
    assert recover({"a": 10}, [], committed=3) == Recovery(
        version=None, picks=(), because="training starts anew: nothing holds any of it"
    )
    found = recover({"a": 10, "b": 10}, [whole(Rung.DISK, 3, a=10)], committed=3)
    assert found.version is None
    assert "byte 0 of layer b at version 3" in found.because


def test_every_mix_of_rungs_and_versions_for_two_layers():
    """All 5^4 x 2^4 ways in which two layers have two copies each: the rule, checked by search."""
    for rungs in product(Rung, repeat=4):
        for versions in product((1, 2), repeat=4):
            sources = [
                whole(rung, version, holder=str(at), **{"ab"[at % 2]: 64})
                for at, (rung, version) in enumerate(zip(rungs, versions, strict=True))
            ]
            found = recover({"a": 64, "b": 64}, sources, committed=2)
            common = {1, 2}
            for at in (0, 1):
                common &= {versions[at], versions[at + 2]}
            assert found.version == max(common, default=None)
            for pick in found.picks:
                able = [
                    source.rung
                    for source in sources
                    if pick.layer in source.holds and source.version == found.version
                ]
                assert sources[pick.source].rung == min(able)


ranges = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda both: tuple(sorted(both)))
holdings = st.dictionaries(
    st.sampled_from("abc"), st.lists(ranges, max_size=3).map(tuple), max_size=3
)
drawn = st.builds(
    lambda rung, version, more, holds: Source(
        rung=rung, holder="h", version=version, reaches=version + more, holds=holds
    ),
    st.sampled_from(Rung),
    st.integers(0, 5),
    st.integers(0, 2),
    holdings,
)


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 12), min_size=1),
    st.lists(drawn, max_size=8),
    st.integers(0, 6),
)
def test_the_decision_against_plain_search(layers, sources, committed):
    """For drawn copies: every byte once, from the best rung there is, at the newest version there is."""

    def holders(layer, byte, version):
        return [
            source
            for source in sources
            if source.version <= version <= source.newest
            and any(low <= byte < high for low, high in source.holds.get(layer, ()))
        ]

    possible = [
        version
        for version in range(committed + 1)
        if any(source.version <= version <= source.newest for source in sources)
        and all(holders(layer, at, version) for layer in layers for at in range(layers[layer]))
    ]
    found = recover(layers, sources, committed)
    assert found.version == max(possible, default=None)
    if found.version is None:
        return
    given_bytes = [
        (pick.layer, at, sources[pick.source])
        for pick in found.picks
        for at in range(pick.start, pick.end)
    ]
    expected = sorted((layer, at) for layer in layers for at in range(layers[layer]))
    assert sorted((layer, at) for layer, at, _ in given_bytes) == expected
    for layer, at, source in given_bytes:
        assert source in holders(layer, at, found.version)
        assert source.rung == min(other.rung for other in holders(layer, at, found.version))
