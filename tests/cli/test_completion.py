"""A shell completes commands, tools, options and the ids of jobs."""

import pytest

from orchestrator.cli import COMPLETES, main


def completed(monkeypatch: pytest.MonkeyPatch, capsys, words: str) -> list[str]:
    """What bash is offered for the last of these words."""
    monkeypatch.setenv(COMPLETES, "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    with pytest.raises(SystemExit):
        main([])
    return capsys.readouterr().out.split()


def test_commands_tools_and_options_are_completed(monkeypatch, capsys):
    assert completed(monkeypatch, capsys, "orchestrator com") == ["compare"]
    assert completed(monkeypatch, capsys, "orchestrator tools da") == ["dashboard"]
    assert completed(monkeypatch, capsys, "orchestrator resume --fr") == ["--from"]


def test_without_a_manager_no_id_is_offered(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert completed(monkeypatch, capsys, "orchestrator logs ") == []


@pytest.mark.processes
def test_ids_of_jobs_are_completed(housed, monkeypatch, capsys):
    name = housed("submit", housed.script("named.py"), "--json").json["id"]
    monkeypatch.chdir(housed.folder)
    for command in ("logs", "resume", "events"):
        assert name in completed(monkeypatch, capsys, f"orchestrator {command} named-")
    assert completed(monkeypatch, capsys, "orchestrator logs nothing-") == []


def test_a_script_for_the_shell_is_printed(monkeypatch, capsys):
    """What a person puts into the file that their shell reads first."""
    monkeypatch.setenv(COMPLETES, "source_bash")
    with pytest.raises(SystemExit):
        main([])
    assert f"{COMPLETES}=complete_bash" in capsys.readouterr().out
