"""Scripts as people write them, and their ports, played alone: what a port costs, and what it trains."""

import pytest
import torch
from kinds import CHANGED_MAX, HERE, KINDS, PLAYED, changed, original, port


def test_every_kind_is_known():
    assert {path.parent.name for path in HERE.glob("*/train.py")} == KINDS.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_a_port_changes_few_lines(kind):
    """Lines that are new in the port; what is only taken out costs nothing."""
    assert 0 < len(changed(kind)) <= CHANGED_MAX, "\n".join(changed(kind))


@pytest.mark.parametrize("kind", PLAYED)
def test_a_port_trains_what_its_original_trains(kind, player, tmp_path):
    """In the order of the data set, so that both see the same batches."""
    plain, ported = (
        player.play(source.replace("shuffle=True", "shuffle=False"), tmp_path / name)
        for name, source in (("plain", original(kind)), ("train", port(kind)))
    )
    assert [each.shape for each in plain["trained"]] == [each.shape for each in ported["trained"]]
    near = KINDS[kind].near
    for one, other in zip(plain["trained"], ported["trained"], strict=True):
        assert other.isfinite().all()
        if near is not None:
            most = max(float(one.abs().max()), 1e-3)
            torch.testing.assert_close(one, other, rtol=0.0, atol=near * most)
