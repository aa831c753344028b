"""The first-boot script of every machine, whatever cloud it is from; also cloud-init user data.

Everybody on a machine, and everybody who may describe it, can read its user data. So there is no
secret in it: it names the join door and the fingerprint of the door's certificate, and the machine
has to prove there who it is. The text is equal for all machines of a recipe, whose digest it is
part of, and it ends the machine's own bill however the join client ended.
"""

import ipaddress
import re
from typing import Literal

Cloud = Literal["aws", "azure", "local"]
PYTHON = "/opt/spot/bin/python"  # in the image of an instance

FINGERPRINT = re.compile(r"[0-9a-f]{64}")
DEPLOYMENT = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")

# EC2 ends a machine that shuts down, because its launch says so. Azure charges for one that is shut
# down, so there the machine deletes itself. The local cloud sees that the script has ended.
ENDS: dict[str, str] = {
    "aws": """
while :; do
    shutdown -h now || true
    sleep 10
done
""",
    "azure": """
until "$python" -P -m cloud.azure.own_end; do
    sleep 10
done
""",
    "local": "",
}

# cloud-init runs user data at the first boot only, and a machine that was rebooted has a bill, too.
AGAIN = """\
cloud_init="${SPOT_CLOUD_INIT:-/var/lib/cloud}"
again="$cloud_init/scripts/per-boot/spot-orchestrator"
case "$0" in
"$again") ;;
"$cloud_init"/*)
    mkdir -p "${again%/*}"
    cp "$0" "$again"
    chmod 700 "$again"
    ;;
esac
"""

SCRIPT = """\
#!/bin/sh
# Every boot: the machine proves at the door who it is, and becomes a node of the manager's cluster.
# There is no secret here. When the join client has ended, the machine ends its own bill.
set -eu
python="${{SPOT_PYTHON:-{python}}}"
{again}{run}"$python" -P -m agent.machine.join \\
    --door {door} \\
    --fingerprint {fingerprint} \\
    --deployment {deployment} \\
    --cloud {cloud} \\
    --silent-after-s {silent_after_s:g}{otherwise}
{end}"""


def user_data(
    door: str, fingerprint: str, deployment: str, cloud: str, silent_after_s: float
) -> str:
    """Return the script that a machine runs first.

    `door` is the address of the join door, HOST:PORT with the host in numbers; `fingerprint` the
    SHA-256 of its certificate, in hexadecimal; `silent_after_s` how long the machine goes on when
    it hears no word from a manager. Raises ValueError for anything else, because the text is run by
    a shell as root.
    """
    host, _, port = door.rpartition(":")
    ipaddress.ip_address(host.strip("[]"))
    if "%" in host:  # an IPv6 scope, in which any text may be
        raise ValueError(f"the door's address has no scope, unlike {door!r}")
    if not (port.isdecimal() and 0 < int(port) < 65_536):
        raise ValueError(f"the door's address is HOST:PORT, not {door!r}")
    if not FINGERPRINT.fullmatch(fingerprint):
        raise ValueError(f"a fingerprint has 64 digits of 0-9 and a-f, not {fingerprint!r}")
    if not DEPLOYMENT.fullmatch(deployment):
        raise ValueError(f"{deployment!r} is no name of a deployment")
    if cloud not in ENDS:
        raise ValueError(f"a machine of {cloud!r} does not know how to end its own bill")
    if not 0 < silent_after_s <= 30 * 86_400:
        raise ValueError(f"a machine cannot wait {silent_after_s} s for a word")
    end = ENDS[cloud]
    return SCRIPT.format(
        python=PYTHON,
        again=AGAIN if end else "",
        run="" if end else "exec ",
        door=door,
        fingerprint=fingerprint,
        deployment=deployment,
        cloud=cloud,
        silent_after_s=silent_after_s,
        otherwise=" || true" if end else "",
        end=end.lstrip("\n"),
    )
