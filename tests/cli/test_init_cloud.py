"""The settings of a real cloud, from three questions and from the outputs of its template."""

import json
import os
import pty
import re
import shlex
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path

import pytest
from test_check_clouds import SIGNERS, arm, ec2

from orchestrator.config import load, template

assert ec2, arm  # fixtures
ACCOUNT = "00000000-1111-2222-3333-444444444444"
GROUP = f"/subscriptions/{ACCOUNT}/resourceGroups/training/providers"
SUBNET = f"{GROUP}/Microsoft.Network/virtualNetworks/net/subnets/machines"
IMAGE = f"{GROUP}/Microsoft.Compute/galleries/images/images/instance/versions/1.0.0"
ON_AWS = shlex.split("init --cloud aws --region us-east-1 --types g5.* --bucket states")
ON_AZURE = shlex.split(
    f"init --cloud azure --subscription {ACCOUNT} --region eastus --types Standard_NC*"
)


def aws_outputs(region: str = "us-east-1") -> dict:
    """What `describe-stacks` says of our template: its own outputs, with values."""
    text = resources.files("cloud.aws").joinpath("account.json").read_text()
    values = {
        "Subnets": f"{region}a=subnet-{region}a,{region}b=subnet-{region}b",
        "SecurityGroups": f"{region}=sg-{region}",
        "InstanceProfile": "workers",
        "QueueUrl": f"https://sqs.{region}.amazonaws.com/111122223333/orchestrator",
        "ManagerProfile": "manager",
    }
    outputs = [
        {"OutputKey": key, "OutputValue": values.get(key, key), "Description": one["Description"]}
        for key, one in json.loads(text)["Outputs"].items()
    ]
    return {"Stacks": [{"StackName": "orchestrator", "Outputs": outputs}]}


def azure_outputs() -> dict:
    named = {"subnet": SUBNET, "identity": f"{GROUP}/Microsoft.ManagedIdentity/x/machine"}
    return {key: {"type": "String", "value": value} for key, value in named.items()}


def settings(shell, name: str = "orchestrator.toml") -> dict:
    return tomllib.loads((shell.folder / name).read_text())


def test_three_answers_make_the_next_commands(shell):
    """The template that is named is there and takes what it is given; nothing is bought yet."""
    answer = shell(*ON_AWS, "--json").json
    assert answer["whole"] is False
    deploy, describe, image, again = answer["then"]
    words = shlex.split(deploy)
    file = json.loads(Path(words[words.index("--template-file") + 1]).read_text())
    given = {word.partition("=")[0] for word in words[words.index("--parameter-overrides") + 1 :]}
    assert given <= set(file["Parameters"])
    needed = {name for name, one in file["Parameters"].items() if "Default" not in one}
    assert needed <= given
    assert file["Parameters"]["ImageParameter"]["Default"] in image
    assert describe.endswith("> us-east-1.json")
    assert (
        settings(shell)["aws"] | {"regions": "us-east-1", "enabled": False}
        == settings(shell)["aws"]
    )
    (shell.folder / "us-east-1.json").write_text(json.dumps(aws_outputs()))
    assert shell(*shlex.split(again)[1:], "--json").json["whole"] is True


def test_what_init_wrote_is_what_check_finds_good(shell, ec2):
    """From no file over the outputs of the template to an account in which every part is right."""
    written = shell.folder / "orchestrator.toml"
    url = re.search(r'endpoint_url = "(.*)"', written.read_text())[1]
    written.unlink()
    (shell.folder / "out.json").write_text(json.dumps(aws_outputs()))
    assert shell(*ON_AWS, "--outputs", "out.json", "--image", "ami-us-east-1").code == 0
    config = load(written, {})
    assert config.aws.enabled
    assert config.storage.checkpoint_url == "s3://states"
    here = ("--set", f"aws.endpoint_url={url}")
    lacking = shell("check", *here, "--json").json["checks"]
    assert [one["name"] for one in lacking if not one["ok"]] == ["aws certificates"]
    answer = shell("check", *here, "--set", f"aws.certificates={shell.folder / 'signers.pem'}")
    assert answer.code == 0, answer.out


def test_only_the_lines_of_the_cloud_change(shell):
    """Comments, other sections and their order stay, and a second time nothing changes."""
    mine = '# mine\n[job]\nslots_max = 9  # nine\n\n[aws]\n# my comment\ntypes = "p4d.*"\n'
    shell.script("orchestrator.toml", mine)
    (shell.folder / "out.json").write_text(json.dumps(aws_outputs()))
    assert (
        shell(*ON_AWS[:-4], "--types", "g5.*", "--bucket", "states", "--outputs", "out.json").code
        == 0
    )
    text = (shell.folder / "orchestrator.toml").read_text()
    assert text.startswith("# mine\n[job]\nslots_max = 9  # nine\n")
    assert "# my comment\n" in text
    assert settings(shell)["aws"]["types"] == "g5.*"
    shell("init", "--cloud", "aws", "--outputs", "out.json")
    assert (shell.folder / "orchestrator.toml").read_text() == text


