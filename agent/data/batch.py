"""A whole batch, which `session.backward` cuts into microbatches, and the usual loss of one.

    for inputs, target in data:
        session.backward(supervised(model, criterion), inputs, target)

The tensors of a batch are cut along one dimension into pieces whose sizes differ by one at most.
They may lie in tuples, lists and mappings, as `collate_fn` returns them. So are lists with one entry
for each row that are not made of tensors: lengths, captions, names. What else is no tensor, or has
no such dimension, is given to each piece whole. Where tensors have sizes of their own, as images and
their boxes in lists with one entry for each sample, these lists are cut.
"""

import copy
import functools
from collections import UserDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, overload

import torch
from torch.utils import _pytree as pytree

from agent.data.order import split
from agent.errors import Misuse
from agent.pipeline.flatten import with_mappings_opened

WHO = "session.backward(loss_of, *batch)"


class Pieces(Sequence[Any]):
    """The microbatches of a batch; each is cut when it is asked for, without a copy."""

    def __init__(self, batch: Any, dim: int, count: int) -> None:
        self._given, self._batch, self._dim = batch, with_mappings_opened(batch), dim
        leaves = [leaf for leaf in pytree.tree_leaves(self._batch) if self._is_cut(leaf)]
        sizes = sorted({leaf.shape[dim] for leaf in leaves})
        self._samples = 0 if len(sizes) == 1 and sizes[0] >= count else _samples_of(batch, dim)
        if self._samples:
            sizes = [self._samples]
        if len(sizes) != 1:
            what = f"sizes {', '.join(map(str, sizes))}" if sizes else "no tensor"
            raise Misuse(
                f"{WHO}: the batch is cut along dimension {dim}, where it has {what}; give tensors of one "
                "size there, and let loss_of take what is not cut from the script"
            )
        if not count:
            raise Misuse(
                f"{WHO}: it is not known into how many microbatches a batch is cut: "
                "Session(..., microbatches=8)"
            )
        if sizes[0] < count:
            raise Misuse(
                f"{WHO}: a batch of {sizes[0]} cannot be cut into {count} microbatches: give larger ones"
            )
        self._rows = sizes[0]
        tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        if not self._samples and any(
            0 < leaf.ndim <= dim and len(leaf) == self._rows for leaf in tensors
        ):
            raise Misuse(
                f"{WHO}: the batch is cut along dimension {dim}, which a tensor of {self._rows} entries, as many as rows, has "
                "not: give all with rows first, and transpose in loss_of; what is not cut loss_of takes from the script"
            )
        self._bounds = split(self._rows, count)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        places = range(len(self))[index]
        return [self._one(i) for i in places] if isinstance(places, range) else self._one(places)

    def _one(self, index: int) -> Any:
        begin, end = self._bounds[index], self._bounds[index + 1]
        if self._samples:
            return _each_part(self._given, lambda part: part[begin:end] if _is_row(part) else part)
        return pytree.tree_map(
            lambda leaf: self._part(leaf, begin, end), self._batch, is_leaf=self._is_listed
        )

    def _part(self, leaf: Any, begin: int, end: int) -> Any:
        if self._is_cut(leaf):
            return leaf.narrow(self._dim, begin, end - begin)
        return leaf[begin:end] if self._is_listed(leaf) else leaf

    def _is_listed(self, node: object) -> bool:
        """Return whether it has one entry for each row of the batch, and is not made of tensors."""
        return (
            isinstance(node, list | tuple)
            and len(node) == self._rows
            and not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(node))
        )

    def _is_cut(self, leaf: object) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.ndim > self._dim


def _samples_of(batch: Any, dim: int) -> int:
    """Return how many samples a batch has whose parts are lists of them; 0 if they are not."""
    found = list[Any]()
    _each_part(batch, found.append)
    rows = [part for part in found if _is_row(part)]
    lengths = {len(part) for part in rows}
    listed = any(not isinstance(part, torch.Tensor) for part in rows)
    return lengths.pop() if listed and not dim and len(lengths) == 1 else 0


