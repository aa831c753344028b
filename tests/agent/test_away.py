"""What stands in for parameters that are not here."""

import torch

from agent.away import computable, is_away, nothing


def test_complex_numbers_are_stood_in_for() -> None:
    """They are kept as pairs, since no state has them otherwise, and are seen as what they are while a loop is recorded."""
    model = torch.nn.Module()
    model.pairs = torch.nn.Parameter(torch.randn(4, 8, 2))
    model.pairs.data = nothing(model.pairs)
    with computable(model):
        assert torch.view_as_complex(model.pairs).abs().isfinite().all()
        assert model.pairs.untyped_storage().nbytes() == 8
    assert is_away(model.pairs)
