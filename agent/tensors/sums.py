"""What is summed over the microbatches of a step, laid out in one flat buffer.

A step turns state v into v + 1 by way of sums over its microbatches, so those sums are all that
workers exchange and all that the keeper's redo log holds:

    numbers    sums of the microbatches' losses and of the metrics beside them (float64)
    gradients  sum over microbatches of d(loss / M) / d(parameter)
    buffers    sum of what each microbatch changed in a buffer, starting from the step's own start;
               afterwards  buffer = start + sum / M  (floats: the mean change)
                           buffer = start + sum      (integers: the count goes on)
               buffer = start xor sum    (flags: what any microbatch has switched)

A sum has the gradients of float32 parameters in one of two formats. In `float32` they are added as
they come. In `bfloat16` every number of the tree is rounded once, to the nearest: what a microbatch
gives, and each sum of two numbers, which are added in float32. So whatever crosses between workers
is half as many bytes, and has lost nothing that a process alone would have kept.

Numbers of one type lie together, so that adding two sums is one operation per type. Each tensor
begins on 64 bytes, like torch's own, because a product of gradients may round differently with
another alignment, and stages have other spaces than the whole. What a worker adds up of its
microbatches stays on the device that it computes on; what is added over workers is in host memory.
`present` says separately which entries were contributed to, because a parameter that no microbatch
used has no gradient, which is not the same as a gradient of zero.
"""

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import msgspec
import torch

from agent.errors import Misuse, StateError
from agent.profile import EXCHANGED, SumFormat
from agent.tensors.absent import is_away
from agent.tensors.device import CPU, home
from agent.tensors.layer_names import Models, named_buffers, named_modules, summed_parameters
from agent.tensors.metrics import WIDTH, Names, Numbers, alike, decoded, encoded
from agent.tensors.staging import Away, bring, here

ALIGN_BYTES = 64
PIECE_NUMBERS = 1 << 16
FOLD_BYTES = 1 << 19
ADDED_BYTES = 1 << 26
Entries: TypeAlias = "Sequence[int] | None"  # of a sum; None is all of them, and the numbers
Plan: TypeAlias = "torch.Tensor | tuple[Plan, Plan]"  # of an addition
Pair: TypeAlias = "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"  # where to, and of what
NUMBERS = -1  # among entries: the loss and the metrics
NOTHING = False  # it can be added to numbers of any type, flags too, without changing the type


class Sum:
    """One flat buffer of a space, and which of its entries were contributed to.

    It is in host memory by default.
    """

    def __init__(self, space: "SumSpace", on: torch.device = CPU) -> None:
        self.space = space
        pinned = on == CPU != space.device  # so that the device copies from and to it by itself
        self.flat = torch.zeros(space.total_bytes, dtype=torch.uint8, device=on, pin_memory=pinned)
        self.present = bytearray(len(space.tensors))
        self.names: Names | None = None
        self.numbers, *self.views = (
            self.flat[start:end].view(dtype).view(shape)
            for start, end, dtype, shape in space.places
        )
        self._bytes = self.flat.numpy().data if on == CPU else memoryview(b"")
        self._users = self._count_users()

    def _count_users(self) -> int:
        return int(torch._C._storage_Use_Count(self.flat.untyped_storage()._cdata))

    @property
    def is_lent(self) -> bool:
        """Whether there are tensors in this memory beside our own, as gradients in a model are."""
        return self._count_users() != self._users

    @property
    def loss(self) -> float:
        """The sum of the losses; this waits for a device."""
        return float(self.numbers[0])

    @property
    def metrics(self) -> dict[str, float]:
        """The sums of the numbers beside the loss."""
        names = self.names or ()
        return dict(zip(names, self.numbers[1 : 1 + len(names)].tolist(), strict=True))

    def put(self, numbers: Numbers) -> None:
        """Set the numbers and their names."""
        self.names = numbers.names
        self.numbers.zero_()
        for index, value in enumerate(numbers.values):
            self.numbers[index] = value

    def gain(self, numbers: Numbers) -> None:
        """Add to the numbers."""
        self.names = alike((self.names, numbers.names))
        for index, value in enumerate(numbers.values):
            self.numbers[index] += value

    @property
    def marks(self) -> bytes:
        """What was contributed to, and the names of the metrics, for a receiver of the sum."""
        return encoded(self.present, self.names)

    @marks.setter
    def marks(self, marks: bytes) -> None:
        self.present[:], self.names = decoded(marks, len(self.present))

    def clear(self) -> None:
        self.flat.zero_()
        self.present[:] = bytes(len(self.present))
        self.names = None

    def copy_(self, other: "Sum") -> None:
        """Copy another sum; a copy on a device may still be under way on return."""
        self.flat.copy_(other.flat, non_blocking=True)
        self.present[:], self.names = other.present, other.names

    def memory(self, start: int, end: int) -> memoryview:
        """Return a part of a sum that is in host memory."""
        return self._bytes[start:end]

    def copied(self, start: int, end: int, after: torch.Event | None) -> memoryview:
        """Return a part in host memory, as it is once the device has come to `after`."""
        if after is None:
            return self.memory(start, end)
        return here([Away(self.flat, start, end, after)])[0]

    def fill(self, payload: memoryview) -> None:
        """Take all bytes of a sum from host memory."""
        bring(payload, self.flat)


