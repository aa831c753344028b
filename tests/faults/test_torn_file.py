"""Redis's own file after a loss of power, and after worse: what is sound is gone on from, what is not is said."""

import os
import shutil
from collections.abc import Callable

import pytest
import redis
from waiting import until

from orchestrator.paths import Places
from orchestrator.supervisor import redis_server
from orchestrator.supervisor.redis_server import RedisServer, RedisUnavailable

pytestmark = pytest.mark.processes

WHOLE = 40
TEARS: dict[
    str, Callable[[bytes, bytes], bytes]
] = {  # what lies there, and the write that was under way
    "half an entry": lambda file, entry: file + entry[:-5],
    "zeros": lambda file, _: file + bytes(4096),
    "an entry, and zeros": lambda file, entry: file + entry[:9] + bytes(512),
    "bytes that are no text": lambda file, _: file + b"\xff",
    "noise of a block": lambda file, _: file + bytes(range(128, 256)) * 32,
    "half a payload": lambda file, _: (
        file + b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$9000000\r\n" + b"x" * 3_000_000
    ),
    "half a length": lambda file, _: file + b"*3\r\n$3\r\nSET\r\n$1",
    "half a transaction": lambda file, entry: file + b"*1\r\n$5\r\nMULTI\r\n" + 2 * entry,
}


def written(server: RedisServer, whole: int = WHOLE) -> bytes:
    """One entry of those that a server has in its file, which is stopped now."""
    store = redis.Redis.from_url(server.url)
    for number in range(whole):
        store.rpush("kept", f"number {number:04}")
    store.close()
    server.stop()
    return b"*3\r\n$5\r\nRPUSH\r\n$4\r\nkept\r\n$11\r\nnumber 0040\r\n"


def kept(server: RedisServer) -> int:
    with redis.Redis.from_url(server.url) as store:
        return store.llen("kept")


def test_a_file_that_takes_long_to_load_is_waited_for(server, monkeypatch):
    """After a month it may have gigabytes. As long as the server says that it loads, it does not hang."""
    written(server, 20_000)
    settings = server._settings()
    monkeypatch.setattr(server, "_settings", lambda: [*settings, "--key-load-delay", "200"])
    monkeypatch.setattr(redis_server, "START_S_MAX", 1.0)
    assert not server.start()
    assert kept(server) == 20_000


@pytest.mark.parametrize("tear", TEARS)
def test_a_write_that_was_torn_is_cut_off_and_nothing_else(server, tmp_path, tear):
    """Half an entry, zeros behind the end, half a transaction: nobody had an answer to that. All before it is there, and
    it is said once."""
    entry = written(server)
    (file,) = tmp_path.rglob("*.incr.aof")
    sound = file.read_bytes()
    assert sound.endswith(entry.replace(b"0040", b"0039"))
    torn = TEARS[tear](sound, entry)
    file.write_bytes(torn)
    assert f"{len(torn) - len(sound):,} bytes" in server.start()
    assert kept(server) == WHOLE
    server.stop()
    assert file.read_bytes() == sound
    assert server.start() == ""


