"""A fake account as a running cloud: machines are process groups, and the door sells them."""

import os
import sys
from pathlib import Path

from cloudfake.account.cores import Core
from cloudfake.account.imds import imds
from starlette.types import ASGIApp

from cloud.clock import Clock
from cloud.local.books import Ledger
from cloud.local.service import LocalCloud
from cloud.model import Machine

SHUTDOWN = """\
#!/bin/sh
# What `shutdown -h now` is on a machine of the fake: its power switch, the init above us.
pid=$$
while [ "$pid" -gt 1 ]; do
    if grep -qa cloud.local.machine_init "/proc/$pid/cmdline"; then
        kill -TERM "$pid"
        exit 0
    fi
    pid=$(sed -n 's/^PPid:[[:space:]]*//p' "/proc/$pid/status")
done
exit 1
"""


class AccountCloud(LocalCloud):
    """The local cloud's machinery, with the machines of an account.

    A machine finds what its image and its hardware give it, and nothing of ours: where its disk is,
    where its metadata service answers (a real one is at 169.254.169.254), which interpreter its
    image has. All else is in the user data that its launch gave it.
    """

    def __init__(self, core: Core, clock: Clock, directory: Path, image: dict[str, str]) -> None:
        nothing = directory / "no-boot"
        nothing.write_text("")
        super().__init__(core, clock, Ledger(directory / "ledger.json", ""), nothing, None)
        self._image = image
        self._bin = directory / "bin"
        self._bin.mkdir(exist_ok=True)
        switch = self._bin / "shutdown"
        switch.write_text(SHUTDOWN)
        switch.chmod(0o700)

    def record(self) -> None:
        """Write nothing: the door has the books."""

    def _metadata(self, machine: Machine) -> ASGIApp:
        return imds(self.core, self._fate(machine.id), self.clock)

    def _boot(self, machine: Machine, disk: Path) -> Path:
        script = disk / "user-data"
        script.write_text(self.core.host(machine.id).user_data or "#!/bin/sh\nexec sleep 86400\n")
        script.chmod(0o700)
        return script

    def _environment(self, machine: Machine, disk: Path, metadata_url: str) -> dict[str, str]:
        way = [str(self._bin), str(Path(sys.executable).parent), os.defpath]
        return {
            **self._image,
            "PATH": os.pathsep.join(way),
            "HOME": str(disk),
            "LANG": "C.UTF-8",
            "SPOT_PYTHON": sys.executable,
            "SPOT_METADATA_URL": metadata_url,
            "SPOT_ADDRESS": machine.address,
            "SPOT_SLOTS": str(self.core.host(machine.id).slots),
            "SPOT_TEMP_DIR": str(self._short / machine.id),
        }
