"""What looks for leftovers of the tests finds each kind, so that its silence means something."""

import subprocess
import time

import pytest
import remains

MARK = "SPOT_TEST_RUN=none"


@pytest.mark.parametrize("kind", ["marked", "named", "link", "folder"])
def test_each_kind_of_leftover_is_found(tmp_path, monkeypatch, kind):
    places = [tmp_path / name for name in ("links", "shared")]
    for place in places:
        place.mkdir()
    monkeypatch.setattr(remains, "LINKS", places[0])
    monkeypatch.setattr(remains, "SHARED", places[1])
    ours = tmp_path / "ours"
    assert remains.remains(MARK, ours) == []
    if kind == "link":
        (places[0] / "spot-1").symlink_to(ours / "run")
    elif kind == "folder":
        (places[1] / "spot-keeper-1").mkdir()
        (places[1] / "spot-keeper-1" / "home").write_text(str(ours / "state"))
    else:
        env = {"SPOT_TEST_RUN": "none"} if kind == "marked" else {"HOME": f"{ours}/disk"}
        with subprocess.Popen(["/bin/sleep", "60"], env=env) as process:
            line = f"process {process.pid}: /bin/sleep 60 "
            # Between its fork and its program, a process has no command line.
            for _ in range(1000):
                if (found := remains.remains(MARK, ours)) == [line]:
                    break
                time.sleep(0.01)
            process.kill()
        assert found == [line]
        assert remains.remains(MARK, ours) == []
        return
    assert len(remains.remains(MARK, ours)) == 1
