"""Starting and ending Ray: what it needs, what goes wrong, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from unlost.engine import cluster, ray_reaper
from unlost.engine.cluster import Cluster, ClusterError, ClusterOptions, options_of
from unlost.engine.config_keys import (
    Config,
    DataConfig,
    DataPlaneConfig,
    ModelConfig,
    RayConfig,
    RewardConfig,
    TrainerConfig,
    WorkersConfig,
)


def config(**sections: object) -> Config:
    return Config(
        model=ModelConfig(path="m"), data=DataConfig(train="d"), reward=RewardConfig(function="r:f"), **sections
    )


def test_the_needs_of_a_run_are_the_sum_of_its_processes() -> None:
    """Controller, TransferQueue's controller and units, workers, ranks; GPUs of workers and ranks."""
    needs = options_of(
        config(
            workers=WorkersConfig(count=3, cpus=2.0, gpus=0.5),
            trainer=TrainerConfig(world_size=2, cpus=1.5, gpus=1.0),
            data_plane=DataPlaneConfig(storage_units=4),
            ray=RayConfig(num_cpus=99, start_timeout_s=7),
        )
    )
    assert needs == ClusterOptions(cpus=2 + 4 + 6 + 3, gpus=3.5, num_cpus=99, start_timeout_s=7)


def test_too_small_a_figure_is_refused_before_anything_starts() -> None:
    """``ray.num_cpus`` below the need names both figures, and leaves neither process nor directory."""
    needs = ClusterOptions(cpus=5.5, num_cpus=5)
    small = Cluster(needs)
    with pytest.raises(ClusterError, match=r"ray\.num_cpus is 5, but this run's processes need 5\.5"):
        small.start()
    assert small.directory == ""
    small.stop()


def test_directories_of_dead_drivers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed run left is removed by the next start; what belongs to a living process stays."""
    monkeypatch.setattr(cluster.tempfile, "gettempdir", lambda: "/tmp/u")
    root = Path("/tmp/u") / f"unlost-{os.getuid()}"
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for pid in (dead.pid, os.getppid()):
        (root / f"{pid}-x").mkdir(parents=True)
    try:
        made = Path(cluster._session_directory())
        assert sorted(path.name for path in root.iterdir()) == sorted([f"{os.getppid()}-x", made.name])
        assert made.name.startswith(f"{os.getpid()}-")
        assert made.stat().st_mode & 0o077 == 0
    finally:
        ray_reaper.shutil.rmtree("/tmp/u")


def test_a_long_temporary_directory_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unix sockets have no room for it; Ray's files go under /tmp then."""
    monkeypatch.setattr(cluster.tempfile, "gettempdir", lambda: "/var/folders/zz/a/very/long/temporary/directory")
    made = Path(cluster._session_directory())
    made.rmdir()
    assert made.parent == Path(f"/tmp/unlost-{os.getuid()}")


def test_the_reaper_kills_what_belongs_to_the_directory_and_nothing_else(tmp_path: Path) -> None:
    """When its standard input ends, those who have a file in it open or name it are killed, and it is removed."""
    directory, neighbour = tmp_path / "session", tmp_path / "session2"
    for each in (directory, neighbour):
        (each / "logs").mkdir(parents=True)
    sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    held = (directory / "logs" / "held").open("w")  # by us, the driver: it must not be killed itself
    with (directory / "logs" / "out").open("w") as mine, (neighbour / "logs" / "out").open("w") as others:
        doomed = [subprocess.Popen(sleeper, stdout=mine), subprocess.Popen([*sleeper, f"--dir={directory}/logs"])]
        spared = [subprocess.Popen(sleeper, stdout=others), subprocess.Popen([*sleeper, f"--dir={neighbour}/logs"])]
    command = [sys.executable, "-I", "-S", ray_reaper.__file__, str(directory), str(os.getpid())]
    reaper = subprocess.Popen(command, stdin=subprocess.PIPE, env={})
    try:
        time.sleep(0.2)
        assert [process.poll() for process in doomed] == [None, None]
        assert reaper.stdin is not None
        reaper.stdin.close()
        assert [process.wait(10) for process in doomed] == [-signal.SIGKILL] * 2
        assert reaper.wait(10) == 0
        assert [process.poll() for process in spared] == [None, None]
        assert not directory.exists()
        assert neighbour.exists()
    finally:
        held.close()
        for process in (*doomed, *spared, reaper):
            process.kill()
            process.wait()


DRIVER = """
import sys, threading, time
from unlost.engine.cluster import Cluster, ClusterOptions

def main():
    with Cluster(ClusterOptions(cpus=3, start_timeout_s=120)) as cluster:
        import ray

        @ray.remote(num_cpus=1, max_concurrency=2)
        class Busy:
            def here(self):
                return 1
            def spin(self):
                import hashlib
                block = bytes(1 << 24)
                while True:
                    hashlib.sha256(block)

        busy = [Busy.remote() for _ in range(2)]
        ray.get([each.here.remote() for each in busy])
        for each in busy:
            each.spin.remote()
        print("ready", cluster.directory, flush=True)
        if sys.argv[1] == "wait":
            time.sleep(300)

thread = threading.Thread(target=main)
thread.start()
thread.join()
"""


@pytest.mark.slow
def test_nothing_survives_a_killed_driver_and_the_next_starts_at_once(tmp_path: Path) -> None:
    """After SIGKILL of the driver alone, every process it had is gone within 3 s, its directory too; again works."""
    script = tmp_path / "driver.py"
    script.write_text(textwrap.dedent(DRIVER))
    driver = subprocess.Popen([sys.executable, str(script), "wait"], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    line = driver.stdout.readline().split()
    assert line[:1] == ["ready"]
    children = psutil.Process(driver.pid).children(recursive=True)
    assert len(children) >= 6  # reaper, GCS, raylet, agents, two actors
    driver.kill()
    driver.wait()
    driver.stdout.close()
    began = time.monotonic()
    _, alive = psutil.wait_procs(children, timeout=10)
    left = [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert [(process.pid, process.cmdline()) for process in left] == []
    print(f"all {len(children)} processes gone {time.monotonic() - began:.2f} s after the driver")
    assert not Path(line[1]).exists()
    began = time.monotonic()
    again = subprocess.run(
        [sys.executable, str(script), "end"], capture_output=True, text=True, check=False, timeout=200
    )
    assert again.returncode == 0, again.stderr
    directory = again.stdout.split()[1]
    assert not Path(directory).exists()
    assert ray_reaper.processes_of(directory, frozenset()) == []
    print(f"started, used and stopped again in {time.monotonic() - began:.1f} s")


@pytest.mark.slow
def test_an_address_without_a_cluster_is_named(tmp_path: Path) -> None:
    """Joining what is not there ends with the address in the message, not with a wait without end."""
    script = tmp_path / "join.py"
    script.write_text(
        textwrap.dedent("""
        from unlost.engine.cluster import Cluster, ClusterError, ClusterOptions
        try:
            Cluster(ClusterOptions(cpus=1, address="127.0.0.1:1", start_timeout_s=5)).start()
        except ClusterError as error:
            print(error)
        """)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=120)
    assert "ray.address '127.0.0.1:1'" in done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_process_that_uses_ray_already_is_refused() -> None:
    """Two clusters in one process would silently be one."""
    with pytest.raises(ClusterError, match="already uses Ray"):
        Cluster(ClusterOptions(cpus=1)).start()
