"""Where a job shall go on from is looked at before anything is paid for."""

import pytest
from test_left_behind import version

from orchestrator.cli.command import CommandError
from orchestrator.cli.submit import stored_at


def test_what_an_earlier_job_stored(tmp_path):
    version(tmp_path, 30)
    place = (tmp_path / "gpt-1").as_uri()
    assert stored_at(place) == place
    assert stored_at(None) == ""


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("{}/gpt-2", "nothing sound is stored there; write .* with the job's id at the end"),
        ("{}", "nothing sound is stored there"),
        ("{}/gpt-1/manifests/none/at/all", "nothing sound is stored there"),
        ("s3:/bucket/gpt-1", "--from s3:/bucket/gpt-1: write "),
        ("{}/file", "cannot be read"),
    ],
)
def test_what_is_not_there(tmp_path, place, said):
    version(tmp_path, 30)
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(CommandError, match=said):
        stored_at(place.format(tmp_path.as_uri()))


def test_what_is_damaged(tmp_path):
    version(tmp_path, 30)
    for manifest in (tmp_path / "gpt-1" / "manifests").iterdir():
        manifest.write_bytes(manifest.read_bytes()[:-9])
    with pytest.raises(CommandError, match="nothing sound is stored there"):
        stored_at((tmp_path / "gpt-1").as_uri())
