"""A model with complex weights, as those of Fourier neural operators: the bits are those of one process."""

from pathlib import Path

import pytest
from crews import Crew, ends_alike_in_two

pytestmark = pytest.mark.processes

STEPS = 20
SCRIPT = f"""
import sys
import warnings
import torch
from torch import nn
from orchestrator import Session
warnings.simplefilter("ignore")  # of strides of gradients, by torch
torch.manual_seed(0)
class Spectral(nn.Module):
    def __init__(self, width, modes):
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.rand(width, width, modes, dtype=torch.cfloat) / width**2)
        self.register_buffer("turn", torch.polar(torch.ones(modes), torch.arange(float(modes))).conj())
        self.beside = nn.Conv1d(width, width, 1)
    def forward(self, x):
        found = torch.fft.rfft(x)
        out = torch.zeros_like(found)
        taken = found[..., : self.modes] * self.turn
        out[..., : self.modes] = torch.einsum("bix,iox->box", taken, self.weight)
        return torch.tanh(torch.fft.irfft(out, n=x.size(-1)) + self.beside(x))
model = nn.Sequential(nn.Conv1d(1, 6, 1), Spectral(6, 4), Spectral(6, 4), Spectral(6, 4), nn.Conv1d(6, 1, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session = Session(model, optimizer, microbatches=4)
def batches(step):
    rows = torch.Generator().manual_seed(step)
    return [torch.randn(4, 1, 16, generator=rows) for _ in range(4)]
for step in session.steps({STEPS}):
    result = session.backward(lambda x: (model(x) - x.cumsum(-1)).square().mean(), batches(step))
    norm = session.clip_grad_norm_(0.5)
    optimizer.step()
    if session.leader:
        print(f"step {{step}} loss {{result.loss!r}} norm {{norm.item()!r}}")
if session.leader:
    torch.save(model.state_dict(), sys.argv[1])
"""


def test_complex_weights_are_summed_saved_and_cut(crew: Crew, tmp_path: Path) -> None:
    """Clipped by their norm as well, where each worker has those of its own layers only."""
    ends_alike_in_two(crew, SCRIPT, tmp_path, STEPS)
