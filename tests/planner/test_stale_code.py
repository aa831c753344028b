"""Machine code that is kept on disk is never older than its sources."""

from bidding.compiled import cache_of
from orchestrator.planner import compiled


def test_a_change_in_any_source_is_another_cache(tmp_path):
    """A callee in another file is part of the name, an unchanged package keeps it."""
    caller, callee = tmp_path / "caller.py", tmp_path / "callee.py"
    caller.write_text("from callee import answer\n")
    callee.write_text("answer = 42\n")
    first = cache_of(tmp_path, [caller, callee])
    assert first == cache_of(tmp_path, [callee, caller])
    callee.write_text("answer = 43\n")
    assert first != cache_of(tmp_path, [caller, callee])


def test_every_file_with_compiled_functions_counts():
    """The planner's three, in its rooms as well; what only calls them may change without a compilation."""
    assert {path.name for path in compiled.SOURCES} == {"kernel.py", "partition.py", "programs.py"}
