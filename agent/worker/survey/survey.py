"""What one worker finds out for all: whether the script can be cut, and what is measured.

Measured are the costs of the model and the network. The step waits for it, so it has to be short,
and other workers help with what can be measured side by side. If any of it fails, the job trains on
without the answer.
"""

import logging
import sys
import traceback
from collections.abc import Mapping
from functools import partial

import msgspec

from agent.calibration import measurement, network_probe
from agent.errors import CannotRecord, Misuse
from agent.messages import UNRECORDED
from agent.pipeline.tracing.analysis import cut_points
from agent.profile import Profile
from agent.protocol import Measured, ProfileAsked, ProfileKnown, Ready, Recording
from agent.store.memory import return_memory
from agent.tensors.device import hardware
from agent.worker.peers import PeerWorker
from agent.worker.survey.helper import Helpers, Helping
from agent.world import Facts, Interrupted

log = logging.getLogger(__name__)


class Survey:
    """The survey of one worker's script, as this worker leads it or helps with it.

    `addresses` are where others are; the first is this worker's own.
    """

    def __init__(self, crew: PeerWorker, job: str, address: str) -> None:
        self._crew, self._job, self._address = crew, job, address
        self.helpers = Helpers(crew)
        self._helped_at = -1  # the generation in which this worker was asked to help, or has asked
        self.ready: Ready | None = None
        self.addresses: Mapping[str, str] = {}
        self.known: ProfileKnown | None = None  # what the keeper answered last
        self._steps_total = 0
        self._unmeasured = False  # the script can be cut, and is not measured yet
        # A profile whose network has not been measured with all kinds of peers.
        self._unprobed: Profile | None = None
        self._taken_back = False  # the script could be cut, and a later step could not
        self._probed_at = -1  # the generation in which the network was last measured

    def introduce(self, facts: Facts) -> None:
        """Report once that the script is ready and waits for a layout."""
        self._steps_total = facts.steps_total
        if self.ready is None:
            replica = self._crew.replica
            self.ready = Ready(
                microbatches=facts.microbatches,
                steps_total=facts.steps_total,
                state_bytes=replica.state_bytes,
                unbuilt=measurement.unbuilt(
                    replica.objects.values(), replica.birth_mark, replica.sums_held
                ),
                exact=replica.deterministic,
                exchange=replica.space.exchange,
                hardware=hardware(replica.space.device),
            )
            self._crew.link.send(self.ready)

    def look(self) -> None:
        """Find out what is not known yet, as the leader of the layout."""
        self.helpers.waiting = self._others_wait()
        if self.helpers.waiting:
            self._tell_recorded()
        if self._unmeasured:
            self._measure()
        self.helpers.dismiss()
        if self._unprobed is not None:
            self._probe(self._unprobed)

    def help(self) -> None:
        """Measure what the leader hands out, before this worker's share of the first step."""
        if not self._others_wait():
            return
        helping = Helping(self._crew)
        try:
            helping.help()
        except Interrupted:
            self._unmeasured |= helping.able  # the present leader may not know of it
            raise
        except (Misuse, CannotRecord):
            raise
        except Exception as error:
            self._say(f"could not help to measure the model: {error!r}")

    def _others_wait(self) -> bool:
        """Return whether all workers begin this layout with the survey, and this is its start."""
        entered, generation = self._crew.entered, self._crew.generation
        if entered is None or not entered.record or self._helped_at == generation:
            return False
        self._helped_at = generation
        return True

    def _tell_recorded(self) -> None:
        """Record the script's loop and report whether it can be cut, if that is not known."""
        assert self.ready is not None
        if self.ready.uncuttable != UNRECORDED:
            return
        self._crew.link.send(Recording())
        try:
            points = cut_points(self._crew.replica.recorder.recording().facts)
            why = "" if points else "its model has no place to be cut at"
        except CannotRecord as error:
            points, why = (), str(error)
        except Misuse:
            raise  # its numbers would depend on which worker computes what, cut or not
        except Exception as error:
            # The script is right as long as it is not cut, so it trains on in one piece.
            log.exception("the loop could not be recorded")
            said = traceback.format_exception_only(error)[-1].splitlines()[0]
            points, why = (), f"recording its loop failed: {said}"
        self.ready = msgspec.structs.replace(self.ready, uncuttable=why, stages_max=len(points) + 1)
        self._crew.link.send(self.ready)
        self._unmeasured = not why

    def take_back(self, why: str) -> bool:
        """Report that the script cannot be cut any more, because a step computes something else.

        Return False if it never could be cut; then the layout that asks for depth is wrong.
        """
        assert self.ready is not None
        if self.ready.uncuttable not in ("", UNRECORDED) and not self._taken_back:
            return False
        self._taken_back, self._unmeasured = True, False
        self.ready = msgspec.structs.replace(self.ready, uncuttable=why, stages_max=1)
        self._crew.link.send(self.ready)
        return True

    def _measure(self) -> None:
        """Measure the model, unless it was measured before."""
        replica = self._crew.replica
        recording = replica.recorder.recording()
        key = measurement.key_of(recording, self._crew.code, replica.adding)
        if not self._measured_before(key):
            self.helpers.call(measurement.machine_kind(replica.space.device), key)
            left = (self._steps_total - replica.version) * replica.microbatches
            things = replica.objects.values()
            try:
                profile = measurement.profile_of(
                    recording, things, self._job, left, self._crew.go_on, self.helpers.open
                )
                profile = msgspec.structs.replace(
                    profile,
                    key=key,
                    sums=replica.sums_held,
                    exchanged=replica.space.exchanged,
                )
                self._unmeasured, self._unprobed = False, profile
                try:
                    self.helpers.dismiss()
                    self._unprobed = self._with_network(profile)
                finally:  # an interrupted worker has still measured the model
                    self._crew.link.send(Measured(profile=self._unprobed))
                    return_memory()
            except Interrupted:
                raise
            except Exception as error:  # a job trains without a profile too
                self._say(
                    "the model was not measured, and trains as it is: which layout is best for it is not known "
                    f"({type(error).__name__}: {error})"
                )
        self._unmeasured = False

    def _say(self, what: str) -> None:
        sys.stderr.write(f"{what}\n")  # shown in the job's log, under the worker's name

    def _measured_before(self, key: str) -> bool:
        link = self._crew.link
        while True:
            asked_at = link.connects
            link.send(ProfileAsked(key=key))
            found = self._crew.wait(partial(self._answer, key, asked_at))
            if isinstance(found, ProfileKnown):
                self._unprobed = found.unprobed
                return found.known

    def _answer(self, key: str, asked_at: int) -> ProfileKnown | bool:
        """Return the keeper's answer, or True if the keeper was restarted and must be asked again.

        Return False as long as there is neither.
        """
        if self.known is not None and self.known.key == key:
            return self.known
        return self._crew.link.connects != asked_at

    def _probe(self, profile: Profile) -> None:
        """Measure the network once per layout, as a new layout may have new kinds of neighbours."""
        if self._probed_at == self._crew.generation:
            return
        try:
            found = self._with_network(profile)
        except Interrupted:
            raise
        except Exception as error:  # a job trains without knowing the network too
            self._unprobed = None
            self._say(f"the network was not measured: {error!r}")
            return
        if found != profile:
            self._crew.link.send(Measured(profile=found))
        self._unprobed = None if found.network_from == "measured" else found

    def _with_network(self, profile: Profile) -> Profile:
        self._probed_at = self._crew.generation
        host = self._address.rpartition(":")[0]
        near, far = list[str](), list[str]()
        for peer in self._crew.layout.workers:
            if peer != self._crew.me and peer in self.addresses:
                there = self.addresses[peer].rpartition(":")[0]
                (near if there == host else far).append(peer)
        return network_probe.probed(profile, near, far, self._crew, self._crew.replica.version)
