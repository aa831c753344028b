"""The scripts of this folder: what is known of each kind, and how one is played alone.

Each file is a port, and has in it the original: `#-` stands before a line that the port leaves out,
and `#+` behind one that it adds.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from compiler import needs_compiler
from crews import Nursery

HERE = Path(__file__).parent
CHANGED_MAX = 8
ROUNDING = 2e-5


class Kind(msgspec.Struct, frozen=True):
    """How near a port comes to its original, and why not nearer."""

    # Of the trained weights, relative to the largest; None if the two draw or normalize by other batches.
    near: float | None = ROUNDING
    because: str = ""
    # What counts its steps; the step of the session also counts turns that train nothing.
    counts: str = "step"


DRAWS = "random numbers come from the streams of the microbatches"
NORMS = "a norm of batches sees microbatches"
GROWS = "two networks answer each other, and a processor's rounding grows in that"
KINDS = {
    "accelerate_loop": Kind(),
    "actor_critic": Kind(None, DRAWS),
    "bf16": Kind(),
    "char_gpt": Kind(),
    "compiled": Kind(),
    "conv_vae": Kind(None, DRAWS),
    "diffusion_ema": Kind(None, DRAWS),
    "dqn": Kind(None, DRAWS, "replica.version"),
    "early_stopping": Kind(),
    "ensemble": Kind(None, DRAWS),
    "equilibrium": Kind(None, DRAWS),
    "experts": Kind(None, DRAWS),
    "forward_forward": Kind(),
    "gan_parts": Kind(None, DRAWS),
    "imagenet": Kind(None, NORMS),
    "lbfgs": Kind(),
    "lightning_style": Kind(),
    "lookahead": Kind(),
    "moco": Kind(None, DRAWS),
    "pinn": Kind(),
    "ppo": Kind(None, DRAWS, "replica.version"),
    "pretrained": Kind(None, DRAWS),
    "progan": Kind(50 * ROUNDING, GROWS),
    "reinforce": Kind(None, DRAWS),
    "sam": Kind(None, DRAWS),
    "style": Kind(),
    "swa": Kind(None, NORMS),
    "td3": Kind(None, DRAWS, "replica.version"),
    "tensorboard": Kind(),
    "trainer_class": Kind(),
    "translation": Kind(None, DRAWS),
    "unfreezing": Kind(None, DRAWS),
    "weighted_sampler": Kind(None, DRAWS),
    "word_lstm": Kind(),
}
PLAYED = [
    pytest.param(kind, marks=needs_compiler) if kind == "compiled" else kind for kind in KINDS
]


def _lines(kind: str) -> list[str]:
    return (HERE / kind / "train.py").read_text().split("\n")


def original(kind: str) -> str:
    return "\n".join(x.removeprefix("#-") for x in _lines(kind) if not x.endswith("#+"))


def port(kind: str) -> str:
    lines = (line for line in _lines(kind) if not line.startswith("#-"))
    return "\n".join(x.removesuffix("#+").rstrip() if x.endswith("#+") else x for x in lines)


def changed(kind: str) -> list[str]:
    """The lines that a port has and its original has not."""
    return [line for line in _lines(kind) if line.endswith("#+") and line != "#+"]


class Player:
    """Plays scripts alone."""

    def __init__(self, nursery: Nursery) -> None:
        self._nursery = nursery

    def play(self, source: str, folder: Path) -> dict[str, Any]:
        """What a script of this text has in the end."""
        folder.mkdir(parents=True)
        script, out = folder / "script.py", folder / "out.pt"
        script.write_text(source)
        self._nursery.play([str(HERE / "player.py"), str(script), str(out)], folder)
        return torch.load(out, weights_only=False)
