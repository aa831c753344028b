"""Every error that a cloud may answer with is one of ours, and comes back as it went in."""

import pytest

from cloud import errors
from cloud.local.api import CODES, STATUS
from cloud.local.provider import ERRORS


def below(kind: type[errors.CloudError]) -> set[type[errors.CloudError]]:
    """All kinds below this one."""
    found = set(kind.__subclasses__())
    return found.union(*(below(one) for one in found))


def test_every_error_has_a_code_and_every_code_an_error():
    """Both sides of the local cloud name the same errors by the same codes, and leave none out."""
    ours = [one for one in below(errors.CloudError) if one.__module__ == errors.__name__]
    files = {errors.FilesError, *below(errors.FilesError)}
    assert {one.__name__ for one in ours if one not in files} - {"Refused"} <= set(CODES)
    assert {CODES[said("x").code]: said for said in ERRORS.values()} == ERRORS
    assert sorted(CODES.values()) == sorted(ERRORS)
    assert set(STATUS) <= set(ERRORS)


def test_every_error_is_in_the_drawn_tree():
    drawn = {line.strip("│├└─ ").split(" ")[0] for line in errors.__doc__.splitlines()[2:]}
    ours = [one for one in below(errors.CloudError) if one.__module__ == errors.__name__]
    assert {one.__name__ for one in ours} | {"CloudError"} == drawn - {""}


@pytest.mark.parametrize("code", sorted(ERRORS))
def test_what_did_nothing_says_how_far_it_reaches(code: str):
    """Only an unusable answer, and a foreign machine, come without a refusal."""
    error = ERRORS[code]("none left")
    assert str(error) == "none left"
    if code in ("InternalError", "UnauthorizedOperation"):
        assert error.refusal is None
    else:
        assert (error.refusal.code, error.refusal.said) == (error.code, "none left")
