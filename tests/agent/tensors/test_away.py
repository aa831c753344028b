"""What stands in for parameters that are not here."""

import pytest
import torch

from agent.tensors.absent import computable, is_away, nothing


def test_complex_numbers_are_stood_in_for() -> None:
    """They are kept as pairs, since no state has them otherwise, and are seen as what they are while a loop is recorded."""
    model = torch.nn.Module()
    model.pairs = torch.nn.Parameter(torch.randn(4, 8, 2))
    model.pairs.data = nothing(model.pairs)
    with computable(model):
        assert torch.view_as_complex(model.pairs).abs().isfinite().all()
        assert model.pairs.untyped_storage().nbytes() == 8
    assert is_away(model.pairs)


def test_a_kernel_that_refuses_numbers_without_memory_gets_some() -> None:
    """A product by groups, of experts for one, looks at strides. What else is wrong with a call is told as ever."""
    model = torch.nn.Module()
    model.experts = torch.nn.Parameter(torch.randn(2, 8, 16))
    model.experts.data = nothing(model.experts)
    rows, ends = torch.ones(4, 8), torch.tensor([2, 4], dtype=torch.int32)
    with computable(model):
        found = torch.nn.functional.grouped_mm(rows, model.experts, offs=ends)
        assert found.shape == (4, 16) and found.isfinite().all()
        assert is_away(model.experts)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            torch.mm(rows, rows)