@pytest.mark.parametrize("wrong", [b"$91111", b"#11"])
def test_damage_with_sound_entries_behind_it_is_said_and_left_as_it_is(server, tmp_path, wrong):
    """A length that leads past the end looks like a torn write to Redis, which would cut off all that was ever written
    since: nothing is, and the way out is named."""
    written(server)
    (file,) = tmp_path.rglob("*.incr.aof")
    damaged = file.read_bytes().replace(b"$11\r\nnumber 0020", wrong + b"\r\nnumber 0020")
    file.write_bytes(damaged)
    with pytest.raises(
        RedisUnavailable, match=r"damaged at byte [\d,]+ of .* It was left unchanged.*--from"
    ):
        server.start()
    assert file.read_bytes() == damaged


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "nothing but zeros": lambda file: bytes(len(file)),
    "nothing but noise": lambda file: bytes(range(128, 256)) * (len(file) // 128),
    "the second half in zeros": lambda file: (
        file[: len(file) // 2] + bytes(len(file) - len(file) // 2)
    ),
    "more zeros than one write": lambda file: file + bytes(redis_server.TORN_BYTES_MAX + 1),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_more_than_one_write_is_damage_and_left_unchanged(server, tmp_path, damage):
    """Nothing of what was acknowledged is forgotten with the words of a torn write."""
    written(server, 400)
    (file,) = tmp_path.rglob("*.incr.aof")
    file.write_bytes(damaged := DAMAGE[damage](file.read_bytes()))
    with pytest.raises(RedisUnavailable, match=r"damaged at byte [\d,]+ of [\d,]+, .*--from"):
        server.start()
    assert file.read_bytes() == damaged


@pytest.mark.parametrize("gone", ["removed", "emptied"])
def test_a_file_that_is_gone_where_there_were_jobs_is_said(server, tmp_path, gone):
    """Jobs, and what was spent, would be forgotten without a word. Nothing is said of a house that is new, nor of one that
    has its file."""
    server.stop()
    places = Places(tmp_path / "redis-house")
    shutil.rmtree(places.redis_dir)
    assert server.start() == ""
    written(server)
    checkpoints = places.checkpoints
    (checkpoints / "train-1a2b3c4d").mkdir(parents=True)
    assert server.start() == ""
    server.stop()
    (file,) = tmp_path.rglob("*.incr.aof")
    shutil.rmtree(places.redis_dir) if gone == "removed" else file.write_bytes(b"")
    said = server.start()
    assert f"{places.redis_dir} has nothing in it, and {checkpoints} has 1 job: " in said
    assert f"submit SCRIPT --from {checkpoints.as_uri()}/JOB" in said


@pytest.mark.parametrize("more", ["", " startoffset 0"])
@pytest.mark.parametrize("kind", ["base.rdb", "incr.aof", "manifest"])
def test_one_of_its_files_that_is_gone_is_named(server, tmp_path, kind, more):
    """The server lists several files, and does not begin without one of them. Redis 8 says more of each."""
    written(server)
    (listed,) = tmp_path.rglob("*.manifest")
    listed.write_text(listed.read_text().replace(" type i", f" type i{more}"))
    (file,) = tmp_path.rglob(f"*.{kind}")
    file.unlink()
    with pytest.raises(RedisUnavailable, match=rf"{file} is missing. Put a copy of .*--from"):
        server.start()


def test_a_first_start_that_was_killed_is_begun_again(server, tmp_path):
    """The list of its files is what a server writes last."""
    server.stop()
    (listed,) = tmp_path.rglob("*.manifest")
    listed.rename(listed.with_name(f"temp-{listed.name}"))
    assert server.start() == ""


@pytest.mark.parametrize("killed", ["", "with a folder", "with a list"])
@pytest.mark.parametrize("torn", ["", "*3\r\n$5\r\nRPU"])
def test_the_file_of_an_earlier_version_is_taken_over(server, tmp_path, killed, torn):
    """Also after a start that was killed before it had moved the file, and with a last write that was torn."""
    entry = written(server)
    (later,) = tmp_path.rglob("appendonlydir")
    shutil.rmtree(later)
    later.with_name("appendonly.aof").write_bytes(WHOLE * entry + torn.encode())
    if killed:
        later.mkdir()
    if killed == "with a list":
        (later / "appendonly.aof.manifest").write_text("file appendonly.aof seq 1 type b\n")
    assert ("torn" in server.start()) == bool(torn)
    assert kept(server) == WHOLE


def test_a_server_that_is_too_old_for_what_is_there_does_not_begin_with_nothing(
    server, monkeypatch
):
    """As where a system's server is installed later than the house."""
    server.stop()
    monkeypatch.setattr(redis_server, "version", lambda _: (6, 0, 16))
    with pytest.raises(RedisUnavailable, match="is too old to read"):
        server.start()


@pytest.mark.parametrize(
    "harm", ["file", "base", "list", "folder", "cut", "replaced by an older copy"]
)
def test_a_file_that_somebody_takes_from_a_living_server_is_written_again(server, tmp_path, harm):
    """All that was promised is in the server's memory still, and would be gone with it."""
    (file,) = tmp_path.rglob("*.incr.aof")
    older = file.with_name("older")
    with redis.Redis.from_url(server.url) as store:
        shutil.copy2(file, older)
        store.rpush("kept", *range(WHOLE))
        assert not server.is_harmed()
        if harm == "cut":
            os.truncate(file, file.stat().st_size // 2)
        elif harm == "replaced by an older copy":
            older.rename(file)
        elif harm == "file":
            file.unlink()
        elif harm in ("base", "list"):
            next(file.parent.glob("*.base.rdb" if harm == "base" else "*.manifest")).unlink()
        else:
            shutil.rmtree(file.parent)
        assert server.is_harmed()
        server.rewrite()
        rewrites = "aof_rewrite_in_progress", "aof_rewrite_scheduled"
        until("its file", lambda: not any(store.info("persistence")[one] for one in rewrites))
        store.rpush("kept", "and what came later")
    server.stop()
    assert not server.is_harmed()
    assert server.start() == ""
    assert kept(server) == WHOLE + 1