def test_an_option_of_a_cloud_without_one_is_refused(shell):
    """A region alone would be left out of the file that is written."""
    refused = shell("init", "--region", "eu-west-1")
    assert refused.code == 2
    assert "--region: belongs to --cloud aws or --cloud azure" in refused.line
    assert not (shell.folder / "orchestrator.toml").exists()


def test_a_second_region_is_added_to_the_first(shell):
    """Its network has other addresses, and until it has its parts the first one buys alone."""
    for region in ("us-east-1", "us-west-2"):
        (shell.folder / f"{region}.json").write_text(json.dumps(aws_outputs(region)))
    shell(*ON_AWS, "--outputs", "us-east-1.json")
    alone = settings(shell)
    words = ("--region", "us-west-2", "--image", "ami-0123")
    more = shell("init", "--cloud", "aws", *words, "--json").json
    assert more["whole"] is False
    assert "Network=10.61.0.0/16" in more["then"][0]
    assert "--image ami-0123" in more["then"][-1]
    assert settings(shell) == alone
    assert alone["aws"]["enabled"] is True
    shell("init", "--cloud", "aws", "--region", "us-west-2", "--outputs", "us-west-2.json")
    regions = load(shell.folder / "orchestrator.toml", {}).aws.settings().regions
    assert [(x.name, len(x.subnets)) for x in regions] == [("us-east-1", 2), ("us-west-2", 2)]
    assert settings(shell)["aws"]["enabled"] is True


def test_azure_is_written_once_it_is_whole(shell, arm):
    """Until then no subscription is set, so that no command complains; then check finds it good."""
    url = re.search(r'endpoint = "(.*)"', (shell.folder / "orchestrator.toml").read_text())[1]
    (shell.folder / "orchestrator.toml").write_text(template())
    key = shell.script("id.pub", "ssh-ed25519 AAAA me\n")
    first = shell(*ON_AZURE, "--ssh-key", key, "--json").json
    assert first["whole"] is False
    assert "subscription" not in settings(shell)["azure"]
    words = shlex.split(first["then"][1])
    file = json.loads(Path(words[words.index("--template-file") + 1]).read_text())
    assert words[words.index("--parameters") + 1].partition("=")[0] in file["parameters"]
    assert {"subnet", "identity"} <= set(file["outputs"])
    (shell.folder / "eastus.json").write_text(json.dumps(azure_outputs()))
    last = shlex.split(first["then"][-1].replace("/subscriptions/YOURS/versions/1.0.0", IMAGE))
    done = shell(*last[1:], "--json")
    assert done.json.get("whole") is True, done.out
    assert settings(shell)["azure"]["subscription"] == ACCOUNT
    assert settings(shell)["local"]["enabled"] is False  # as on AWS: with the last part
    more = (
        "azure.sign_in=managed",
        f"azure.endpoint={url}",
        f"azure.prices_endpoint={url}",
        "azure.resource_group=training",
        f"azure.certificates={shell.folder / 'signers.pem'}",
    )
    answer = shell("check", *(word for one in more for word in ("--set", one)))
    assert answer.code == 0, answer.out


def test_the_cloud_that_this_machine_plays_is_switched_off_once(shell):
    """Else jobs would train on the manager's machine, at prices of a game; who switches it on again has it."""
    (shell.folder / "aws.json").write_text(json.dumps(aws_outputs()))
    shell(*ON_AWS)
    assert settings(shell)["local"]["enabled"] is True
    whole = shell(*ON_AWS, "--outputs", "aws.json")
    assert "local.enabled = False" in whole.out
    assert settings(shell)["local"]["enabled"] is False
    written = shell.folder / "orchestrator.toml"
    both = written.read_text().replace("enabled = false", "enabled = true")
    written.write_text(both)
    shell(*ON_AWS, "--outputs", "aws.json")
    assert written.read_text() == both