class Contribution(msgspec.Struct):
    """What one microbatch adds to each entry; not copied from where its backward left it."""

    numbers: Numbers
    found: list[torch.Tensor | None]


class Last:
    """The last microbatch of a share, which is added up entry by entry while its backward runs.

    `nodes` are the sums of the share, in host memory; they are complete when all entries are added.
    """

    def __init__(
        self, one: Contribution, additions: Sequence[Callable[..., None]], nodes: list[Sum]
    ) -> None:
        self._one, self._additions, self.nodes = one, additions, nodes
        self._rest = {*range(NUMBERS, len(one.found))}

    def add(self, found: Mapping[int, torch.Tensor]) -> None:
        """Add these entries, whose gradients will not change any more."""
        for index, gradient in found.items():
            self._one.found[index] = gradient
        self._rest.difference_update(found)
        for addition in self._additions:
            addition(only=[*found])

    def end(self, one: Contribution) -> None:
        """Add all other entries, and the numbers."""
        self._one.numbers = one.numbers
        for index in self._rest - {NUMBERS}:
            self._one.found[index] = one.found[index]
        for addition in self._additions:
            addition(only=sorted(self._rest))


class Lent(msgspec.Struct, frozen=True):
    """A contribution whose gradients are in the model, with their versions before that."""

    one: Contribution
    versions: list[int]


def union(marks: Iterable[bytes], entries: int) -> bytes:
    """Return the marks of everything that any of several sums was contributed to."""
    found, present = [decoded(each, entries) for each in marks], 0
    for there, _ in found:
        present |= int.from_bytes(there)
    return encoded(present.to_bytes(entries), alike(names for _, names in found))


class Norm(msgspec.Struct, frozen=True):
    """The norm of one gradient, as summed and without the scale of the loss.

    `finite` says whether all its numbers are finite, because their squares may overflow. `unscaled`
    and `finite` are read only if the loss is scaled.
    """

    norm: float
    unscaled: float = 0.0
    finite: bool = True


class Summed(msgspec.Struct, frozen=True):
    """The sum of a step: of everything, or (`held`) of the layers that this worker keeps.

    `finite`, `marks` and the `norms` of the gradients (by parameter) cover everything in any case.
    """

    total: Sum
    finite: bool
    marks: bytes
    held: frozenset[str] | None = None
    norms: dict[int, Norm] = {}


