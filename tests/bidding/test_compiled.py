"""Machine code on the disk: kept between runs, and not for ever."""

import os
from pathlib import Path

from bidding.compiled import EDITIONS_KEPT, forget_old


def test_machine_code_of_old_sources_goes(tmp_path: Path) -> None:
    """The edition in use and the newest few others stay, whatever their names are."""
    for age_s in range(6):
        folder = tmp_path / f"numba-{age_s}"
        folder.mkdir()
        (folder / "f.nbc").write_bytes(b"code")
        os.utime(folder, (1000.0 - age_s, 1000.0 - age_s))
    (tmp_path / "other").mkdir()
    forget_old(str(tmp_path / "numba-5"))
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [*(f"numba-{age_s}" for age_s in range(EDITIONS_KEPT)), "numba-5", "other"]
    forget_old(str(tmp_path / "nowhere" / "numba-0"))
