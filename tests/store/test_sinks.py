"""One contract for all sinks, and what is special about some of them."""

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from s3_server import S3Server, s3_sink
from somebody import as_somebody_else

from agent.errors import CheckpointError
from agent.store.errors import Damaged, Full, Unavailable
from agent.store.places import objects, sinks
from agent.store.places.objects import Retries, open_sink
from agent.store.places.sinks import DRAFT, DiskSink
from cloud.private import flush


def test_a_file_is_read_back_whole_and_in_ranges(sink):
    """What was put in pieces is one file, and any range of it lands in the views that are given."""
    sink.put("parts/0000000001/a.safetensors", [b"0123", bytearray(b""), memoryview(b"456789")])
    sink.settle()
    assert sink.get("parts/0000000001/a.safetensors") == b"0123456789"
    one, two = bytearray(3), bytearray(2)
    with sink.open("parts/0000000001/a.safetensors") as read:
        read(2, [memoryview(one), memoryview(two)])
        read(8, [memoryview(two)])
    assert (one, two) == (b"234", b"89")


def test_a_large_file_goes_through_whole(sink):
    """A file larger than any single request or call is the same when it comes back."""
    piece = os.urandom(1 << 20)
    sink.put("parts/0000000001/large", [piece] * 12)
    back = bytearray(12 << 20)
    with sink.open("parts/0000000001/large") as read:
        read(0, [memoryview(back)])
    assert back == piece * 12


def test_many_small_pieces_are_one_file(sink):
    """More pieces than the system takes in one call make no difference, in or out."""
    sink.put("parts/0000000001/many", [bytes([at % 256]) for at in range(3000)])
    back = bytearray(3000)
    with sink.open("parts/0000000001/many") as read:
        read(0, [memoryview(back)[at : at + 1] for at in range(3000)])
    assert bytes(back) == bytes(at % 256 for at in range(3000))


def test_what_is_missing_or_short_is_damaged(sink):
    """A file that is not there, or ends too early, is said to be damaged, with its name."""
    sink.put("parts/0000000001/a", [b"abc"])
    with pytest.raises(Damaged, match="parts/0000000001/b"):
        sink.get("parts/0000000001/b")
    for offset in (1, 3, 7):
        with pytest.raises(Damaged, match="ends"), sink.open("parts/0000000001/a") as read:
            read(offset, [memoryview(bytearray(4))])
    with pytest.raises(Damaged), sink.open("parts/0000000001/b") as read:
        read(0, [memoryview(bytearray(1))])