def test_a_bucket_outside_of_the_stores_own_region_needs_a_word(shell, monkeypatch):
    """Else it is looked for in us-east-1, where it is not."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    (shell.folder / "out.json").write_text(json.dumps(aws_outputs("eu-west-1")))
    words = (*ON_AWS[:3], "--region", "eu-west-1", *ON_AWS[5:], "--outputs", "out.json", "--json")
    said = [one for one in shell(*words).json["lacking"] if "AWS_REGION" in one]
    assert said[0].startswith("AWS_REGION is not set, so s3://states is looked for in us-east-1; ")
    assert "export AWS_REGION=eu-west-1" in said[0]
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    assert not any("AWS_REGION" in one for one in shell(*words).json["lacking"])


@pytest.mark.parametrize(("words", "name"), [(ON_AWS, "aws"), (ON_AZURE, "azure")])
def test_what_no_template_makes_is_named(shell, words, name):
    """The certificates and the address of the head, until they are set."""
    certificates, head = f"{name}.certificates is not set", "ray.head_address is 127.0.40.1"
    answer = shell(*words)
    said = [line for line in answer.out.splitlines() if line.startswith("set by hand: ")]
    assert [any(x in line for line in said) for x in (certificates, head)] == [True, True]
    assert len(said) == 2
    written = shell.folder / "orchestrator.toml"
    shell.script("signers.pem", SIGNERS)
    text = written.read_text().replace('head_address = "127.0.40.1"', 'head_address = "10.0.0.5"')
    kept = {"aws": "aws-identity", "azure": "azure-authorities"}[name]
    line = f'certificates = "{kept}.pem"'
    assert f"# {line}" in text
    written.write_text(text.replace(f"# {line}", 'certificates = "signers.pem"'))
    again = shell(*words, "--json").json
    assert again["lacking"] == []


def test_each_region_has_its_own_addresses_and_what_is_common_is_made_once(shell):
    """A third network of AWS; of Azure no second group, and no second role."""
    for region in ("us-east-1", "us-west-2"):
        (shell.folder / f"{region}.json").write_text(json.dumps(aws_outputs(region)))
        shell(*ON_AWS[:3], "--region", region, *ON_AWS[5:], "--outputs", f"{region}.json")
    third = shell("init", "--cloud", "aws", "--region", "eu-west-1", "--json").json["then"][0]
    assert "Network=10.62.0.0/16" in third
    (shell.folder / "eastus.json").write_text(json.dumps(azure_outputs()))
    key = shell.script("id.pub", "ssh-ed25519 AAAA me\n")
    more = ("--ssh-key", key, "--image", IMAGE)
    assert shell(*ON_AZURE, *more, "--outputs", "eastus.json").code == 0
    second = shell("init", "--cloud", "azure", "--region", "westus2", "--json").json["then"]
    assert [x.partition(" --")[0] for x in second] == [
        "az deployment group create",
        "orchestrator init",
    ]
    assert "location=westus2 addresses=10.41.0.0/16" in second[0]
    text = resources.files("cloud.azure").joinpath("template.json").read_text()
    assert "parameters('location'), '-net')" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--cloud", "aws"), "--region is needed, for example --region us-east-1"),
        (("--cloud", "aws", "--region", "US EAST"), "--region US EAST: not the form of a region"),
        ((*ON_AWS[1:], "--outputs", "none.json"), "--outputs none.json: No such file"),
        ((*ON_AWS[1:], "--outputs", "bad.json"), "--outputs bad.json: not JSON"),
        ((*ON_AWS[1:], "--outputs", "other.json"), "no outputs of our template"),
        (("--cloud", "azure"), "--subscription is needed"),
        (("--cloud", "azure", "--subscription", "mine"), "not the form of a subscription"),
        ((*ON_AZURE[1:], "--ssh-key", "bad.json"), "holds no public key"),
    ],
)
def test_what_cannot_be_written_is_one_line(shell, words, said):
    """And the file is as it was."""
    shell.script("bad.json", "{")
    shell.script("other.json", '{"Stacks": []}')
    answer = shell("init", *words)
    assert (answer.code, said in answer.line) == (2, True), answer.err
    assert not (shell.folder / "orchestrator.toml").exists()
    assert not list(shell.folder.glob(".*draft"))


def test_a_section_that_is_written_in_another_way_is_left_to_the_person(shell):
    """Inline tables, for one."""
    shell.script("orchestrator.toml", 'aws = {types = "p4d.*"}\n')
    answer = shell(*ON_AWS)
    assert (answer.code, "set it by hand" in answer.line) == (1, True)
    assert settings(shell) == {"aws": {"types": "p4d.*"}}


def test_on_a_terminal_three_questions_are_asked(shell):
    """What is in brackets is taken with the return key."""
    leader, terminal = pty.openpty()
    program = subprocess.Popen(
        [sys.executable, "-m", "orchestrator", "init", "--cloud", "aws"],
        cwd=shell.folder,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        close_fds=True,
    )
    os.close(terminal)
    shown = b""
    for question, said in ((b"Region", b""), (b"Instance types", b"g6.*"), (b"Bucket", b"states")):
        while question not in shown:
            shown += os.read(leader, 1024)
        os.write(leader, said + b"\n")
    assert program.wait(60) == 0
    os.close(leader)
    written = settings(shell)["aws"]
    assert (written["regions"], written["types"]) == ("us-east-1", "g6.*")
