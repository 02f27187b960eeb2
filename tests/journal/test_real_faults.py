"""Faults injected below the real storage by the kernel or strace: EIO, ENOSPC, SIGKILL at each call, a full disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.journal.kinds import KINDS, Event, Note
from unlost.journal import JournalError, JournalOptions, JournalReader, JournalWriter, verify

ROOT = Path(__file__).parents[2]
EVENTS = 12

CHILD = """
import os, sys
from unlost.journal import JournalError, JournalOptions, JournalWriter
from tests.journal.kinds import KINDS, Note

def open_writer():
    return JournalWriter.open(sys.argv[1], KINDS, journal_id="run", threaded=False, options=JournalOptions(
        segment_bytes_max=700, failure_backoff_ms=1))

try:
    writer = open_writer()
except OSError:
    os.write(1, b"reopened\\n")
    writer = open_writer()
while writer.next_offset < int(sys.argv[2]):
    writer.append(Note(writer.next_offset, "x" * 40))
    if writer.next_offset % 5 == 0:
        writer.rotate()
    if writer.next_offset % 2 == 0:
        writer.pump()
        os.write(1, b"%d\\n" % writer.durable_upto)
writer.sync()
os.write(1, b"%d\\n" % writer.durable_upto)
writer.close()
os.write(1, b"failures %d\\n" % writer.metrics().write_failures)
"""

pytestmark = pytest.mark.slow


def run_child(directory: Path, *prefix: str) -> tuple[int, int, str]:
    """(exit status, highest offset acknowledged on its output, output)."""
    done = subprocess.run(
        [*prefix, sys.executable, "-c", CHILD, os.fspath(directory), str(EVENTS)],
        capture_output=True, text=True, cwd=ROOT, timeout=120, check=False,
    )  # fmt: skip
    acknowledged = max([int(line) for line in done.stdout.split("\n") if line.isdigit()], default=0)
    return done.returncode, acknowledged, done.stdout + done.stderr


def strace(call: str, inject: str, number: int) -> list[str]:
    path = shutil.which("strace")
    if path is None:
        pytest.skip("strace is not installed")
    probe = subprocess.run([path, "-qq", "-o", "/dev/null", "true"], capture_output=True, check=False, timeout=60)
    if probe.returncode:
        pytest.skip("strace may not trace here")
    return [path, "-f", "-qq", "-o", "/dev/null", "-e", f"trace={call}", "-e", f"inject={call}:{inject}:when={number}"]


def check(directory: Path, acknowledged: int) -> int:
    """Whatever happened: verify finds no damage, all acknowledged events are there, and writing goes on."""
    report = verify(directory)
    assert report.state in ("clean", "torn"), report
    found = [event.number for _, event in JournalReader(directory, KINDS).events()]
    assert found == list(range(len(found)))
    assert len(found) >= acknowledged
    status, end, output = run_child(directory)
    assert (status, end) == (0, EVENTS), output
    assert [e.number for _, e in JournalReader(directory, KINDS).events()] == list(range(EVENTS))
    assert verify(directory).state == "clean"
    return len(found)


@pytest.mark.parametrize("number", range(1, 10))
@pytest.mark.parametrize(("call", "error"), [("fdatasync", "EIO"), ("pwrite64", "ENOSPC"), ("fsync", "EIO")])
def test_an_error_in_any_call(tmp_path: Path, call: str, error: str, number: int) -> None:
    """The n-th fdatasync, pwrite or fsync fails: the run finishes all the same, and everything is there."""
    status, acknowledged, output = run_child(tmp_path, *strace(call, f"error={error}", number))
    assert (status, acknowledged) == (0, EVENTS), output
    if call == "fdatasync" and number in (2, 3):
        assert "failures 1" in output, "the fault was not injected where this test means it"
    check(tmp_path, acknowledged)


@pytest.mark.parametrize("number", [*range(1, 8), 12, 16, 20])
@pytest.mark.parametrize("call", ["fdatasync", "pwrite64"])
def test_killed_at_any_call(tmp_path: Path, call: str, number: int) -> None:
    """SIGKILL at the n-th fdatasync or pwrite: no acknowledged event is missing, and the next opening goes on."""
    status, acknowledged, _ = run_child(tmp_path, *strace(call, "signal=KILL", number))
    if status == 0:
        assert number > 10, "the kill did not happen"
    check(tmp_path, acknowledged)


def test_a_file_size_limit_is_a_real_short_write(tmp_path: Path) -> None:
    """RLIMIT_FSIZE makes a real short write, then EFBIG: cut back, stop after three, nothing acknowledged lost."""
    script = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))\n" + CHILD.replace(
        "segment_bytes_max=700", "segment_bytes_max=1000000"
    ).replace("% 5 == 0", "% 5 == 9").replace('"x" * 40', "os.urandom(700).hex()")
    done = subprocess.run(
        [sys.executable, "-c", script, os.fspath(tmp_path), "60"],
        capture_output=True, text=True, cwd=ROOT, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "File too large" in done.stderr
    acknowledged = max(int(line) for line in done.stdout.split("\n") if line.isdigit())
    assert acknowledged > 4
    found = [event.number for _, event in JournalReader(tmp_path, KINDS).events()]
    assert len(found) == acknowledged
    with JournalWriter.open(tmp_path, KINDS, journal_id="run") as writer:
        assert writer.append(Note(0)) == acknowledged


def test_a_full_disk_then_freed(tmp_path: Path) -> None:
    """On a 1 MB file system that fills up the run stops cleanly; once there is room it opens without hand work."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", os.fspath(tmp_path)],
        capture_output=True,
        check=False,
        timeout=60,
    )
    if mounted.returncode:
        pytest.skip("a tmpfs can't be mounted here (not root)")
    try:
        ballast = tmp_path / "ballast"
        ballast.write_bytes(bytes(600 << 10))
        directory = tmp_path / "journal"
        options = JournalOptions(failure_backoff_ms=1, flush_interval_ms=1)
        writer: JournalWriter[Event] = JournalWriter.open(directory, KINDS, journal_id="run", options=options)
        with pytest.raises(JournalError):
            for n in range(100_000):
                writer.append(Note(n, os.urandom(500).hex()))
                if n % 50 == 0:
                    writer.sync(20)
        acknowledged = writer.durable_upto
        assert acknowledged > 100
        with pytest.raises(JournalError):
            writer.close()
        assert len(list(JournalReader(directory, KINDS).events())) >= acknowledged
        ballast.unlink()
        with JournalWriter.open(directory, KINDS, journal_id="run") as again:
            assert again.next_offset >= acknowledged
            again.append(Note(again.next_offset))
        found = [event.number for _, event in JournalReader(directory, KINDS).events()]
        assert found == list(range(len(found)))
        assert verify(directory).state == "clean"
    finally:
        subprocess.run(["umount", os.fspath(tmp_path)], check=True, timeout=60)
