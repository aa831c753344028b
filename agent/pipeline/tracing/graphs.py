"""A recording of a script's step: the graphs of its loss, and what they came from."""

import hashlib
import operator
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import fx

from agent.errors import CannotRecord
from agent.pipeline.flatten import Form, apart, shown
from agent.pipeline.tracing.analysis import Facts
from agent.pipeline.tracing.closures.closure import Closure
from agent.pipeline.tracing.recording import frozen_modules
from agent.pipeline.tracing.recording.constants import CONSTANT
from agent.pipeline.tracing.recording.trace import FIXED, METRICS, TRAINED
from agent.pipeline.tracing.variants import Variant, Variants, form_of
from agent.tensors.device import anywhere


class Recording(msgspec.Struct, frozen=True):
    """What a step computes from a microbatch, and all that cutting needs to know about it.

    `example` has the tensors of a microbatch, in the order of the graph's placeholders; `flatten`
    takes any microbatch apart in the same way. `closure` is what the loss closed over when it was
    recorded.
    """

    variants: Variants
    form: Form
    closure: Closure
    because: str = ""  # what of the closure had changed, if it is not the first recording

    @property
    def graph(self) -> fx.GraphModule:
        return self.variants.first.graph

    @property
    def facts(self) -> Facts:
        return self.variants.first.facts

    @property
    def example(self) -> tuple[torch.Tensor, ...]:
        return self.variants.first.example

    @property
    def fixed(self) -> bool:
        """Whether other microbatches may have other graphs."""
        return self.variants.first.fixed

    @property
    def trained(self) -> tuple[bool, ...]:
        return tuple(self.graph.meta[TRAINED])

    def same_as(self, other: "Recording") -> bool:
        return same_graphs(self.graph, other.graph)

    def begun_with(self, first: Variant) -> "Recording":
        return msgspec.structs.replace(self, variants=self.variants.begun_with(first))

    @property
    def beginning(self) -> tuple[Any, ...]:
        """The example for a worker that began with another microbatch, or () if it needs none.

        It needs one if its microbatch may be computed in another way.
        """
        return self.example if self.fixed else ()

    @property
    def mark(self) -> str:
        return mark_of(self.graph)

    def flatten(self, batch: object) -> "Leaves":
        leaves, form = apart(batch)
        if form != self.form:
            raise CannotRecord(
                f"session.backward(loss_of, microbatches): this microbatch is {shown(batch)}, and the one that was recorded "
                f"{shown(self.form.filled(self.example, whole=True))}; cutting the model into stages needs tensors and numbers at the "
                "same places: let something stand there that changes nothing, or train with depth 1"
            )
        found = Leaves(leaves)
        found.variant = self.variants.of(found)
        return found


class Leaves(tuple[torch.Tensor, ...]):
    """A microbatch taken apart, and the graph that computes it."""

    variant: Variant


def same_graphs(one: fx.GraphModule, other: fx.GraphModule) -> bool:
    """Return whether two graphs compute the same.

    The code does not show the values of constants, so a graph with constants equals no other. It
    does not show which module a guest is either, so guests are compared by identity.
    """
    called = [[guest.called[0] for guest in frozen_modules.guests(each)] for each in (one, other)]
    beside = all(one.meta.get(key) == other.meta.get(key) for key in (METRICS, TRAINED))
    same = beside and one.code == other.code and len(called[0]) == len(called[1])
    return same and all(map(operator.is_, *called)) and not has_constants(one)


def has_constants(graph: fx.GraphModule) -> bool:
    return CONSTANT in graph.code


def mark_of(graph: fx.GraphModule) -> str:
    """Return a mark that is the same for workers that compute the same, on any device."""
    asked = [guest.shapes for guest in frozen_modules.guests(graph)]
    learning = "".join(str(int(each)) for each in graph.meta.get(TRAINED, ()))
    code = form_of(graph) if graph.meta.get(FIXED) else graph.code  # shapes vary by worker
    text = f"{anywhere(code)}{asked}{graph.meta[METRICS]}{learning}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


Told = Callable[[str], Facts | None]


def nobody(mark: str) -> Facts | None:  # noqa: ARG001
    """Return None, because no other worker has examined this graph."""
    return None
