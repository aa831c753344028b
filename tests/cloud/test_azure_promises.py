"""The Azure provider keeps its promises, and every promise of the fake Azure is needed for that."""

import pytest
from azure_scenes import SCENES
from cloudfake.arm import PROMISES


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_the_provider_keeps_its_promise(scene):
    """Each scene of `azure_scenes` holds."""
    scene("")


@pytest.mark.parametrize("promise", PROMISES)
def test_a_broken_promise_of_the_fake_is_noticed(promise):
    """A fake that is kinder than Azure fails at least one scene, so no scene relies on kindness."""
    for scene in SCENES:
        try:
            scene(promise)
        except (Exception, pytest.fail.Exception):
            return
    raise AssertionError(f"no scene notices that this does not hold: {promise}")
