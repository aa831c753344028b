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


@pytest.mark.parametrize("step", ["", "#30"])
def test_a_folder_has_one_address_however_it_is_typed(tmp_path, monkeypatch, step):
    """As what is stored there is known by, so that nobody removes it while a job goes on from it."""
    folder = tmp_path / "Mein \N{LATIN SMALL LETTER U WITH DIAERESIS}b#ung"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    version(folder, 30)
    place = (folder / "gpt-1").as_uri() + step
    monkeypatch.chdir(tmp_path)
    assert stored_at(place) == place
    typed = (
        f"{folder}/gpt-1".replace("#", "%23"),
        "link/gpt-1",
        "./link/gpt-1/",
    )
    for one in (f"file://{typed[0]}", f"file://{tmp_path}/link/gpt-1", *typed[1:]):
        assert stored_at(one + step) == place


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("{}/gpt-2", "nothing sound is stored there; write .* with the job's id at the end"),
        ("{}", "nothing sound is stored there"),
        ("{}/gpt-1/manifests/none/at/all", "nothing sound is stored there"),
        ("s3:/bucket/gpt-1", "--from s3:/bucket/gpt-1: write "),
        ("gpt-9", "--from gpt-9: write the folder, or file:///"),
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
