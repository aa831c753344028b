"""Every setting, checked once at the edge: flag > environment > file > default.

A person who mistypes gets one line that says where, what was found and what is allowed. The rest of
the system gets a frozen tree of plain values and never looks at a file or the environment again.
The models below are the only source: `orchestrator.toml` is written from them (`template`), and the
description of what is allowed is read from them.
"""

import ipaddress
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from msgspec.structs import replace
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from cloud import plain_file
from cloud.aws.settings import AwsSettings, settings_of, texts
from cloud.azure.settings import AzureSettings
from cloud.model import Billing
from cloud.ranges import COUNT_MAX, PERIOD_S_MIN
from orchestrator.errors import OrchestratorError
from orchestrator.kinds import KINDS, Kind

FILE_NAME = "orchestrator.toml"
ENV_PREFIX = "ORCHESTRATOR__"
FILE_BYTES_MAX = 64 * 1024
PROBLEMS_SHOWN_MAX = 5
SIGNS_MIN = 3  # of an idle manager's life, one a control period, before a machine gives it up
VALUE_LINES_MAX = 100  # a single value longer than this gets an approximate line number
SECRET = re.compile(
    r"secret|passw(or)?d|token|credential|(api|access|private|account)[_-]?key", re.IGNORECASE
)
STORAGES = ("file:///", "s3://", "az://", "abfss://", "gs://")
SERVICE = re.compile(r"(tcp|udp|sctp)://")
URL_PASSWORD = re.compile(r"://[^/@\s]*:[^/@\s]+@")

UNSET = "not set"
OWN: dict[str, Any] = {"manager": {"redis_url", "state_dir"}, "hooks": {"url"}}

