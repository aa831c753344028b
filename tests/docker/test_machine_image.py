"""The recipe of machine images is pinned, fits the project, and is one for both clouds."""

import json
import re
from pathlib import Path
from typing import Any

from cloud.first_boot import PYTHON

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docker"
TEMPLATE = json.loads((FOLDER / "machine.pkr.json").read_text())
SCRIPT = (FOLDER / "machine.sh").read_text()


def texts(value: Any) -> list[str]:
    """Return every text of the template."""
    if isinstance(value, dict):
        return [text for one in value.values() for text in texts(one)]
    if isinstance(value, list):
        return [text for one in value for text in texts(one)]
    return [value] if isinstance(value, str) else []


def test_everything_that_others_made_has_a_version():
    """Plugins, the base, Python, its installer: never what is newest on the day.

    And what is imported is compiled: a machine would spend its first seconds on that.
    """
    for plugin in TEMPLATE["packer"]["required_plugins"].values():
        assert re.fullmatch(r"= \d+\.\d+\.\d+", plugin["version"])
    assert not [text for text in texts(TEMPLATE) if re.search(r"\blatest\b", text)]
    assert re.fullmatch(r"22\.04\.\d{9}", TEMPLATE["variable"]["azure_base"]["default"])
    assert re.search(r'^uv_version="\d+\.\d+\.\d+"$', SCRIPT, re.M)
    installed = re.findall(r'pip" install .*|pip install .*', SCRIPT)
    assert [words.split()[-1] for words in installed] == [
        '"uv==$uv_version"',
        '"$requirements"',
        '"$wheel"',
    ]
    assert all("--compile-bytecode" in words for words in installed[1:])


def test_a_machine_has_the_python_of_the_manager():
    """Ray refuses a node with another one."""
    (python,) = re.findall(r'^python_version="(.*)"$', SCRIPT, re.M)
    for image in FOLDER.glob("*.Dockerfile"):
        assert f"FROM python:{python}-" in image.read_text()


def test_the_first_boot_finds_its_python_and_the_build_has_run_it():
    assert f'"{PYTHON}" -P -m agent.machine.join --help' in SCRIPT
    module = ROOT / "agent" / "machine" / "join"
    assert module.is_dir() or module.with_suffix(".py").exists()


def test_both_clouds_get_the_same_image_and_no_secret():
    (build,) = TEMPLATE["build"]
    sources = {f"source.{kind}.machine" for kind in TEMPLATE["source"]}
    assert (
        set(build["sources"])
        == sources
        == {
            "source.amazon-ebs.machine",
            "source.azure-arm.machine",
        }
    )
    scripts = [
        one["shell"]["script"] for one in build["provisioner"] if "script" in one.get("shell", {})
    ]
    assert scripts == ["${path.root}/machine.sh"]
    aws = TEMPLATE["source"]["amazon-ebs"]["machine"]
    assert aws["metadata_options"]["http_tokens"] == "required"
    assert aws["imds_support"] == "v2.0"
    assert aws["encrypt_boot"] is True
    used = {name for text in texts(TEMPLATE) for name in re.findall(r"var\.(\w+)", text)}
    assert used == set(TEMPLATE["variable"])
    assert not re.search(r"secret|password|access_key|token\"", json.dumps(TEMPLATE), re.I)
