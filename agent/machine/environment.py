"""The environment of a worker: the machine's, without what proves who we are. No torch here.

It is a list of what is left out, not of what is let in. What a machine's image sets for scripts
(`LD_LIBRARY_PATH`, `NCCL_*`, `HF_HOME`, proxies, a token for a data set) cannot be listed, and a
script would fail without it in ways that nobody understands. What is secret is known: it was put
there by our own launch, by Ray, or it is a cloud's key under the name that the cloud's tools read.
"""

import re
from collections.abc import Mapping

# Ray's own, ours (settings may hold the password of a Redis), and what only an agent needs.
OURS = re.compile(r"RAY_|ORCHESTRATOR_|REDIS|SPOT_(HEAD|METADATA_URL|END_SIGN|DEPLOYMENT)$")
CLOUDS = re.compile(
    r"(AWS|AZURE|ARM|GOOGLE|GCP|GCLOUD|CLOUDSDK|MSI|IDENTITY)_(\w*_)?"
    r"(KEY|KEY_ID|ACCOUNT|SECRET|TOKEN|PASSWORD|CREDENTIALS|FILE|HEADER|URI|STRING)$"
)
RAYS_DEBUGGER = "PYTHONBREAKPOINT"


def of_worker(machine: Mapping[str, str]) -> dict[str, str]:
    """Return what a worker may see of its machine's environment."""
    kept = {
        name: value
        for name, value in machine.items()
        if not OURS.match(name.upper()) and not CLOUDS.match(name.upper())
    }
    if kept.get(RAYS_DEBUGGER, "").startswith("ray."):
        del kept[RAYS_DEBUGGER]
    return kept
