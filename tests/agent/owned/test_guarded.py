"""What goes on from one parameter to the next, where those without a gradient are left out."""

import ast
from textwrap import dedent

import pytest
import torch

from agent.owned.guarded import going_on, misses

FOUND = {
    "torch.randn_like(p.grad)": """
        for p in model.parameters():
            if p.grad is not None and p.requires_grad:
                p.grad.add_(torch.randn_like(p.grad), alpha=0.1)
        """,
    "torch.randn(p.shape)": """
        for p in model.parameters():
            if p.grad is None:
                continue
            p.data.add_(torch.randn(p.shape))
        """,
    "torch.empty_like(p).normal_()": """
        params = [p for p in model.parameters() if p.grad is not None]
        for p in params:
            p.grad.add_(torch.empty_like(p).normal_())
        """,
    "random.gauss(0, 1)": """
        def noise(p):
            if p.grad is None:
                return None
            return random.gauss(0, 1)
        """,
    "np.random.normal(size=p.shape)": """
        all_noise = [np.random.normal(size=p.shape) for p in model.parameters() if p.grad is not None]
        """,
    "rand_like(p)": """
        for p in filter(lambda p: p.grad is not None, model.parameters()):
            p.grad.mul_(rand_like(p))
        """,
    "torch.rand(())": """
        scales = [torch.rand(()) if p.grad is not None else 1 for p in model.parameters()]
        """,
    "torch.randn(p.shape, generator=stream)": """
        stream = torch.Generator().manual_seed(step)
        for p in model.parameters():
            if p.grad is not None:
                p.grad.add_(torch.randn(p.shape, generator=stream))
        """,
    "total += p.norm()": """
        for p in model.parameters():
            if p.grad is not None:
                total += p.norm()
        """,
}
RIGHT = {
    "each in its place": """
        for p in model.parameters():
            if p.grad is not None:
                p.grad.clamp_(-1, 1)
        torch.randn(3)
        """,
    "drawn for all": """
        for p in model.parameters():
            noise = torch.randn(p.shape)
            if p.grad is not None:
                p.grad.add_(noise)
        """,
    "counted for all": """
        for i, p in enumerate(model.parameters()):
            count += p.numel()
            if p.grad is None:
                print(i)
        """,
    "a count of its own": """
        for p in model.parameters():
            if p.grad is not None:
                scale = 1.0
                scale += p.numel()
        """,
    "a stream for each": """
        for i, p in enumerate(model.parameters()):
            if p.grad is not None:
                stream = torch.Generator().manual_seed(i)
                p.grad.add_(torch.randn(p.shape, generator=stream))
        """,
}


def found(text: str) -> list[str]:
    return [ast.unparse(each) for each in going_on(ast.walk(ast.parse(dedent(text))))]


@pytest.mark.parametrize("what", FOUND)
def test_what_is_left_out_changes_what_comes_behind_it(what: str) -> None:
    assert what in found(FOUND[what])


@pytest.mark.parametrize("what", RIGHT)
def test_what_is_the_same_for_all(what: str) -> None:
    assert found(RIGHT[what]) == []


def test_who_misses_a_gradient_is_known() -> None:
    """However something is done to it; what lacks anything else is the script's own."""
    param, other = torch.nn.Parameter(torch.zeros(1)), None
    with pytest.raises(AttributeError) as called:
        param.grad.mul_(2)
    with pytest.raises(TypeError) as added:
        param.grad += 1.0
    with pytest.raises(TypeError) as without:
        other += 1.0
    assert [misses(each.value) for each in (called, added, without)] == [True, True, False]