class SumSpace:
    """Where each number of a step's sum lies."""

    def __init__(
        self, models: Models, trained: Container[int] = (), *, exchange: SumFormat = "float32"
    ) -> None:
        """Lay out the models' tensors; for `trained` see `summed_parameters`."""
        self.exchange = exchange
        self._homes: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]] = [
            (each._buffers, key, buffer)
            for each in named_modules(models).values()
            for key, buffer in each._buffers.items()
            if buffer is not None
        ]
        self._take(
            {**summed_parameters(models, trained)},
            {name: each for name, each in named_buffers(models).items() if is_summed(each)},
        )

    def part(self, wanted: Callable[[str], bool]) -> "SumSpace":
        """Return a space of some of these, by name."""
        part = SumSpace({}, exchange=self.exchange)
        part._take(
            {name: param for name, param in self.params.items() if wanted(name)},
            {name: buffer for name, buffer in self.buffers.items() if wanted(name)},
        )
        return part

    def _take(self, params: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor]) -> None:
        self.params, self.buffers = params, buffers
        self.names = [*params, *buffers]
        self.tensors = [*params.values(), *buffers.values()]
        self._types = [
            *(self._type_of(param) for param in params.values()),
            *(buffer.dtype for buffer in buffers.values()),
        ]
        self._lay_out()
        self._before = [buffer.detach().clone() for buffer in buffers.values()]
        self.device = home(self.tensors)
        self._there: Sum | None = None  # the sum of a step on the device
        self.changed: list[str] = []  # the buffers that the last microbatch changed

    def _type_of(self, param: torch.Tensor) -> torch.dtype:
        return torch.bfloat16 if self._is_rounded(param) else param.dtype

    def _is_rounded(self, param: torch.Tensor) -> bool:
        return self.exchange == "bfloat16" and param.dtype == torch.float32

    @property
    def rounds(self) -> bool:
        """Whether any gradient is rounded, and so has another type in a sum than in the model."""
        # Each commit asks, so float32 is answered without a look at every parameter.
        return self.exchange != "float32" and any(map(self._is_rounded, self.params.values()))

    @property
    def exchanged(self) -> float:
        """Return the bytes of a sum's gradients for each byte of the parameters."""
        pairs = [*zip(self.params.values(), self._types, strict=False)]
        size = sum(param.nbytes for param, _ in pairs)
        return sum(p.numel() * dtype.itemsize for p, dtype in pairs) / size if size else 1.0

    def _lay_out(self) -> None:
        kinds = [(torch.float64, torch.Size([WIDTH]))]
        kinds += [(d, t.shape) for d, t in zip(self._types, self.tensors, strict=True)]
        order = sorted(range(len(kinds)), key=lambda index: (-kinds[index][0].itemsize, index))
        self.places: list[tuple[int, int, torch.dtype, torch.Size]] = [
            (0, 0, torch.uint8, torch.Size())
        ] * len(order)
        self.groups: list[tuple[int, int, torch.dtype]] = []
        at = 0
        for index in order:
            dtype, shape = kinds[index]
            size = shape.numel() * dtype.itemsize
            if not self.groups or self.groups[-1][2] != dtype:
                self.groups.append((at, at, dtype))
            self.places[index] = (at, at + size, dtype, shape)
            at += _aligned(size)
            self.groups[-1] = (self.groups[-1][0], at, dtype)
        self.total_bytes = at

    def slot(self, index: int) -> tuple[int, int]:
        """Return where a number's place begins and where the next one's does.

        A place has the same size in every space that has it.
        """
        start, end, *_ = self.places[index]
        return start, start + _aligned(end - start)

    def begin(self) -> None:
        """Begin a step: clear gradients, and take the buffers' current values as its start."""
        for param in self.params.values():
            param.grad = None
        self._bring_home()
        for index, buffer in enumerate(self.buffers.values()):
            self._before[index].copy_(buffer)

    def blank(self) -> None:
        """Give up the step, leaving zero gradients for a script that reads some."""
        self.begin()
        for param in self.params.values():
            # Contiguous whatever the parameter's strides, as a sum's gradients are.
            param.grad = None if is_away(param) else param.new_zeros(param.shape)

    def _bring_home(self) -> None:
        """Put buffers back into their places with their new values.

        A forward may have put another tensor in the place of a buffer.
        """
        for owner, key, buffer in self._homes:
            found = owner.get(key)
            if found is None or found is buffer:
                continue
            if (found.shape, found.dtype) == (buffer.shape, buffer.dtype):
                buffer.detach().copy_(found.detach())
                owner[key] = buffer

    def _change(self, buffer: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Return what a forward has added to a buffer: nothing where its number is the same."""
        if before.dtype == torch.bool:
            return torch.ne(buffer, before)
        change = torch.sub(buffer, before)
        if before.is_cpu and bool(torch.isfinite(change).all()):
            return change
        if before.is_cpu and bool((change.isinf() & before.isinf()).any()):
            raise Misuse(
                f"the forward writes over infinite numbers in the buffer {self._name(before)!r}, and it is not known how the changes "
                "of several microbatches add up to those: begin it with finite ones, by a forward before Session(...) for example"
            )
        return change.masked_fill_(_alike(buffer, before), 0)

    def _name(self, before: torch.Tensor) -> str:
        pairs = zip(self.buffers, self._before, strict=True)
        return next(name for name, each in pairs if each is before)

    def _refuse_size(self, buffer: torch.Tensor, before: torch.Tensor) -> None:
        raise Misuse(
            f"the forward has made the buffer {self._name(before)!r} {list(buffer.shape)}, which was {list(before.shape)}: let it have "
            "its size before Session(...), by a forward on one batch for example"
        )

    def take(self, numbers: Numbers) -> Contribution:
        """Take what one microbatch has left in the model, and put the model back."""
        found: list[torch.Tensor | None] = []
        for index, (name, param) in enumerate(self.params.items()):
            gradient = param.grad
            if gradient is not None:
                if gradient.is_sparse:
                    raise Misuse(
                        f"{name} has a sparse gradient: make its layer with sparse=False, and train it with Adam if that was "
                        "SparseAdam's"
                    )
                param.grad = None
                gradient = self.given(index, gradient)
            found.append(gradient)
        self._bring_home()
        pairs = list(zip(self._before, self.buffers.values(), strict=True))
        unchanged = list(self._unchanged(pairs))
        self.changed = [n for n, same in zip(self.buffers, unchanged, strict=True) if not same]
        for (before, buffer), same in zip(pairs, unchanged, strict=True):
            if same:
                found.append(None)
                continue
            if buffer.shape != before.shape:
                self._refuse_size(buffer, before)
            found.append(self._change(buffer.detach(), before).to(self.device))
            buffer.detach().copy_(before)
        return Contribution(numbers.on(self.device), found)

    def written(self) -> dict[str, torch.Tensor | None]:
        """Return what one microbatch has left in the buffers that it has written to, as copies.

        The other buffers are None.
        """
        self._bring_home()
        pairs = [*zip(self._before, self.buffers.values(), strict=True)]
        return {
            name: None if same else buffer.detach().clone()
            for (name, buffer), same in zip(
                self.buffers.items(), self._unchanged(pairs), strict=True
            )
        }

    def given(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return what a microbatch's gradient adds to a sum: in the type that it has there."""
        return gradient.detach().to(self.device, self._types[index])

    def lend(self, one: Contribution) -> Lent:
        """Put its gradients into the model, for a backward that adds to them."""
        for index, param in enumerate(self.params.values()):
            gradient = one.found[index]
            if gradient is not None and not _is_alone(gradient):
                gradient = one.found[index] = gradient.clone()
            param.grad = gradient
        return Lent(one, [0 if each is None else each._version for each in one.found])

    def returned(self, lent: Lent, both: Contribution) -> Contribution:
        """Return what two microbatches have left.

        The backward of `both` has added the gradients of the two; the buffers' changes are added
        here.
        """
        found = list(both.found)
        rows = zip(lent.one.found, both.found, lent.versions, strict=True)
        for index, (a, b, version) in enumerate(rows):
            if index >= len(self.params):
                one, other = (b, a) if a is None else (a, b)
                found[index] = None if one is None else one + (NOTHING if other is None else other)
            elif b is not None and (a is None or a._version == version):
                found[index] = b + NOTHING  # it is of one only; -0.0 becomes 0.0
        return Contribution(lent.one.numbers.plus(both.numbers), found)

    def _unchanged(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[bool]:
        """Compare by value, because batch norm's kernels do not count what they write.

        The answers of a device are fetched in one copy.
        """
        if self.device == CPU:
            for before, buffer in pairs:
                yield torch.equal(buffer, before) or _equal_but_for_nan(buffer, before)
        elif pairs:
            found = [_alike(buffer, before).all().to(self.device) for before, buffer in pairs]
            yield from torch.stack(found).tolist()

    def entries(self, only: Entries) -> Iterable[int]:
        return range(len(self.tensors)) if only is None else [each for each in only if each >= 0]

    def write(self, into: Sum, one: Contribution, only: Entries = None) -> None:
        """Set `into = one`."""
        if _has_numbers(only):
            into.put(one.numbers)
        for index in self.entries(only):
            view, value = into.views[index], one.found[index]
            into.present[index] = value is not None
            if value is None:
                view.zero_()
            else:
                view.copy_(value)

    def join(
        self, into: Sum, left: Contribution, right: Contribution, only: Entries = None
    ) -> None:
        """Set `into = left + right`, in one pass over the memory."""
        if _has_numbers(only):
            into.put(left.numbers.plus(right.numbers))
        pairs = list[Pair]()
        for index in self.entries(only):
            view, a, b = into.views[index], left.found[index], right.found[index]
            into.present[index] = a is not None or b is not None
            one, other = (b, a) if a is None else (a, b)
            if one is None:
                view.zero_()
            elif other is not None and not view.is_cpu:
                pairs.append((view, one, other))
            else:
                torch.add(one, NOTHING if other is None else other, out=view)
        for views, both in _added_there(pairs):
            torch._foreach_copy_(views, both)

    def accumulate(
        self,
        into: Sum,
        one: Contribution,
        other: Contribution | None = None,
        only: Entries = None,
    ) -> None:
        """Do `into += one`, or `into += one + other`."""
        if _has_numbers(only):
            into.gain(one.numbers if other is None else one.numbers.plus(other.numbers))
        pairs = list[Pair]()
        for index in self.entries(only):
            view, a = into.views[index], one.found[index]
            b = None if other is None else other.found[index]
            into.present[index] |= a is not None or b is not None
            # -0.0 becomes 0.0, as if a zero were added
            if other is None:
                view.add_(NOTHING if a is None else a)
            elif a is not None and b is not None:
                if view.is_cpu:
                    _add_pair(view, a, b)
                else:
                    pairs.append((view, a, b))
            else:
                found = b if a is None else a
                view.add_(NOTHING if found is None else found + NOTHING)
        for views, both in _added_there(pairs):
            torch._foreach_add_(views, both)

    def gain(self, into: Sum, one: Contribution, only: Entries = None) -> None:
        """Do `into += one` in the entries that it contributes to."""
        if _has_numbers(only):
            into.gain(one.numbers)
        for index in self.entries(only):
            if (value := one.found[index]) is not None:
                into.present[index] = True
                into.views[index].add_(value)

    def add(self, left: Sum, right: Sum, only: Entries = None) -> None:
        """Do `left += right`."""
        if only is not None:
            self._add_entries(left, right, only)
            return
        for start, end, dtype in self.groups:
            left.flat[start:end].view(dtype).add_(right.flat[start:end].view(dtype))
        left.present[:] = bytes(a | b for a, b in zip(left.present, right.present, strict=True))
        left.names = alike((left.names, right.names))

    def _add_entries(self, left: Sum, right: Sum, only: Sequence[int]) -> None:
        if _has_numbers(only):
            left.numbers.add_(right.numbers)
            left.names = alike((left.names, right.names))
        for index in self.entries(only):
            left.views[index].add_(right.views[index])
            left.present[index] |= right.present[index]

    def fold(self, plan: Plan, into: torch.Tensor, start: int) -> None:
        """Add up as planned. All are the bytes of a sum from `start` on, and `into` is none of them.

        Each number goes through the whole plan while it is in a processor's cache.
        """
        nested = isinstance(plan, tuple) and _is_nested(plan) and into.is_cpu
        piece = FOLD_BYTES if nested else into.numel()
        for group_start, group_end, dtype in self.groups:
            low, high = max(group_start - start, 0), min(group_end - start, into.numel())
            for at in range(low, high, piece):
                end = min(at + piece, high)
                target = into[at:end].view(dtype)
                found = _added(plan, at, end, target)
                if found is not target:
                    target.copy_(found)

    def finite(self, total: Sum) -> bool:
        """Return whether the loss and all gradients are finite; a metric may be anything."""
        return math.isfinite(total.loss) and self.gradients_finite(total)

    def gradients_finite(self, total: Sum) -> bool:
        _, first = self.slot(0)
        return all(
            bool(torch.isfinite(_total(total.flat[max(start, first) : end].view(dtype))))
            for start, end, dtype in self.groups
            if dtype.is_floating_point or dtype.is_complex
        )

    def summed(self, total: Sum) -> Summed:
        return Summed(total, self.finite(total), total.marks)

    @property
    def _format(self) -> SumFormat:
        return "bfloat16" if self.rounds else "float32"

    def sealed(self, marks: bytes) -> bytes:
        """Return the marks of a sum with its format, for whoever applies it again."""
        return marks + b"\0" + self._format.encode()

    def unsealed(self, marks: bytes) -> bytes:
        """Return the marks of a stored sum; refuse one of a different format.

        Earlier versions of the software stored no format.
        """
        for known in EXCHANGED:
            if marks.endswith(seal := b"\0" + known.encode()):
                if known != self._format:
                    raise StateError(
                        f"the sums of committed steps, which have to be applied again, are in {known}, and this script "
                        f'sums in {self._format}: resume the job with Session(..., exchange="{known}")'
                    )
                return marks.removesuffix(seal)
        return marks

    def install(self, total: Sum, microbatches: int) -> None:
        """Put gradients into the model, as views of the sum, and apply the buffers' changes."""
        views = self._near(total)
        for index, param in enumerate(self.params.values()):
            # Detached, so that autograd records on our memory nothing that a script does to a
            # gradient.
            there = total.present[index]
            grad = views[index].detach().to(param.device, param.dtype) if there else None
            param.grad = grad
        for index, buffer in enumerate(self.buffers.values()):
            if total.present[len(self.params) + index]:
                change = views[len(self.params) + index].to(buffer.device)
                if buffer.dtype == torch.bool:
                    buffer.detach().logical_xor_(change)
                    continue
                if buffer.dtype.is_floating_point:
                    change = change / microbatches
                buffer.detach().add_(change)

    def gradients(self, total: Sum, wanted: Iterable[int]) -> list[torch.Tensor]:
        """Return these parameters' gradients, as `install` puts them into the model."""
        params = [*self.params.values()]
        return [total.views[index].to(self.device, params[index].dtype) for index in wanted]

    def _near(self, total: Sum) -> list[torch.Tensor]:
        """Return the entries of a sum on the model's device.

        The copy is waited for, because the next sum may be received into the same memory.
        """
        if total.flat.device == self.device:
            return total.views
        self._there = self._there or Sum(self, self.device)
        self._there.flat.copy_(total.flat)
        return self._there.views


def paired(left: Plan, right: Plan) -> Plan:
    return left, right


def _has_numbers(only: Entries) -> bool:
    return only is None or NUMBERS in only


def _is_nested(plan: tuple[Plan, Plan]) -> bool:
    return any(isinstance(half, tuple) for half in plan)


def _added(plan: Plan, low: int, high: int, out: torch.Tensor) -> torch.Tensor:
    """Return what a part of the plan adds up to: in `out`, or where it lies if it is one sum."""
    if isinstance(plan, torch.Tensor):
        return plan[low:high].view(out.dtype)
    left = _added(plan[0], low, high, out)
    right = _added(plan[1], low, high, torch.empty_like(out) if left is out else out)
    return torch.add(left, right, out=out)


def _alike(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return where numbers are the same; not-a-number is the same as itself."""
    return (one == other) | (one.isnan() & other.isnan())


def _equal_but_for_nan(one: torch.Tensor, other: torch.Tensor) -> bool:
    any_nan = one.shape == other.shape and bool(other.isnan().any())
    return any_nan and bool(_alike(one, other).all())


def is_summed(buffer: torch.Tensor) -> bool:
    """Return whether changes of the buffer can be summed; if not, it has to stay unchanged."""
    added = buffer.dtype.is_floating_point or buffer.dtype in (torch.int64, torch.int32, torch.bool)
    return added and buffer.layout is torch.strided


def _is_alone(gradient: torch.Tensor) -> bool:
    """Return whether nothing else shares its memory, and it has no overlap with itself.

    Gradients of a sum may be one tensor, or one that a function has kept.
    """
    if torch._debug_has_internal_overlap(gradient):
        return False
    storage = gradient.untyped_storage()
    users = 2 + gradient._is_view()  # this storage object, the tensor, and what it is a view of
    return torch._C._storage_Use_Count(storage._cdata) == users


def _added_there(pairs: Sequence[Pair]) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Add pairs on a device, many with one kernel and with little memory; return where each goes.

    A kernel for each would keep the host longer than the additions take.
    """
    at = 0
    while at < len(pairs):
        end, size = at, 0
        while end < len(pairs) and (end == at or size + pairs[end][0].nbytes <= ADDED_BYTES):
            size += pairs[end][0].nbytes
            end += 1
        views, ones, others = map(list, zip(*pairs[at:end], strict=True))
        yield views, [*torch._foreach_add(ones, others)]
        at = end


def _add_pair(into: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Do `into += a + b`, if all are contiguous in pieces that stay in the cache."""
    count = into.numel()
    if count <= PIECE_NUMBERS or not (a.is_contiguous() and b.is_contiguous()):
        into.add_(a + b)
        return
    into, a, b = into.view(-1), a.view(-1), b.view(-1)
    for start in range(0, count, PIECE_NUMBERS):
        end = start + PIECE_NUMBERS
        into[start:end].add_(a[start:end] + b[start:end])


def _aligned(count: int) -> int:
    return -(-count // ALIGN_BYTES) * ALIGN_BYTES


def _total(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.sum(dtype=_wide(numbers.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return a type that can sum many half-precision numbers without overflow."""
    return torch.promote_types(dtype, torch.float32)