def test_of_many_creators_exactly_one_wins(sink):
    """Eight threads create the same file at once: one hears True, and its bytes are there."""
    won = []
    gate = threading.Barrier(8)

    def create(mark):
        gate.wait()
        if sink.create("manifests/one", mark):
            won.append(mark)

    threads = [threading.Thread(target=create, args=(b"%d" % at,)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [sink.get("manifests/one")]


def test_sizes_lists_a_folder_and_delete_is_idempotent(sink):
    """Only files below the folder are listed; deleting what is gone is no error."""
    assert sink.sizes("parts") == {}
    sink.put("parts/0000000001/a", [b"abc"])
    sink.put("parts/0000000002/b", [b"abcd"])
    sink.create("manifests/m", b"1")
    assert sink.sizes("parts") == {"parts/0000000001/a": 3, "parts/0000000002/b": 4}
    assert sink.sizes("parts/0000000002") == {"parts/0000000002/b": 4}
    sink.delete(["parts/0000000001/a", "parts/0000000001/a"])
    assert sink.sizes("parts") == {"parts/0000000002/b": 4}


@pytest.mark.parametrize("key", ["../out", "/etc/passwd", "a/../b", "", "a//b", "a\0b", ".hidden"])
def test_no_key_leads_out_of_the_sink(sink, key):
    """A manifest that names a file elsewhere is damaged, not obeyed."""
    with pytest.raises(Damaged):
        sink.get(key)
    with pytest.raises(Damaged):
        sink.put(key, [b"x"])


def test_a_full_disk_leaves_nothing_behind(disk):
    """When the disk takes no more, the error says so and no part of the file remains."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(Full, match="too large"):
            disk.put("parts/0000000001/a", [bytes(5000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert not list((disk.root / "parts/0000000001").iterdir())


def test_a_put_never_goes_over_another(disk):
    """A key is used once: a second put of it is refused and the first stays."""
    disk.put("parts/0000000001/a", [b"first"])
    with pytest.raises(CheckpointError, match="there already"):
        disk.put("parts/0000000001/a", [b"second"])
    assert disk.get("parts/0000000001/a") == b"first"


def test_a_folder_that_cannot_be_written_is_unavailable(tmp_path):
    """A file where the folder should be gives one clear line, not a traceback of the system's."""
    (tmp_path / "disk").write_text("in the way")
    with pytest.raises(Unavailable, match="disk"):
        DiskSink(tmp_path / "disk").put("parts/0000000001/a", [b"x"])


def test_a_folder_that_may_not_be_read_is_no_empty_one(tmp_path, monkeypatch):
    """Else a job whose checkpoints were made unreadable would begin anew, as if there were none."""
    monkeypatch.chdir(tmp_path)  # so that nobody need be let into the folders above
    tmp_path.chmod(0o755)
    sink = DiskSink(Path("disk"))
    sink.put("parts/0000000001/a", [b"abc"])
    (tmp_path / "disk/parts").chmod(0)
    with as_somebody_else(), pytest.raises(Unavailable, match="Permission denied"):
        sink.sizes("parts")


def test_a_pipe_where_a_file_should_be_is_not_waited_for(disk):
    """Nobody will ever write to it, and whoever reads would never come back."""
    disk.root.mkdir(exist_ok=True)
    os.mkfifo(disk.root / "part")
    with pytest.raises(Unavailable), disk.open("part") as read:
        read(0, [memoryview(bytearray(1))])


def test_files_that_go_while_they_are_listed_were_not_there(disk):
    """Somebody prunes meanwhile. What is said of the files that stay is true each time."""
    disk.put("parts/0000000001/stays", [b"abc"])
    come = [f"parts/0000000001/{at}" for at in range(64)]
    ended = threading.Event()

    def come_and_go():
        while not ended.is_set():
            for key in come:
                (disk.root / key).touch()
            disk.delete(come)

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(300):
            assert disk.sizes("parts")["parts/0000000001/stays"] == 3
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("name", ["a b", "run#3", "what?", "100%25", "ü"])
def test_a_folder_may_have_any_name(tmp_path, name):
    """As a path, and as the URI that a report names it by."""
    DiskSink(tmp_path / name).put("parts/0000000001/a", [b"abc"])
    for place in (str(tmp_path / name), (tmp_path / name).as_uri()):
        assert open_sink(place).sizes("parts") == {"parts/0000000001/a": 3}


@pytest.mark.processes
def test_a_writer_that_is_killed_leaves_no_file(tmp_path):
    """SIGKILL in the middle of a put: the file is not there, and its draft is listed, so that it can be deleted."""
    program = (
        "import sys, pathlib\n"
        "from agent.store.places.sinks import DiskSink\n"
        "import agent.store.places.sinks as s\n"
        "whole = s._write_all\n"
        "def write(handle, views):\n"
        "    whole(handle, views[:1]); print('half', flush=True); sys.stdin.read()\n"
        "s._write_all = write\n"
        "DiskSink(pathlib.Path(sys.argv[1])).put('parts/0000000001/a', [b'x' * 4096, b'y'])\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout.readline() == b"half\n"
        writer.kill()
    sink = DiskSink(tmp_path)
    (draft,) = sink.sizes("parts")
    assert draft.startswith("parts/0000000001/a.")
    assert draft.endswith(DRAFT)
    sink.delete([draft])
    assert not (tmp_path / "parts/0000000001").exists()


def test_an_unknown_place_says_what_would_do():
    """A URI of a kind that we do not know is one line that says which ones we do."""
    with pytest.raises(Unavailable, match=r"ftp://x: give a folder or s3"):
        open_sink("ftp://x")


@pytest.mark.parametrize("place", ["s3://bucket/runs#2/job", "az://container/runs?sig=key/job"])
def test_an_address_that_would_be_cut_off_before_the_job_is_refused(place):
    """All jobs would share one place, and count each other's versions as their own; no key is shown."""
    with pytest.raises(
        Unavailable, match=r"/runs: the address of a store ends before [?#],"
    ) as told:
        open_sink(place)
    assert "key/" not in str(told.value)


def test_without_obstore_the_error_says_what_to_install(monkeypatch):
    """Object storage without its package is one line with the command that helps."""
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(Unavailable, match=r"pip install 'obstore==0\.12\.1'"):
        open_sink("s3://bucket/prefix")


def test_a_store_on_the_lan_is_named_by_the_environment_alone(monkeypatch):
    """An endpoint without TLS, as boto3 and the AWS command line take it from the environment, is asked."""
    with S3Server() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "none")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "none")
        open_sink("s3://bucket/prefix").put("parts/0000000001/a", [b"abc"])
        assert server.files == {"prefix/parts/0000000001/a": b"abc"}


@pytest.mark.parametrize("code", [429, 500, 503])
def test_a_store_that_refuses_for_a_while_is_asked_again(hurried, code):
    """A few refusals in a row are ridden out by every operation."""
    with S3Server() as server:
        sink, server.refusal = s3_sink(server), code
        for operation in (
            lambda: sink.put("parts/0000000001/a", [b"abc"]),
            lambda: sink.create("manifests/m", b"1"),
            lambda: sink.get("parts/0000000001/a"),
            lambda: sink.sizes("parts"),
            lambda: sink.delete(["parts/0000000001/a"]),
        ):
            server.refuse = 3
            operation()
            assert server.refuse == 0


def test_an_error_in_an_answer_of_200_is_no_empty_folder(hurried):
    with S3Server() as server:
        sink = s3_sink(server)
        sink.put("parts/0000000001/a", [b"abc"])
        server.refusal, server.refuse = 200, 1
        assert sink.sizes("parts") == {"parts/0000000001/a": 3}
        assert not server.refuse
        assert sink.sizes("manifests") == {}


def test_a_file_goes_over_a_link_that_is_too_slow_for_many_requests_at_once(hurried, monkeypatch):
    """Pieces that share it all time out together, and one after the other they arrive."""
    monkeypatch.setattr(objects, "REQUEST_S_MAX", 2.0)
    monkeypatch.setattr(Retries, "total_s_max", 3.0)
    with S3Server() as server:
        sink, server.narrow = s3_sink(server), True
        piece = os.urandom(1 << 20)
        sink.put("parts/0000000001/large", [piece] * 60)
        assert server.files["parts/0000000001/large"] == piece * 60


@pytest.mark.parametrize("refusals", [1, 1000])
def test_a_store_that_says_404_of_everything_has_lost_nothing(hurried, refusals):
    """Its bucket is another one's, or what stands before it answers while it starts."""
    with S3Server() as server:
        sink = s3_sink(server)
        sink.put("parts/0000000001/a", [b"abc"])
        server.refusal = 404

        def read():
            with sink.open("parts/0000000001/a") as read:
                read(0, [memoryview(bytearray(3))])

        for operation in (read, lambda: sink.get("parts/0000000001/a")):
            server.refuse = refusals
            with pytest.raises(Unavailable):
                operation()
        server.refuse = 0
        with pytest.raises(Damaged):
            sink.get("parts/0000000001/b")


def test_a_store_that_only_answers_503_is_given_up(hurried):
    """Retries are bounded, and then the error is one line: what, who answers, and why, as the store gives its reason."""
    with S3Server() as server:
        sink = s3_sink(server)
        server.refuse = 10**6
        for call in (lambda: sink.put("parts/0000000001/a", [b"abc"]), lambda: sink.sizes("parts")):
            with pytest.raises(Unavailable) as caught:
                call()
            what, said = str(caught.value).split(": ", 1)
            assert what.startswith("s3://bucket/parts")
            assert said == f"{server.endpoint} answers 503 Service Unavailable: SlowDown: scripted"
            assert server.requests < 20
            server.requests = 0
    with pytest.raises(Unavailable, match=f": {server.endpoint} does not answer: [^\n]*$"):
        s3_sink(server).sizes("parts")


def test_only_the_range_that_is_asked_for_travels(hurried):
    """A read of a few bytes of a large object moves a few bytes."""
    with S3Server() as server:
        sink = s3_sink(server)
        sink.put("parts/0000000001/a", [bytes(1 << 20)])
        with sink.open("parts/0000000001/a") as read:
            read(1000, [memoryview(bytearray(100))])
        assert server.bytes_out == 100


def test_who_creates_while_others_do_is_told_the_truth(hurried):
    """409 is an answer to somebody who comes while others create the file, and none of them may have succeeded."""
    with S3Server() as server:
        sink = s3_sink(server)
        server.conflicts = 3
        assert sink.create("fences/mine", b"1")
        assert server.files["fences/mine"] == b"1"
        server.conflicts = 1
        assert not sink.create("fences/mine", b"2")
        server.conflicts = 1000
        with pytest.raises(Unavailable, match="says that it is there, and it is not"):
            sink.create("fences/other", b"1")


def test_an_answer_that_breaks_off_is_no_file(hurried):
    """Half of it comes and the connection ends: it is asked for again, and what is given is whole."""
    with S3Server() as server:
        sink = s3_sink(server)
        whole = os.urandom(100_000)
        sink.put("parts/0000000001/a", [whole])
        server.cut = 2
        assert sink.get("parts/0000000001/a") == whole
        server.cut, back = 2, bytearray(50_000)
        with sink.open("parts/0000000001/a") as read:
            read(7, [memoryview(back)])
        assert back == whole[7:50_007]
        assert not server.cut
        server.cut = 1000
        with pytest.raises(Unavailable):
            sink.get("parts/0000000001/a")


def test_a_folder_that_could_not_be_flushed_is_flushed_by_the_next_settle(tmp_path, monkeypatch):
    flushed: list[Path] = []

    def fails_first(folder: Path) -> None:
        flushed.append(folder)
        if len(flushed) == 1:
            raise OSError(errno.EIO, "on purpose")
        flush(folder)

    sink = DiskSink(tmp_path)
    sink.put("parts/a", [b"1"])
    monkeypatch.setattr(sinks, "flush", fails_first)
    with pytest.raises(Unavailable):
        sink.settle()
    sink.settle()
    assert tmp_path / "parts" in flushed[1:]


def test_settle_returns_only_after_a_flush_of_a_different_thread(tmp_path, monkeypatch):
    """Otherwise a manifest could be on the disk before the parts that it names."""
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def waits(folder: Path) -> None:
        begun.set()
        may_end.wait(10.0)
        flush(folder)
        ended.set()

    sink = DiskSink(tmp_path)
    sink.put("parts/a", [b"1"])
    monkeypatch.setattr(sinks, "flush", waits)
    first = threading.Thread(target=sink.settle)
    first.start()
    begun.wait(10.0)
    seen: list[bool] = []
    second = threading.Thread(target=lambda: (sink.settle(), seen.append(ended.is_set())))
    second.start()
    second.join(0.05)  # without the lock it has ended by now
    may_end.set()
    first.join(10.0)
    second.join(10.0)
    assert seen == [True]
