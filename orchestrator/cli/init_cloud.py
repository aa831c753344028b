"""The settings of a real cloud: three questions, then the outputs of the account's template.

What is written is said, and what is not known yet is the next command. A setting is changed in its
own line, so that everything else in a person's file stays.
"""

import json
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import typer

from cloud import plain_file
from cloud.aws.settings import pairs, texts
from orchestrator.cli.command import USAGE, Command, CommandError
from orchestrator.clouds import joining, real, region_of_buckets
from orchestrator.config import Config, ConfigError, load, read_settings, template

IMAGE_PARAMETER = "/orchestrator/image"
REGION = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
STORES_REGION = "us-east-1"  # where a bucket is looked for without AWS_REGION
BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[\w./-]+)?")
SUBSCRIPTION = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
TYPES = re.compile(r"[A-Za-z0-9_.*, -]+")
OUTPUTS_BYTES_MAX = 1 << 20

Changes = dict[str, dict[str, str | bool]]


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """What a person says about a cloud, by options."""

    region: str | None = None
    types: str | None = None
    bucket: str | None = None
    subscription: str | None = None
    image: str | None = None
    ssh_key: Path | None = None
    outputs: Path | None = None


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """What is in the file now, what its machines lack to join, and what to type next."""

    path: str
    cloud: str
    whole: bool
    settings: Changes
    lacking: tuple[str, ...]
    then: tuple[str, ...]


def write(command: Command, path: Path, cloud: str, said: Said) -> Written:
    """Put what is said of a cloud into the settings, or write them first if there are none."""
    text = read_settings(path, must_exist=False) or template()
    before = _parsed(path, text)
    asked = _Asker(command, before)
    changes, then = (_aws if cloud == "aws" else _azure)(before, said, asked)
    if not then and cloud not in real(before) and before.local.enabled:
        changes["local"] = {"enabled": False}  # it would sell this machine, at prices nobody pays
    for section, keys in changes.items():
        for key, value in keys.items():
            text = _put(path, text, section, key, value)
    after = _checked(path, text)
    _replace(path, text)
    name = shlex.quote(str(path))
    more = "" if command.given_path is None else f" --config {name}"
    whole = not then
    followed = (*(x + more if x.startswith("orchestrator") else x for x in then),)
    return Written(
        path=str(path.absolute()),
        cloud=cloud,
        whole=whole,
        settings=changes,
        lacking=tuple(f"{one.found}; {one.remedy}" for one in joining(after, [cloud]) if not one.ok)
        + (_store_elsewhere(after, os.environ) if cloud == "aws" else ()),
        then=followed or (f"orchestrator check{more}", f"orchestrator up{more}"),
    )


