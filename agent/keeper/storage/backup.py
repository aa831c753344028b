"""The keeper's memory of a job: version B of its state, and the sums of commits since.

State and sums are plain bytes here. They arrive in slices, each from the worker that owns it, and
land in their place without being copied. `B + sums` is the newest committed version: newcomers
that find no worker with it load B and apply the sums again.
"""

from collections.abc import Callable, Container, Iterable, Mapping

import msgspec
from msgspec.structs import force_setattr

from agent.checksum import Buffer
from agent.errors import WireError
from agent.protocol import State
from agent.store.encoding.format import PARTS, Layer, Part
from agent.store.memory import address_of, copy_bytes, ordinary
from agent.store.shares import Extent, Stored, cut_up
from agent.store.shares import bodies as payload_of

PAYLOAD_BYTES_MAX = 1 << 36
LAYERS_MAX = 100_000

Room = Callable[[int], memoryview]


class LoggedSum(msgspec.Struct, frozen=True):
    """The summed gradients of one committed step."""

    step: int
    present: bytes
    body: memoryview


class Backup(msgspec.Struct, frozen=True, kw_only=True):
    """A whole state: every layer's form, and its bytes by the layer's name, or where they lie."""

    generation: int
    version: int
    layers: tuple[Layer, ...]
    bodies: Mapping[str, memoryview]
    stored: Stored | None = None  # then there are no bodies
    state_bytes: int = 0  # added up once, because every commit asks for it

    def __post_init__(self) -> None:
        force_setattr(self, "state_bytes", sum(layer.layer_bytes for layer in self.layers))

    def told(
        self, generation: int, wanted: Container[str] | None = None
    ) -> tuple[State, list[Buffer]]:
        """Return what a worker is sent of this state, or of the wanted layers, and the payload."""
        layers = tuple(each for each in self.layers if wanted is None or each.name in wanted)
        stored = None if self.stored is None else self.stored.only(layers)
        state = State(generation=generation, version=self.version, layers=layers, stored=stored)
        return state, [] if stored is not None else payload_of(layers, self.bodies)


class Saved(msgspec.Struct, frozen=True):
    """A whole state, the sums that follow it, and the records of the step after it.

    For the records, see `agent.keeper.proofs`.
    """

    backup: Backup
    redo: tuple[LoggedSum, ...]
    records: bytes = b""

    @property
    def reached(self) -> int:
        return self.backup.version + len(self.redo)


class Assembly:
    """A whole that is assembled from slices."""

    def __init__(self, total: int, room: Room = ordinary) -> None:
        if not 0 <= total <= PAYLOAD_BYTES_MAX:
            raise WireError(f"a whole of {total} bytes is beyond the bounds")
        self.body = room(total)
        self._taken: dict[int, int] = {}
        self._bytes = 0

    @property
    def total(self) -> int:
        return self.body.nbytes

    @property
    def whole(self) -> bool:
        return self._bytes == self.total

    def place(self, offset: int, size: int) -> memoryview | None:
        """Return where a slice belongs; None if it is there already."""
        if offset < 0 or offset + size > self.total:
            raise WireError(f"a slice of {size} bytes at {offset} of {self.total}")
        return None if offset in self._taken else self.body[offset : offset + size]

    def take(self, offset: int, data: memoryview) -> None:
        """Take a slice that has arrived in its place or elsewhere. A repeated slice counts once."""
        place = self.place(offset, data.nbytes)
        if place is None or not data.nbytes:
            return
        if address_of(data) != address_of(place):
            copy_bytes(data, place)
        self._taken[offset] = data.nbytes
        self._bytes += data.nbytes


class StateAssembly:
    """A state that is assembled from every worker's share of every layer that it holds."""

    def __init__(
        self,
        generation: int,
        version: int,
        workers: Iterable[str],
        room: Room = ordinary,
        *,
        final: bool,
        ahead: int | None = None,
    ) -> None:
        """`ahead` is that of `agent.protocol.Shards` if the bytes go to the store."""
        self.generation, self.version, self.final = generation, version, final
        self.ahead, self.parts = ahead, list[Part]()
        self._room = room
        self._awaited = set(workers)
        self._forms: dict[str, Layer] = {}
        self._bodies: dict[str, Assembly] = {}

    def place(self, extents: tuple[Extent, ...]) -> memoryview | None:
        """Return where bytes of one layer belong; None for bytes of several, which are copied."""
        if len(extents) != 1:
            return None
        return self._of(extents[0]).place(extents[0].start, extents[0].size)

    def take(
        self, forms: Iterable[Layer], extents: tuple[Extent, ...], payload: memoryview
    ) -> None:
        for layer in forms:
            self._forms.setdefault(layer.name, layer)
        for extent, data in cut_up(payload, extents):
            self._of(extent).take(extent.start, data)

    def of(self, generation: int, version: int, *, final: bool) -> bool:
        """Whether it is this state that is being assembled."""
        return (self.generation, self.version, self.final) == (generation, version, final)

    def end(self, worker: str) -> None:
        """Note that this worker has sent its whole share."""
        self._awaited.discard(worker)

    def whole(self) -> Backup | None:
        if self._awaited:
            return None
        for name, form in self._forms.items():
            body = self._bodies.get(name)
            if (body.total if body is not None else 0) != form.layer_bytes:
                raise WireError(f"layer {name} of {form.layer_bytes} bytes came in another length")
        lacking = [name for name, body in self._bodies.items() if not body.whole]
        if lacking or self._bodies.keys() - self._forms.keys():
            return None  # a share was lost with its sender, and will be asked for again
        return Backup(
            generation=self.generation,
            version=self.version,
            layers=tuple(self._forms[name] for name in sorted(self._forms)),
            bodies={name: body.body for name, body in self._bodies.items()},
        )

    # --- a state whose bytes go to the store ------------------------------------------------------

    @property
    def stored(self) -> bool:
        return self.ahead is not None

    def add(self, forms: Iterable[Layer], parts: Iterable[Part]) -> None:
        """Take note of parts that a worker has written."""
        for layer in forms:
            self._forms.setdefault(layer.name, layer)
        folder = f"{PARTS}/{self.version + (self.ahead or 0):010d}/"
        for part in parts:
            if not part.key.startswith(folder):
                raise WireError(f"a part at {part.key}, and the place of its version is {folder}")
            self.parts.append(part)

    @property
    def ended(self) -> bool:
        """Whether every worker has said that its whole share is written."""
        return not self._awaited

    def described(self) -> Backup:
        """Return the state without its bytes."""
        layers = tuple(self._forms[name] for name in sorted(self._forms))
        return Backup(generation=self.generation, version=self.version, layers=layers, bodies={})

    def _of(self, extent: Extent) -> Assembly:
        assembly = self._bodies.get(extent.layer)
        if assembly is None:
            if len(self._bodies) >= LAYERS_MAX:
                raise WireError(f"a state of more than {LAYERS_MAX} layers is beyond the bounds")
            assembly = self._bodies[extent.layer] = Assembly(extent.of, self._room)
        if assembly.total != extent.of:
            raise WireError(
                f"layer {extent.layer} of {extent.of} bytes, but others say {assembly.total}"
            )
        return assembly
