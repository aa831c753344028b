"""Every error that a cloud may answer with is one of ours, and comes back as it went in."""

from cloud import errors
from cloud.local.api import CODES, STATUS
from cloud.local.provider import ERRORS


def leaves(kind: type[errors.CloudError]) -> set[type[errors.CloudError]]:
    """All kinds below this one."""
    below = set(kind.__subclasses__())
    return below.union(*(leaves(one) for one in below))


def test_every_error_has_a_code_and_every_code_an_error():
    """Both sides of the local cloud name the same errors by the same codes, and leave none out."""
    answers = leaves(errors.CloudError) - leaves(errors.FilesError) - {errors.FilesError}
    assert set(CODES) == answers
    assert {code: kind for kind, code in CODES.items()} == ERRORS
    assert set(STATUS) <= set(ERRORS)


def test_a_code_is_the_name_of_its_error():
    """What people see is the word that the code uses."""
    assert errors.NoCapacity("none left").code == "NoCapacity"
    assert str(errors.NoCapacity("none left")) == "none left"