def _store_elsewhere(config: Config, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return a sentence if the bucket would be looked for in a region that is not bought in."""
    url, regions = config.storage.checkpoint_url or "", texts(config.aws.regions)
    told = region_of_buckets(env)
    if not (url.startswith("s3://") and regions) or (told or STORES_REGION) in regions:
        return ()
    return (
        f"AWS_REGION is {told or 'not set'}, so {url} is looked for in {told or STORES_REGION}; "
        f"export AWS_REGION={regions[0]} where orchestrator check and up are typed",
    )


# --- each cloud ----------------------------------------------------------------------------------


def _aws(before: Config, said: Said, ask: "_Asker") -> tuple[Changes, tuple[str, ...]]:
    known, outputs = before.aws, _outputs(said.outputs)
    first = texts(known.regions)
    from_outputs = next(iter(pairs(outputs.get("security_groups"))), None)
    region = said.region or from_outputs or (first[0] if first else None)
    region = ask("--region", "Region", region, REGION, "us-east-1")
    types = said.types or (known.types if first or outputs else None)
    types = ask("--types", "Instance types", types, TYPES, "g5.*")
    kept = before.storage.checkpoint_url or ""
    bucket = said.bucket or (kept.removeprefix("s3://") if kept.startswith("s3://") else None)
    bucket = ask("--bucket", "Bucket for the states", bucket, BUCKET, "")
    image = said.image or pairs(known.images).get(region) or IMAGE_PARAMETER
    aws: dict[str, str | bool] = {"types": types}
    for key in ("subnets", "security_groups"):
        merged = pairs(getattr(known, key)) | pairs(outputs.get(key))
        if merged:
            aws[key] = _joined(merged)
    for key in ("instance_profile", "queue_url", "drill_role"):
        if outputs.get(key) and getattr(known, key) is None:
            aws[key] = outputs[key]
    groups = pairs(str(aws.get("security_groups", "")))
    regions = [*dict.fromkeys((*first, region))]
    lacking = [x for x in regions if x not in groups]
    if not known.enabled or region in groups:  # a region without its parts would close the others
        aws["regions"] = ",".join(regions)
        aws["images"] = _joined(pairs(known.images) | {region: image})
    aws["enabled"] = known.enabled or not lacking
    changes: Changes = {"aws": aws}
    if not kept and not lacking:
        changes["storage"] = {"checkpoint_url": f"s3://{bucket}"}
    name = f"orchestrator-{before.manager.deployment}"
    then: list[str] = []
    for one in lacking:
        then += [
            f"aws cloudformation deploy --region {one} --stack-name {name} "
            f"--template-file {_shipped('aws', 'account.json')} "
            "--capabilities CAPABILITY_NAMED_IAM --parameter-overrides "
            f"Bucket={bucket.partition('/')[0]} Deployment={before.manager.deployment}"
            + (f" Network=10.{60 + regions.index(one)}.0.0/16" if one != regions[0] else ""),
            f"aws cloudformation describe-stacks --region {one} --stack-name {name} > {one}.json",
        ]
        if image == IMAGE_PARAMETER:
            then.append(
                f"aws ssm put-parameter --region {one} --name {IMAGE_PARAMETER} --type String "
                "--overwrite --value ami-YOURS"
            )
        more = "" if kept else f" --bucket {bucket}"
        if said.image and "images" not in aws:
            more += f" --image {shlex.quote(said.image)}"
        then.append(f"orchestrator init --cloud aws --region {one}{more} --outputs {one}.json")
    return changes, tuple(then)


def _azure(before: Config, said: Said, ask: "_Asker") -> tuple[Changes, tuple[str, ...]]:
    known, outputs = before.azure, _outputs(said.outputs)
    subnets = dict(word.split("=", 1) for word in texts(known.subnets))
    account = ask(
        "--subscription", "Subscription", said.subscription or known.subscription, SUBSCRIPTION, ""
    )
    region = said.region or next(iter(subnets), None)
    region = ask("--region", "Region", region, REGION, "eastus")
    types = said.types or (known.types if subnets or outputs else None)
    types = ask("--types", "Sizes", types, TYPES, "Standard_NC*")
    if "subnet" in outputs:
        subnets[region] = outputs["subnet"]
    azure: dict[str, str | bool] = {"types": types}
    if subnets:
        azure["subnets"] = _joined(subnets)
    if identity := (known.identity or outputs.get("identity")):
        azure["identity"] = identity
    if image := (said.image or known.image):
        azure["image"] = image
    if key := (_public_key(said.ssh_key) or known.ssh_public_key):
        azure["ssh_public_key"] = key
    group = known.resource_group
    missing = [x for x in ("subnets", "image", "ssh_public_key") if x not in azure]
    if region not in subnets and "subnets" not in missing:
        missing.insert(0, "subnets")
    if not missing:
        azure["subscription"] = account  # only now: with it the section has to be whole
        return {"azure": azure}, ()
    then = []
    if "subnets" in missing:
        deploy = (
            f"az deployment group create --subscription {account} -g {group} --template-file "
            f"{_shipped('azure', 'template.json')} --parameters location={region}"
        )
        kept = f" --query properties.outputs > {region}.json"
        then = [f"{deploy} addresses=10.{40 + len(subnets)}.0.0/16{kept}"]
    if "subnets" in missing and not subnets:  # the group and the role are there for all regions
        role = _shipped("azure", "role.json")
        then = [
            f"az group create --subscription {account} -n {group} -l {region}",
            f"{deploy}{kept}",
            f'az role definition create --role-definition "$(sed s/SUBSCRIPTION/{account}/ {role})"',
            f'az role assignment create --role "Spot orchestrator manager" --scope '
            f'/subscriptions/{account} --assignee "$(az identity show --subscription {account} '
            f'-g {group} -n {group}-manager --query principalId -o tsv)"',
        ]
    if "ssh_public_key" in missing:
        then.append("ssh-keygen -t ed25519")
    words = f"orchestrator init --cloud azure --subscription {account} --region {region}"
    if "subnets" in missing:
        words += f" --outputs {region}.json"
    if "image" in missing:
        words += " --image /subscriptions/YOURS/versions/1.0.0"
    return {"azure": azure}, (*then, words)


def _outputs(file: Path | None) -> dict[str, str]:
    """Return what a template's outputs say, by the name of the setting that each is for."""
    if file is None:
        return {}
    try:
        if file.stat().st_size > OUTPUTS_BYTES_MAX:
            raise CommandError(f"--outputs {file}: larger than {OUTPUTS_BYTES_MAX} bytes", USAGE)
        told = json.loads(plain_file.read(file))
    except OSError as error:
        raise CommandError(f"--outputs {file}: {error.strerror}", USAGE) from None
    except (ValueError, RecursionError):
        raise CommandError(
            f"--outputs {file}: not JSON; write it with the command that init names", USAGE
        ) from None
    try:
        found = _aws_outputs(told) if "Stacks" in told else _azure_outputs(told)
    except (LookupError, TypeError, AttributeError):
        found = {}
    if not found:
        raise CommandError(
            f"--outputs {file}: no outputs of our template are in it; apply the template first",
            USAGE,
        )
    return found


def _aws_outputs(told: Any) -> dict[str, str]:
    """Each output of the template names its setting in its description."""
    listed = told["Stacks"][0]["Outputs"]
    known = {str(x.get("Description")): str(x["OutputValue"]) for x in listed}
    return {
        name.removeprefix("aws."): value for name, value in known.items() if name.startswith("aws.")
    }


def _azure_outputs(told: Any) -> dict[str, str]:
    inner = (told.get("properties") or told).get("outputs", told)
    return {
        name: str(one["value"]) for name, one in inner.items() if name in ("subnet", "identity")
    }


def _public_key(file: Path | None) -> str | None:
    """Return the public key in a file, or the first one of this user."""
    if file is None:
        return next(
            (_key(one) for one in sorted((Path.home() / ".ssh").glob("*.pub")) if _key(one)), None
        )
    if (key := _key(file)) is None:
        raise CommandError(f"--ssh-key {file}: holds no public key such as ssh-ed25519 AAAA", USAGE)
    return key


def _key(file: Path) -> str | None:
    try:
        line = plain_file.read(file).decode().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return line if line.startswith(("ssh-", "ecdsa-")) and "\n" not in line else None


def _joined(of: Mapping[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in of.items())


def _shipped(cloud: str, name: str) -> str:
    return shlex.quote(str(resources.files(f"cloud.{cloud}").joinpath(name)))


class _Asker:
    """Asks for what no option and no file says, if there is somebody to ask."""

    def __init__(self, command: Command, before: Config) -> None:
        self._may_ask = sys.stdin is not None and sys.stdin.isatty() and not command.json
        self._before = before

    def __call__(
        self, option: str, what: str, known: str | None, form: re.Pattern[str] | None, usual: str
    ) -> str:
        if known is None:
            if not self._may_ask:
                example = usual or "VALUE"
                raise CommandError(f"{option} is needed, for example {option} {example}", USAGE)
            known = str(typer.prompt(what, default=usual or None)).strip()
        if not known or (form is not None and form.fullmatch(known) is None):
            raise CommandError(f"{option} {known}: not the form of a {what.lower()}", USAGE)
        return known


# --- the file ------------------------------------------------------------------------------------


def _parsed(path: Path, text: str) -> Config:
    """Return the settings of the file alone: what the environment says is not to be written."""
    return _with_text(path, text, lambda file: load(file, {}))


def _checked(path: Path, text: str) -> Config:
    try:
        return _parsed(path, text)
    except ConfigError as error:
        raise CommandError(
            f"{path} is left as it is: {str(error).splitlines()[0]}", USAGE
        ) from None


def _with_text(path: Path, text: str, read: Callable[[Path], Config]) -> Config:
    """Read a text as if it were the file already; a mistake is said of the file."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        draft.write_text(text)
        return read(draft)
    except ConfigError as error:
        raise ConfigError(str(error).replace(str(draft), str(path))) from None
    except OSError as error:
        raise CommandError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        draft.unlink(missing_ok=True)


def _put(path: Path, text: str, section: str, key: str, value: str | bool) -> str:
    """Return the text with one setting changed in its own line, or added to its section."""
    was = tomllib.loads(text)
    lines = text.splitlines(keepends=True)
    line = f"{key} = {json.dumps(value, ensure_ascii=False)}\n"
    heads = [nth for nth, one in enumerate(lines) if re.match(rf"\[{section}\]", one)]
    if heads:
        first = heads[0] + 1
        last = next((n for n in range(first, len(lines)) if lines[n].startswith("[")), len(lines))
        places = [n for n in range(first, last) if re.match(rf"(# )?{key} *=", lines[n])]
        if places:
            lines[places[-1]] = line
        else:
            lines.insert(first, line)
    else:
        lines += ["" if text.endswith("\n") or not text else "\n", f"\n[{section}]\n", line]
    changed = "".join(lines)
    wanted = {**was, section: {**was.get(section, {}), key: value}}
    try:
        good = tomllib.loads(changed) == wanted
    except tomllib.TOMLDecodeError:
        good = False
    if not good:
        raise CommandError(
            f"{path}: {section}.{key} is written in a way that is not changed here; set it by hand: "
            f"{line.strip()}"
        )
    return changed


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.draft")
    try:
        draft.write_text(text)
        if path.exists():
            draft.chmod(path.stat().st_mode & 0o777)
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise CommandError(f"{path}: cannot be written: {error.strerror}") from None