Usd = Annotated[float, Field(ge=0, le=1e9)]
Seconds = Annotated[float, Field(ge=PERIOD_S_MIN, le=30 * 86_400)]
Port = Annotated[int, Field(ge=0, le=65_535)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")]
Text = Annotated[str, Field(min_length=1, max_length=1000, pattern=r"^[^\x00-\x1f\x7f]+$")]


class ConfigError(OrchestratorError):
    """What is wrong with the settings, one line per problem."""


class SettingsSection(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Manager(SettingsSection):
    """The manager and the folder that everything lives in."""

    state_dir: Text = ".orchestrator"
    """Folder of the journal, checkpoints and logs; relative to this file."""
    deployment: Name = "default"
    """Tag on every machine we buy; machines with another tag are never touched."""
    control_period_s: Annotated[float, Field(ge=0.1, le=3600)] = 2.0
    """How often prices are weighed and machines compared with what we intended."""
    door_port: Port = 0
    """Port of the join door, at ray.head_address; 0 keeps the port of the last time, or any."""
    usd_per_h: Usd = 0.0
    """What the manager's own machine costs; it is part of every bill and counts against budgets."""
    redis_url: Text | None = Field(default=None, examples=["redis://127.0.0.1:6379/0"])
    """A Redis of your own. Not set: a private one is started in state_dir. An address with a
    password goes into the environment: ORCHESTRATOR__MANAGER__REDIS_URL."""

    @field_validator("redis_url")
    @classmethod
    def _redis_scheme(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError('an address that starts with "redis://", "rediss://" or "unix://"')
        return value


class Ray(SettingsSection):
    """The Ray cluster that machines join. It is always protected by its own token."""

    head_address: Text = "127.0.40.1"
    """Loopback or private address that the head listens on; never a public one."""
    port: Port = 0
    """Port of the head; 0 picks a free one."""

    @field_validator("head_address")
    @classmethod
    def _private_address(cls, value: str) -> str:
        return _private(value)


class Budget(SettingsSection):
    """What may be spent by everything together. A setting that is not set means no limit."""

    total_usd: Usd | None = Field(default=None, examples=[50.0])
    """In total, for as long as state_dir lives."""
    per_h_usd: Usd | None = Field(default=None, examples=[2.5])
    """In any one hour: the price of all machines held at once."""
    on_demand_allowed: bool = True
    """May buy on-demand machines when they are the cheaper way to get the work done."""


class Buying(SettingsSection):
    """What is bought from whom: where data may be, and what moving it costs."""

    regions: Text | None = Field(default=None, examples=["us-east-1,us-east-2"])
    """Regions to buy in, with commas between them: where your data may be. Not set: anywhere."""
    egress_usd_per_gb: Usd = 0.0
    """What bringing a gigabyte of a job's state to another region costs."""
    disk_usd_per_h: Usd = 0.0
    """What the disk of one machine costs per hour, as long as it is held; no cloud refunds it."""
    quote_max_age_s: Seconds = 600.0
    """Prices of a cloud that has not answered for this long are not trusted: no spot machine is
    bought there until it answers."""


class JobSettings(SettingsSection):
    """Defaults of a job; options of `orchestrator submit` override them."""

    slots_min: Annotated[int, Field(ge=1, le=100_000)] = 1
    """Fewest workers to train with; with fewer, the job waits."""
    slots_max: Annotated[int, Field(ge=1, le=100_000)] = 4
    """Most workers to train with."""
    depth: Annotated[int, Field(ge=1, le=10_000)] | Literal["auto"] = "auto"
    """Stages of the pipeline that the model is cut into; "auto" lets the planner choose."""
    haste: Annotated[float, Field(ge=0, le=1000)] = 0.5
    """How much more per work than the cheapest a machine may cost and still be bought because the
    job ends sooner: 0 buys only the cheapest work, 1000 as much as the budget allows."""
    max_failures: Annotated[int, Field(ge=0, le=1000)] = 3
    """How many failures of the script itself are tried again: the one after them ends the job."""
    max_preemptions: Annotated[int, Field(ge=0, le=COUNT_MAX)] | None = Field(
        default=None, examples=[100]
    )
    """How many machines may be taken away before the job is given up. Not set: any number."""
    exact: bool = True
    """Whether a layout has only machines that round alike, so that the weights are the same bits in
    each. If not, unlike cards and processors train together, and the last bits depend on them."""
    nan: Literal["fail", "skip"] = "fail"
    """When the loss is not a number: "fail" the job, or "skip" the step."""
    backup_every_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 10
    """How often the state goes to the memory of the manager's machine."""
    sums: Literal["auto", "always", "never"] = "auto"
    """Whether every step waits until its gradients are on the manager's machine as well. If so, no
    step is lost, even when all machines go at once; if not, the steps since the newest state are
    trained again. "auto": not if that would take more than a fiftieth of the step, nor if they take
    16 MiB and two machines have the model. "never": also not if two machines have the model."""
    checkpoint_every_s: Seconds = 60.0
    """How often that state is written to disk."""
    max_replay_s: Seconds = 60.0
    """How much training may be repeated if everything is lost at once, where gradients would hold
    steps up on their way to the manager's machine. So often the state goes there, or, if it is too
    large for that, workers write it into storage.checkpoint_url."""
    tail_s: Seconds = 600.0
    """How long a script may go on after its loop, as to test its model, before its machines go back."""
    checkpoints_kept: Annotated[int, Field(ge=2, le=16)] = 2
    """How many of these states stay on the disk, to go on from: `orchestrator resume --from STEP`."""
    output_files: Annotated[int, Field(ge=0, le=100_000)] = 1000
    """Most files of `session.output` that are kept of a job."""
    output_bytes: Annotated[int, Field(ge=0, le=1 << 50)] = 1_073_741_824
    """Most bytes of them together."""
    transport: Literal["sockets", "nixl"] = "sockets"
    """How gradients and layers go from machine to machine. "nixl": past the processors, over
    InfiniBand or RoCE, if the machines have the package nixl-cu12. Only for a network that nobody
    else is on, because it does not ask who reads and writes there."""

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.slots_min > self.slots_max:
            reason = f"slots_min = {self.slots_min} is above slots_max = {self.slots_max}"
            raise ValueError(f"{reason}; it must be at most that", "slots_min", "slots_max")
        if self.depth != "auto" and self.depth > self.slots_max:
            reason = f"depth = {self.depth} is above slots_max = {self.slots_max}"
            raise ValueError(f"{reason}; every stage needs a worker", "depth", "slots_max")
        return self

    @property
    def stages(self) -> int | None:
        """Return the depth that was asked for; None if the planner chooses."""
        return None if self.depth == "auto" else self.depth


class Storage(SettingsSection):
    """Where states are copied to, so that they outlive the manager's machine."""

    checkpoint_url: Text | None = Field(default=None, examples=["s3://bucket/prefix"])
    """Folder or object store that the newest state of every job is copied to: file:///mnt/disk,
    s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, or with the account
    abfss://container@account.dfs.core.windows.net/prefix. Not set: nowhere. Keys come from the
    environment."""
    copy_every_s: Seconds = 300.0
    """How often a running job's state is copied there; its last one always is."""

    @field_validator("checkpoint_url")
    @classmethod
    def _storage_scheme(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(STORAGES):
            raise ValueError(f"an address that starts with {', '.join(STORAGES)}")
        return value


class Local(SettingsSection):
    """The local provider: this machine plays the cloud, with real processes and a spot market."""

    enabled: bool = True
    """Buy from the local provider. Switch it off beside a real cloud, as `orchestrator init --cloud`
    does: jobs would train on the manager's machine, too, at prices that nobody pays."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 7
    """Seed of its market: the same seed gives the same prices and preemptions."""
    tempo: Annotated[float, Field(gt=0, le=100_000)] = 1.0
    """How many seconds of market pass in one second; bills are not affected."""
    prices: Text | None = Field(default=None, examples=["prices.json"])
    """Replay prices from a file written by `aws ec2 describe-spot-price-history`. Not set: a
    synthetic market."""
    billing: Billing = "local"
    """The rule that we count its bills by: "local" is by the second; "aws_2016" is by the hour, and
    bids."""


class Aws(SettingsSection):
    """Amazon's cloud. The outputs of its account template are the values of this section."""

    enabled: bool = False
    """Buy from AWS. It needs boto3 on the manager's machine, which `make` installs."""
    regions: Text | None = Field(default=None, examples=["us-east-1,us-east-2"])
    """Regions to buy in, with commas between them."""
    types: Text = "g5.*"
    """Instance types to buy, with commas between them; "g5.*" is all sizes of g5."""
    images: Text | None = Field(default=None, examples=["us-east-1=ami-0123456789abcdef0"])
    """The machine image of each region, by its id or by an SSM parameter that holds the id."""
    subnets: Text | None = Field(default=None, examples=["us-east-1a=subnet-0123456789abcdef0"])
    """A subnet for each zone to buy in; it has to reach the manager's machine."""
    security_groups: Text | None = Field(default=None, examples=["us-east-1=sg-0123456789abcdef0"])
    """The security group of each region, which admits the deployment's own machines only."""
    instance_profile: Text | None = Field(default=None, examples=["orchestrator-default-worker"])
    """What machines may do in AWS, by the name of an instance profile. Not set: nothing."""
    drill_role: Text | None = Field(
        default=None, examples=["arn:aws:iam::111122223333:role/orchestrator-default-drill"]
    )
    """What AWS's fault injection may do in a drill, by the ARN of its role. Not set: no drills."""
    disk_gib: Annotated[int, Field(ge=8, le=16_384)] = 60
    """Size of each machine's disk; it goes when its machine goes."""
    queue_url: Text | None = Field(
        default=None, examples=["https://sqs.us-east-1.amazonaws.com/111122223333/orchestrator"]
    )
    """The queue of interruptions. Not set: only the machines themselves say that they will go."""
    certificates: Text | None = Field(default=None, examples=["aws-identity.pem"])
    """File with the certificates by which AWS signs identity documents (RSA-2048, one for each of
    the regions). Not set: no machine of AWS can join."""
    endpoint_url: Text | None = Field(default=None, examples=["http://127.0.0.1:4566"])
    """Where all calls go, for a private endpoint or a test. Not set: to AWS."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.enabled:
            self.settings()
        return self

    def settings(self) -> AwsSettings:
        """Return the section as the provider takes it; raise ValueError for what it lacks."""
        described = settings_of(
            regions=self.regions,
            images=self.images,
            subnets=self.subnets,
            security_groups=self.security_groups,
        )
        return replace(
            described,
            types=texts(self.types),
            instance_profile=self.instance_profile or "",
            disk_gib=self.disk_gib,
            queue_url=self.queue_url,
            drill_role=self.drill_role or "",
            endpoint_url=self.endpoint_url,
        )


class Azure(SettingsSection):
    """Azure: where machines are made, and of what. docs/azure.md says how to get each value.
    Keys are not set here: `az login` or a managed identity has them."""

    subscription: Text | None = Field(
        default=None, examples=["00000000-0000-0000-0000-000000000000"]
    )
    """The id of the subscription that pays. Not set: nothing is bought from Azure."""
    resource_group: Text = "spot-training"
    """Name of the group that machines are made in; a group for nothing else is easy to look through."""
    subnets: Text | None = Field(
        default=None, examples=["eastus=/subscriptions/…/subnets/machines"]
    )
    """The regions to buy in, and the id of a subnet in each, with commas between them."""
    types: Text = "Standard_NC*"
    """Sizes of machines that may be bought, with commas between them; * stands for anything."""
    image: Text | None = Field(default=None, examples=["/subscriptions/…/versions/1.0.0"])
    """The id of one version of the image that machines start from, never "latest"."""
    identity: Text | None = Field(default=None, examples=["/subscriptions/…/spot-training-machine"])
    """The id of the identity that machines get, with which they delete themselves."""
    ssh_public_key: Text | None = Field(default=None, examples=["ssh-ed25519 AAAA… me"])
    """The public key that Azure wants for every machine; no port is open for it."""
    disk_gb: Annotated[int, Field(ge=30, le=4095)] = 64
    """Size of a machine's disk; it has to hold the image."""
    certificates: Text | None = Field(default=None, examples=["azure-authorities.pem"])
    """File with the certificates of the authorities that issue metadata.azure.com. Not set: no
    machine of Azure can join."""
    sign_in: Text = "default"
    """Who the manager is: "default" is what `az login` left or the environment has, "managed" this
    machine's own identity, and anything else the client id of one of its identities."""
    endpoint: Text = "https://management.azure.com"
    """Where Azure is asked; change it for Azure's other clouds and for tests."""
    prices_endpoint: Text = "https://prices.azure.com"
    """Where the public price list is asked, without a key."""
    lists_lag_s: Seconds = 120.0
    """How long a list may miss a machine after its launch; change it with the endpoint."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.subscription is None:
            return self
        for name in ("subnets", "image", "ssh_public_key"):
            if getattr(self, name) is None:
                raise ValueError(f"{name} is not set; azure.subscription needs it", name)
        if any("=/" not in word for word in texts(self.subnets)):
            raise ValueError("region=/subscriptions/…, with commas between several", "subnets")
        return self

    def settings(self, boot_script: str) -> AzureSettings | None:
        """Return what the provider needs; None if nothing is bought from Azure."""
        if self.subscription is None:
            return None
        subnets = dict(word.split("=", 1) for word in texts(self.subnets))
        return AzureSettings(
            subscription=self.subscription,
            resource_group=self.resource_group,
            regions=tuple(subnets),
            subnets=subnets,
            types=texts(self.types),
            image=self.image or "",
            identity=self.identity or "",
            ssh_public_key=self.ssh_public_key or "",
            disk_gb=self.disk_gb,
            sign_in=self.sign_in,
            endpoint=self.endpoint,
            prices_endpoint=self.prices_endpoint,
            lists_lag_s=self.lists_lag_s,
            boot_script=boot_script,
        )


class Dashboard(SettingsSection):
    """The page that shows it all. It listens on this machine only."""

    enabled: bool = True
    """Serve the dashboard while the system is up."""
    host: Text = "127.0.0.1"
    """Loopback address to listen on; from elsewhere, use `ssh -L`."""
    port: Port = 0
    """Port to listen on; 0 picks a free one."""

    @field_validator("host")
    @classmethod
    def _loopback(cls, value: str) -> str:
        if not _address(value).is_loopback:
            raise ValueError("a loopback address such as 127.0.0.1 (from elsewhere, use ssh -L)")
        return value


class Hooks(SettingsSection):
    """A web address that is told about events, in messages as Slack takes them."""

    url: Text | None = Field(default=None, examples=["https://hooks.example.com/spot"])
    """Where to post them. If the address itself is to be kept secret, set it in the environment:
    ORCHESTRATOR__HOOKS__URL. Each message is signed with the key in STATE_DIR/hooks.token."""
    on: Text = "budget,eviction,failure,finish"
    """Kinds of events to tell, with commas between them."""

    @field_validator("url")
    @classmethod
    def _safe_to_post_to(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        here = parts.hostname in {"localhost", "127.0.0.1", "::1"}
        if parts.scheme != "https" and not (parts.scheme == "http" and here):
            raise ValueError("an address that begins with https://; http:// to this machine only")
        return value

    @field_validator("on")
    @classmethod
    def _known(cls, value: str) -> str:
        wrong = [name for name in _names(value) if name not in KINDS]
        if wrong:
            raise ValueError(f"kinds with commas between them, of {', '.join(KINDS)}")
        return value

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return tuple(kind for kind in KINDS if kind in _names(self.on))


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


class Limits(SettingsSection):
    """How long we wait and how much we keep. Everything is bounded."""

    boot_timeout_s: Seconds = 120.0
    """A machine that has not joined after this long is given back, and its pool is avoided."""
    launch_grace_s: Seconds = 30.0
    """How long a machine that we asked for may be missing from the provider's list."""
    silent_after_s: Annotated[float, Field(ge=60, le=86_400)] = 600.0
    """How long a machine goes on when it hears of no manager that lives. Then it ends itself, so
    that it does not go on costing money when the manager's machine is gone."""
    script_bytes: Annotated[int, Field(ge=1, le=64 * 1024**2)] = 1_048_576
    """Largest script that can be submitted."""
    parcel_bytes: Annotated[int, Field(ge=1, le=64 * 1024**2)] = 33_554_432
    """Most bytes that go to every worker of a job: the script, the modules beside it, and what
    --with names."""


class Config(SettingsSection):
    """All settings of a deployment."""

    manager: Manager = Manager()
    ray: Ray = Ray()
    budget: Budget = Budget()
    buying: Buying = Buying()
    job: JobSettings = JobSettings()
    storage: Storage = Storage()
    local: Local = Local()
    aws: Aws = Aws()
    azure: Azure = Azure()
    dashboard: Dashboard = Dashboard()
    hooks: Hooks = Hooks()
    limits: Limits = Limits()

    @property
    def state_dir(self) -> Path:
        return Path(self.manager.state_dir)

    @property
    def silent_after_s(self) -> float:
        """Return how long a machine waits for a word, several of which have to fit in."""
        return max(self.limits.silent_after_s, SIGNS_MIN * self.manager.control_period_s)


def in_force(config: Config) -> dict[str, str]:
    """Return the settings that a house reads once, at its start, as text by dotted key.

    A job's settings are left out, because they are read when the job is submitted, and so are the
    address of Redis and that of a hook, because they may hold a password.
    """
    sections = config.model_dump(mode="json", exclude={"job": True, **OWN})
    return {
        f"{section}.{key}": UNSET if value is None else str(value)
        for section, keys in sections.items()
        for key, value in keys.items()
    }


def stale(running: dict[str, str], wanted: dict[str, str]) -> dict[str, str]:
    """Return a sentence for every setting that has changed since the running house started."""
    return {
        key: f"{key} is {wanted[key]} in the settings now, and {was} where it runs: orchestrator down, and up again"
        for key, was in running.items()
        if wanted.get(key, was) != was
    }


def frozen(config: Config, path: Path | None) -> str:
    """Return the text of a file that gives these settings, whatever becomes of the one at `path`.

    Left out are the state directory and what may hold a password, which those who need them have
    from elsewhere.
    """
    lines = [
        f"# In force since the start, from {_safe(str(path))}. Nothing follows from changes here."
    ]
    for section, values in config.model_dump(mode="json", exclude=OWN).items():
        lines.append(f"[{section}]")
        for key, value in values.items():
            if value is not None and not URL_PASSWORD.search(str(value)):
                lines.append(f"{key} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


def load(
    path: Path | None,
    env: Mapping[str, str],
    flags: Mapping[str, str] | None = None,
    options: Mapping[str, str] | None = None,
) -> Config:
    """Return the settings in force, from `path`, the environment and the command's options.

    Without a path, `orchestrator.toml` in the current folder is read if it exists.
    `flags` are dotted keys with values as a person types them: {"budget.total_usd": "5"}. `options`
    are the same, each from the option of that name: {"job.slots_max": "8"} is what --slots-max 8
    says. Relative paths are resolved against the folder of the file, so that a command means the
    same folder wherever it is run from.
    """
    file = path if path is not None else Path(FILE_NAME)
    return read(file, read_settings(file, must_exist=path is not None), env, flags, options)


def read(
    file: Path,
    text: str,
    env: Mapping[str, str],
    flags: Mapping[str, str] | None = None,
    options: Mapping[str, str] | None = None,
) -> Config:
    """Return the settings in force if this is the text of the file, whatever stands in it now."""
    settings = _parse(file, text)
    sources: dict[tuple[str, ...], str] = {}
    _refuse_secrets(file, text, settings)
    for name, value in sorted(env.items()):
        _refuse_near_name(name, value)
        if name.startswith(ENV_PREFIX):
            keys = tuple(name.removeprefix(ENV_PREFIX).lower().split("__"))
            _put(settings, sources, keys, value, f"environment {_safe(name)}")
    for key, value in (flags or {}).items():
        _put(settings, sources, tuple(key.split(".")), value, "option --set")
    for key, value in (options or {}).items():
        own_name = key.rpartition(".")[2].replace("_", "-")
        _put(settings, sources, tuple(key.split(".")), value, f"option --{own_name}")
    try:
        config = Config.model_validate(settings)
    except ValidationError as error:
        problems = [_problem(file, text, sources, detail) for detail in error.errors()]
        shown = list(dict.fromkeys(problems))[:PROBLEMS_SHOWN_MAX]
        raise ConfigError("\n".join(shown)) from None
    return _resolve(config, file.absolute().parent)


def environment(flags: Mapping[str, str]) -> dict[str, str]:
    """Return the flags as environment variables, to hand them to a child process."""
    return {ENV_PREFIX + key.upper().replace(".", "__"): value for key, value in flags.items()}


def keys() -> Iterator[tuple[str, str]]:
    """Yield every setting as (section, key), in the order of the file."""
    for section, field in Config.model_fields.items():
        for key in _model(field.annotation).model_fields:
            yield section, key


def template() -> str:
    """Return the text of `orchestrator.toml`: every setting with its meaning and its default."""
    lines = [
        "# Settings of spot-orchestrator. Every line shows the default; change what you need.",
        "# A setting can also come from the environment (ORCHESTRATOR__BUDGET__TOTAL_USD=50) or from",
        "# an option (--set budget.total_usd=50); an option beats the environment, which beats this",
        "# file. Secrets do not belong here.",
    ]
    for section, field in Config.model_fields.items():
        model = _model(field.annotation)
        lines += ["", f"[{section}]  # {_one_line(model.__doc__ or '')}"]
        for key, info in model.model_fields.items():
            lines += wrap(
                _one_line(info.description or ""), 98, initial_indent="# ", subsequent_indent="# "
            )
            if info.default is None:
                lines.append(
                    f"# {key} = {json.dumps((info.examples or [None])[0], ensure_ascii=False)}"
                )
            else:
                lines.append(f"{key} = {json.dumps(info.default)}")
    return "\n".join(lines) + "\n"


# --- reading -------------------------------------------------------------------------------------


def read_settings(file: Path, *, must_exist: bool) -> str:
    try:
        data = plain_file.read(file, FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        if file.is_symlink():  # with limits that a person takes to be in force
            raise ConfigError(f"{file}: leads to {file.readlink()}, which is not there") from None
        if not must_exist:
            return ""
        raise ConfigError(f"{file}: no such file; `orchestrator init` writes one") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"{file}: larger than {FILE_BYTES_MAX} bytes; settings are small")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{file}:{line}: byte 0x{data[error.start]:02x} is not UTF-8 text; save it as UTF-8"
        ) from None


def _parse(file: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{file}: values are nested too deeply; settings are flat") from None
    except ValueError as error:
        message = _one_line(str(error))
        at = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", message)
        line = at[1] if at and at[1] else str(text.count("\n") + 1)
        what = _safe(message[: at.start()] if at else message)
        raise ConfigError(
            f'{file}:{line}: not TOML: {what}; expected lines such as: total_usd = 5.0 or nan = "skip"'
        ) from None


def _refuse_near_name(name: str, value: str) -> None:
    """Refuse a variable that would be a setting but for its underscores or small letters.

    It would be ignored, and a budget in it with it. Kubernetes names the ports of its services so.
    """
    if name.startswith(ENV_PREFIX) or SERVICE.match(value):
        return
    plain = name.upper().replace("_", "")
    if plain.startswith(ENV_PREFIX.rstrip("_")):
        for meant in environment({f"{section}.{key}": "" for section, key in keys()}):
            if meant.replace("_", "") == plain:
                raise ConfigError(f"environment {name}: is not read; that setting is {meant}")


def _put(
    settings: dict[str, Any],
    sources: dict[tuple[str, ...], str],
    keys: tuple[str, ...],
    value: str,
    source: str,
) -> None:
    """Set one key from the environment or a flag; parse it as TOML unless it is a text."""
    if SECRET.search(".".join(keys)):
        raise ConfigError(f"{source}: {_safe('.'.join(keys))}: {KEEP_OUT}")
    if len(keys) != 2 or keys[0] not in Config.model_fields:
        raise ConfigError(f"{source}: {_safe('.'.join(keys))} is not a setting{_nearest(keys)}")
    section = settings.setdefault(keys[0], {})
    if isinstance(section, dict):
        section[keys[1]] = _from_text(keys, value)
        sources[keys] = source


def _from_text(keys: tuple[str, ...], value: str) -> Any:
    if "text" in _allowed(keys):
        return value
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        return value


def _resolve(config: Config, folder: Path) -> Config:
    def absolute(path: str) -> str:
        try:
            return str(folder / Path(path).expanduser())
        except RuntimeError:
            raise ConfigError(
                f"{_safe(path)}: {Path(path).parts[0]} is nobody's home folder here; write the whole path"
            ) from None

    manager = config.manager.model_copy(update={"state_dir": absolute(config.manager.state_dir)})
    local, aws, azure = config.local, config.aws, config.azure
    if local.prices is not None:
        local = local.model_copy(update={"prices": absolute(local.prices)})
    if aws.certificates is not None:
        aws = aws.model_copy(update={"certificates": absolute(aws.certificates)})
    if azure.certificates is not None:
        azure = azure.model_copy(update={"certificates": absolute(azure.certificates)})
    parts = {"manager": manager, "local": local, "aws": aws, "azure": azure}
    return config.model_copy(update=parts)


# --- secrets -------------------------------------------------------------------------------------

KEEP_OUT = (
    "this looks like a secret, and secrets do not belong in settings; "
    "use the environment or the cloud's own credential files"
)


def _refuse_secrets(file: Path, text: str, settings: Mapping[str, Any]) -> None:
    for path, value in _leaves(settings):
        if SECRET.search(path[-1]) or (isinstance(value, str) and URL_PASSWORD.search(value)):
            raise ConfigError(f"{file}:{line_of(text, path)}: {_safe('.'.join(path))}: {KEEP_OUT}")


def _leaves(
    table: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


# --- saying what is wrong ------------------------------------------------------------------------


def line_of(text: str, path: tuple[str, ...]) -> int:
    """Return the line on which the key at `path` is set, found with the parser itself.

    "The shortest readable prefix of at least n lines has the key" is false up to the line before
    the key and true from there on. So bisection finds n, in whichever notation the key is written.
    """
    lines = text.splitlines(keepends=True)
    low, high = 1, max(1, len(lines))
    while low < high:
        middle = (low + high) // 2
        if _prefix_has(lines, middle, path):
            high = middle
        else:
            low = middle + 1
    return low


def _prefix_has(lines: list[str], count: int, path: tuple[str, ...]) -> bool:
    for end in range(count, min(count + VALUE_LINES_MAX, len(lines)) + 1):
        try:
            node: Any = tomllib.loads("".join(lines[:end]))
        except ValueError:
            continue
        for key in path:
            if not isinstance(node, dict) or key not in node:
                return False
            node = node[key]
        return True
    return True


def _problem(
    file: Path, text: str, sources: Mapping[tuple[str, ...], str], detail: ErrorDetails
) -> str:
    path = tuple(str(part) for part in detail["loc"])[:2]
    name, kind, found = _safe(".".join(path)), detail["type"], _found(detail["input"])
    reason, *culprits = detail["ctx"]["error"].args if kind == "value_error" else (_allowed(path),)
    paths = [(*path, culprit) for culprit in culprits] or [path]
    where = next((sources[p] for p in paths if p in sources), None)
    if where is None:
        lines = text.splitlines(keepends=True)
        set_here = [p for p in paths if _prefix_has(lines, len(lines), p)]
        where = f"{file}:{line_of(text, (set_here or [path])[0])}"
    if kind == "extra_forbidden":
        return f"{where}: {name} is not a setting{_nearest(path)}"
    if culprits:
        return f"{where}: {name}: {reason}"
    return f"{where}: {name}: found {found}; allowed: {reason}"


def _nearest(path: tuple[str, ...]) -> str:
    sections = list(Config.model_fields)
    if path[0] not in sections:
        options, prefix = sections, ""
    else:
        model = _model(Config.model_fields[path[0]].annotation)
        options, prefix = list(model.model_fields), f"{path[0]}."
        if len(path) < 2:
            return f"; allowed in [{path[0]}]: {', '.join(options)}"
    wrong = path[-1] if prefix else path[0]
    near = get_close_matches(wrong.lower(), options, n=1)
    elsewhere = [f"{section}.{key}" for section, key in keys() if key == path[-1]]
    hint = f"{prefix}{near[0]}" if near else elsewhere[0] if elsewhere else ""
    found_in = f"[{path[0]}]" if prefix else "the file"
    meant = f"; did you mean {hint}?" if hint else ""
    return f"{meant or ';'} allowed in {found_in}: {', '.join(options)}"


def _allowed(path: tuple[str, ...]) -> str:
    """Return in words what the setting at `path` accepts, read from the model's schema."""
    schema = _schema()
    definitions = schema["$defs"]
    node = schema["properties"].get(path[0], {})
    if len(path) == 1 or not node:
        return f"a section, written as [{_safe(path[0])}]"
    section = definitions[node["$ref"].rpartition("/")[2]]
    node = section["properties"].get(path[1], {})
    options = node.get("anyOf", [node])
    words = [_words(option) for option in options if option.get("type") != "null"]
    return " or ".join(words) + (", or leave it out" if len(words) < len(options) else "")


@cache
def _schema() -> dict[str, Any]:
    return Config.model_json_schema()


def _words(node: Mapping[str, Any]) -> str:
    if "enum" in node:
        return " or ".join(json.dumps(choice) for choice in node["enum"])
    if "const" in node:
        return json.dumps(node["const"])
    if node.get("type") == "boolean":
        return "true or false"
    if node.get("type") == "string":
        if "maxLength" in node:
            return f"a text in quotes, 1 to {node['maxLength']} printable characters"
        return "a text in quotes, 1 to 32 small letters, digits and dashes"
    kind = "a whole number" if node.get("type") == "integer" else "a number"
    bounds = [
        f"{word} {node[name]:.12g}"
        for name, word in (
            ("minimum", "at least"),
            ("exclusiveMinimum", "above"),
            ("maximum", "at most"),
            ("exclusiveMaximum", "below"),
        )
        if name in node
    ]
    return f"{kind}, {' and '.join(bounds)}" if bounds else kind


def _found(value: Any) -> str:
    """Return the value as one short line of TOML, with passwords in addresses hidden."""
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list):
        return "a list"
    shown = json.dumps(value) if isinstance(value, str | bool) else str(value)
    return _safe(URL_PASSWORD.sub("://***@", shown))


def _safe(text: str) -> str:
    """Return the text printable and short, so that a message that quotes it stays one line."""
    printable = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return printable if len(printable) <= 80 else f"{printable[:77]}..."


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _address(value: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        return ipaddress.ip_address(value)
    except ValueError:
        raise ValueError("an address in numbers, such as 127.0.0.1") from None


def _private(value: str) -> str:
    address = _address(value)
    if not address.is_private or address.is_unspecified or address.version != 4:
        raise ValueError(
            "a loopback or private address such as 127.0.40.1 or 10.0.0.5, never a public one or one of IPv6"
        )
    if str(address) == "127.0.0.1":
        raise ValueError(
            "another loopback address such as 127.0.40.1 (Ray swaps 127.0.0.1 for a public one)"
        )
    return value


def _model(annotation: Any) -> type[SettingsSection]:
    assert isinstance(annotation, type) and issubclass(annotation, SettingsSection), annotation
    return annotation
