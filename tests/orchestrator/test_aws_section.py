"""The section [aws] of the settings: what it lacks is said before anything starts."""

from pathlib import Path

import pytest

from cloud.aws.settings import zone_region
from orchestrator.config import ConfigError, load

WHOLE = """[aws]
enabled = true
regions = "us-east-1, eu-west-1"
types = "g5.*,g6.xlarge"
images = "us-east-1=ami-1,eu-west-1=/team/image"
subnets = "us-east-1a=subnet-1,us-east-1b=subnet-2,eu-west-1c=subnet-3"
security_groups = "us-east-1=sg-1,eu-west-1=sg-2"
"""


def loaded(tmp_path: Path, text: str):
    file = tmp_path / "orchestrator.toml"
    file.write_text(text)
    return load(file, {})


def test_a_whole_section_is_what_the_provider_takes(tmp_path):
    settings = loaded(tmp_path, WHOLE).aws.settings()
    east, west = settings.regions
    assert (east.name, east.image, east.security_group) == ("us-east-1", "ami-1", "sg-1")
    assert east.subnets == {"us-east-1a": "subnet-1", "us-east-1b": "subnet-2"}
    assert (west.image, west.subnets) == ("/team/image", {"eu-west-1c": "subnet-3"})
    assert settings.types == ("g5.*", "g6.xlarge")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('regions = "us-east-1, eu-west-1"', "", "regions is not set"),
        (",eu-west-1=/team/image", "", "images names nothing for the region eu-west-1"),
        (",eu-west-1=sg-2", "", "security_groups names nothing for the region eu-west-1"),
        (",eu-west-1c=subnet-3", "", "subnets names nothing for the region eu-west-1"),
        ("eu-west-1c=", "ap-south-1a=", "its region is not in regions"),
        ("eu-west-1=sg-2", "eu-west-1=sg-2,sa-east-1=sg-3", "sa-east-1, which is not in regions"),
        ("us-east-1a=subnet-1", "us-east-1a", "us-east-1a=subnet-0123"),
        ("us-east-1a=", "virginia=", "not the name of a zone"),
    ],
)
def test_what_the_section_lacks_is_named(tmp_path, old, new, says):
    assert old in WHOLE
    with pytest.raises(ConfigError, match=says):
        loaded(tmp_path, WHOLE.replace(old, new))


def test_a_cloud_that_is_not_used_needs_nothing(tmp_path):
    assert not loaded(tmp_path, "").aws.enabled


@pytest.mark.parametrize("zone", ["us-east-1a", "us-gov-west-1b", "us-east-1-bos-1a"])
def test_a_zone_is_in_its_region(zone):
    assert zone.startswith(zone_region(zone))
    assert zone_region(zone)[-1].isdigit()