def _each_part(batch: Any, of: Callable[[Any], Any]) -> Any:
    if isinstance(batch, UserDict):
        made = copy.copy(batch)
        made.data = _each_part(batch.data, of)
        return made
    if isinstance(batch, Mapping):
        return {key: of(part) for key, part in batch.items()}
    return tuple(map(of, batch)) if isinstance(batch, tuple) else batch


def _is_row(part: object) -> bool:
    """Return whether a part of a batch has an entry for each sample."""
    if isinstance(part, torch.Tensor):
        return part.ndim > 0
    return isinstance(part, list | tuple) and not hasattr(part, "_fields")


class Parts(NamedTuple):
    """The shapes and types of a batch that is a list of tensors."""

    each: tuple[tuple[torch.Size, torch.dtype], ...]

    @classmethod
    def of(cls, batch: Any) -> "Parts | None":
        """Return those of this batch; None if it is no list of tensors."""
        if not isinstance(batch, list | tuple) or not batch:
            return None
        if not all(isinstance(part, torch.Tensor) for part in batch):
            return None
        return cls(tuple((part.shape, part.dtype) for part in batch))

    def have(self, rows: int) -> bool:
        """Return whether each has so many rows."""
        return all(shape[:1] == (rows,) for shape, _ in self.each)

    @property
    def differ(self) -> bool:
        """Return whether they are of several kinds, as microbatches never are."""
        return len({(len(shape), dtype) for shape, dtype in self.each}) > 1


def cut(
    loss_of: Any,
    batch: tuple[Any, ...],
    dim: int,
    count: int,
    whole: bool = False,
    given: Collection[Parts | None] = (),
) -> tuple[Callable[[Any], Any], Sequence[Any]]:
    """Return a function of one microbatch, and the microbatches.

    A batch that is one sequence has its microbatches already. One tensor alone is such a sequence,
    unless it is `whole`: the session was given their number, so it gets batches to cut. Then a list
    of tensors that looks like a batch, or like one of those `given` to the script, is refused.
    """
    parts = Parts.of(batch[0]) if whole and len(batch) == 1 else None
    if parts is not None and (parts.differ or parts in given):
        raise Misuse(
            f"session.backward(loss_of, batch): a list is that of the microbatches, and these {len(parts.each)} tensors "
            f"are the parts of one batch: give them one by one, {WHO}"
        )
    alone = len(batch) == 1 and not (whole and isinstance(batch[0], torch.Tensor))
    if alone and not isinstance(batch[0], Mapping):
        return loss_of, batch[0]
    if not callable(loss_of) or isinstance(loss_of, torch.Tensor):
        raise Misuse(
            f"{WHO}: loss_of is a {type(loss_of).__name__}; give a function that takes the pieces of the batch and "
            "returns their loss"
        )
    if len(batch) == 1:
        return loss_of, Pieces(batch[0], dim, count)
    return _of_parts(loss_of), Pieces(batch, dim, count)


def _of_parts(loss_of: Callable[..., Any]) -> Callable[[Any], Any]:
    @functools.wraps(loss_of, assigned=(), updated=())
    def of_piece(piece: Any) -> Any:
        return loss_of(*piece)

    return of_piece


def supervised(
    model: Callable[..., Any], criterion: Callable[..., Any], **metrics: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the loss of a model's output against a target, the last part of a batch.

    `supervised(model, criterion, accuracy=correct)` calls `criterion(output, target)`, and
    `correct(output, target)` for `result["accuracy"]`.
    """

    # What it closes over is looked for in what it wraps.
    @functools.wraps(functools.partial(criterion, model, metrics), assigned=(), updated=())
    def loss_of(*batch: Any) -> Any:
        *inputs, target = batch
        output = model(*inputs)
        loss = criterion(output, target)
        return (loss, {k: of(output, target) for k, of in metrics.items()}) if metrics else loss

    return loss_of
