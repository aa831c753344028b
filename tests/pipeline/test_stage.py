"""What a stage keeps of a microbatch between its forward and its backward."""

import weakref

import pytest
import torch
from playing import MODELS, graph_of

from agent.pipeline.cut import build
from agent.pipeline.examine import cut_points
from agent.pipeline.stage import Stage


class Kept:
    """Stands in a graph for a tensor that is saved for the backward. Its own graph would make a circle."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()


@pytest.mark.parametrize("model", MODELS)
def test_what_will_be_recomputed_keeps_no_activations(model):
    """A forward without `keep` has let go of its graph when it ends, one with `keep` has not."""
    graph, facts, example = graph_of(*MODELS[model])
    places = [point.after for point in cut_points(facts)]
    piece, *_ = build(graph, facts, [places[len(places) // 2]])
    for keep in (False, True):
        stage = Stage(piece, microbatches=1)
        saved: list[weakref.ref[Kept]] = []

        def pack(tensor: torch.Tensor, saved=saved) -> Kept:
            kept = Kept(tensor)
            saved.append(weakref.ref(kept))
            return kept

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
            stage.forward(0, None, example, keep=keep)
        assert saved
        assert any(each() is not None for each in saved) == keep
