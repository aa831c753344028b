"""A fake account as its process: started, asked, ended."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import httpx
import msgspec
from cloudfake.arm import GROUP, IDENTITY, IMAGE, SUBNET, SUBSCRIPTION

READY_S_MAX = 60.0
END_S_MAX = 20.0
KEY_ID, SECRET = "AKIDFAKE", "a-secret-of-the-fake"
TESTS = Path(__file__).parents[2]

AWS = """\
[aws]
enabled = true
regions = "us-east-1"
types = "{types}"
images = "us-east-1=ami-us-east-1"
subnets = "us-east-1a=subnet-us-east-1a,us-east-1b=subnet-us-east-1b"
security_groups = "us-east-1=sg-us-east-1"
instance_profile = "workers"
certificates = "{certificates}"
endpoint_url = "{url}"
"""
AZURE = f"""\
[azure]
subscription = "{SUBSCRIPTION}"
resource_group = "{GROUP}"
subnets = "eastus={SUBNET}"
types = "{{types}}"
image = "{IMAGE}"
identity = "{IDENTITY}"
ssh_public_key = "ssh-ed25519 AAAA trainer"
sign_in = "managed"
certificates = "{{certificates}}"
endpoint = "{{url}}"
prices_endpoint = "{{url}}"
lists_lag_s = 15
"""
SECTION = {"aws": AWS, "azure": AZURE}
TYPES = {"aws": "g5.xlarge", "azure": "Standard_NC4as_T4_v3"}
DISK_USD_PER_H = {"aws": 60 * 0.08 / 730, "azure": 0.006}

Cloud = Literal["aws", "azure"]


class Running:
    """The account whose process has written `account.json`."""

    def __init__(self, cloud: Cloud, directory: Path) -> None:
        told = msgspec.json.decode((directory / "account.json").read_bytes())
        self.cloud, self.directory, self.secret = cloud, directory.absolute(), SECRET
        self.url, self.pid = str(told["url"]), int(told["pid"])
        self._http = httpx.Client(base_url=told["desk"], trust_env=False, timeout=10.0)
        self.desk = str(told["desk"])

    def books(self) -> dict[str, Any]:
        return dict(self._http.get("/books").raise_for_status().json())

    def drill(self, deployment: str, nodes: int | str, warning_s: float) -> list[str]:
        wanted = {"deployment": deployment, "nodes": nodes, "warning_s": warning_s}
        return list(self._http.post("/drill", json=wanted).raise_for_status().json())

    def settings(self) -> str:
        """Return the section of this cloud for orchestrator.toml."""
        return SECTION[self.cloud].format(
            url=self.url,
            types=TYPES[self.cloud],
            certificates=self.directory / "certificates.pem",
        )

    def environment(self) -> dict[str, str]:
        """Return how the manager's machine finds its keys."""
        if self.cloud == "aws":
            return {
                "AWS_ACCESS_KEY_ID": KEY_ID,
                "AWS_SECRET_ACCESS_KEY": SECRET,
                "AWS_EC2_METADATA_DISABLED": "true",
            }
        return {"AZURE_POD_IDENTITY_AUTHORITY_HOST": self.desk}

    def close(self) -> None:
        self._http.close()


@contextlib.contextmanager
def running(
    cloud: Cloud, directory: Path, *words: str, environment: Mapping[str, str] | None = None
) -> Iterator[Running]:
    """Run an account for as long as the block lasts."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    known = environment if environment is not None else os.environ
    path = os.pathsep.join(
        filter(None, [str(TESTS.parent), str(TESTS), known.get("PYTHONPATH", "")])
    )
    keys = {"AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET}
    arguments = [sys.executable, "-m", "cloudfake.account", "--cloud", cloud]
    arguments += ["--dir", str(directory), *words]
    with (directory / "account.log").open("ab") as log:
        process = subprocess.Popen(
            arguments,
            env={**known, **keys, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    account = None
    try:
        account = _waited_for(cloud, directory, process)
        yield account
    finally:
        if account is not None:
            account.close()
        process.terminate()
        try:
            process.wait(END_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _waited_for(cloud: Cloud, directory: Path, process: "subprocess.Popen[bytes]") -> Running:
    deadline_s = time.monotonic() + READY_S_MAX
    while time.monotonic() < deadline_s and process.poll() is None:
        if (directory / "account.json").exists():
            return Running(cloud, directory)
        time.sleep(0.02)
    raise RuntimeError(f"the fake account did not start: {(directory / 'account.log').read_text()}")
