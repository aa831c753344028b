"""A layout: who computes what, as a value that every part of the system can read.

No torch here. A layout has a generation; every message of a worker carries it, and an older one is
refused. A *replica* is a chain of workers, one per pipeline stage; plain data parallelism is chains
of one. Each replica computes a contiguous range of the step's microbatches, so that the sum over
microbatches can follow one canonical tree whatever the layout.
"""

from functools import cached_property

import msgspec

from agent.schedule import Schedule, one_f_one_b
from cloud.ranges import Count, Generation, Name, Step


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """A chain of workers that computes microbatches `first .. first + count - 1` of a step."""

    workers: tuple[Name, ...]
    first: Count
    count: Count

    def __post_init__(self) -> None:
        if not self.workers or self.first < 0 or self.count < 0:
            raise ValueError(f"replica {self.workers}: first={self.first}, count={self.count}")


class Layout(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """P x D and which worker has which place, under one generation.

    The other fields say how chains of several workers are played. Chains of one need none of them.

    cuts       nodes of the recorded graph after which it is cut, one less than there are stages.
               If they are empty or not of this graph, the first worker measures, balances, and
               sends cuts to the others.
    schedule   its name, for people
    recompute  for each stage, whether its forwards keep only their inputs (the last one's never
               do); empty for none
    owned      a worker keeps only the layers of its stages, because all of them do not fit. Each
               copy less is one that cannot be recovered from, so this is for models that need it.
    schedules  the programs, one for each number of microbatches that a replica has. A replica that
               finds none plays 1F1B.
    """

    generation: Generation
    microbatches: Count
    replicas: tuple[Replica, ...]
    cuts: tuple[Step, ...] = ()
    schedule: Name = "1f1b"
    recompute: tuple[bool, ...] = ()
    owned: bool = False
    schedules: tuple[Schedule, ...] = ()

    def __post_init__(self) -> None:
        depths = {len(replica.workers) for replica in self.replicas}
        if len(depths) > 1:
            raise ValueError(f"generation {self.generation}: unequal depths {sorted(depths)}")
        expected = 0
        for replica in self.replicas:
            if replica.first != expected:
                raise ValueError(
                    f"generation {self.generation}: {replica.workers} starts at microbatch "
                    f"{replica.first}, expected {expected}"
                )
            expected += replica.count
        if self.replicas and expected != self.microbatches:
            raise ValueError(
                f"generation {self.generation}: replicas cover {expected} "
                f"of {self.microbatches} microbatches"
            )

        self._check_schedules()

    def _check_schedules(self) -> None:
        if self.depth > 1 and any(replica.count == 0 for replica in self.replicas):
            raise ValueError(f"generation {self.generation}: a chain of workers has no microbatch")
        if len(self.recompute) not in (0, self.depth):
            raise ValueError(
                f"generation {self.generation}: recompute is said of {len(self.recompute)} stages, "
                f"and a chain has {self.depth}"
            )
        for schedule in self.schedules:
            if schedule.workers != self.depth:
                raise ValueError(
                    f"generation {self.generation}: schedule {schedule.name} is for "
                    f"{schedule.workers} workers, and a chain has {self.depth}"
                )

    @cached_property
    def workers(self) -> tuple[str, ...]:
        return tuple(worker for replica in self.replicas for worker in replica.workers)

    @property
    def depth(self) -> int:
        return len(self.replicas[0].workers) if self.replicas else 0

    @property
    def width(self) -> int:
        return len(self.replicas)

    def replica_of(self, worker: str) -> Replica:
        return next(replica for replica in self.replicas if worker in replica.workers)

    def schedule_of(self, replica: Replica) -> Schedule:
        """Return the schedule that this chain plays."""
        for schedule in self.schedules:
            if schedule.microbatches == replica.count:
                return schedule
        return one_f_one_b(self.depth, replica.count, recompute=self.recompute)

    def describe(self) -> str:
        return f"{self.depth}x{self.width}"


def data_parallel(generation: int, microbatches: int, workers: tuple[str, ...]) -> Layout:
    """Return a layout of chains of one, with the microbatches divided as evenly as possible.

    Workers keep the order given. Workers beyond the number of microbatches would have nothing to do
    and are left out.
    """
    used = workers[:microbatches]
    replicas = []
    first = 0
    for index, worker in enumerate(used):
        count = microbatches // len(used) + (1 if index < microbatches % len(used) else 0)
        replicas.append(Replica(workers=(worker,), first=first, count=count))
        first += count
    return Layout(generation=generation, microbatches=microbatches, replicas=tuple(replicas))
