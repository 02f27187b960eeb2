"""Ray for one run: start it here, or join a cluster; with deadlines that name their cause, and no process left behind.

Promises: a cluster that was started here dies with this process, also on SIGKILL, within a second, so that the same
command can be run again at once. A cluster of an earlier, killed run is never joined by accident. What can't
work (too few CPUs, no such cluster) is an error that says so, not a wait without end.

Three things see to the dying: the kernel kills Ray's daemons with the thread that started them (so that thread is kept
for as long as the cluster lives), Ray's workers end when their raylet is gone, and ``ray_reaper.py`` kills the rest.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Self

from ..journal.errors import UnlostError
from .config_keys import Config
from .data_plane import ENVIRONMENT as DATA_PLANE_ENVIRONMENT

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES: Final = 128 << 20
STOP_TIMEOUT_S: Final = 30.0
SOCKET_ROOM_CHARS: Final = 24
"""Longest temporary directory that leaves room for Ray's socket names within the 107 characters of a Unix socket."""

ENVIRONMENT: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    **DATA_PLANE_ENVIRONMENT,
}


class ClusterError(UnlostError):
    """Ray can't be used; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """What a run asks of Ray. ``cpus``/``gpus``: logical, for all its processes together.

    ``num_cpus``: the user's own figure for a cluster started here (by default exactly ``cpus``). ``address``: a cluster
    to join.
    """

    cpus: float
    gpus: float = 0.0
    num_cpus: int | None = None
    address: str | None = None
    start_timeout_s: float = 120.0


def options_of(config: Config) -> ClusterOptions:
    """The needs of a run: TransferQueue's controller and units, our controller, workers and trainer ranks."""
    return ClusterOptions(
        cpus=(
            2
            + config.data_plane.storage_units
            + config.workers.count * config.workers.cpus
            + config.trainer.world_size * config.trainer.cpus
        ),
        gpus=config.workers.count * config.workers.gpus + config.trainer.world_size * config.trainer.gpus,
        num_cpus=config.ray.num_cpus,
        address=config.ray.address,
        start_timeout_s=config.ray.start_timeout_s,
    )


class Cluster:
    """Ray as this process sees it; a context manager. ``start`` and ``stop`` block: not for an event loop.

    ``namespace``: of the run's actors; new for every cluster object, so that two incarnations never meet.
    """

    def __init__(self, needs: Config | ClusterOptions) -> None:
        self.options = needs if isinstance(needs, ClusterOptions) else options_of(needs)
        self.directory = ""
        """Ray's own files, logs included (``session_latest/logs``); empty for a joined cluster."""
        self._end = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._reaper: subprocess.Popen[bytes] | None = None
        self.namespace = f"unlost-{os.getpid()}-{secrets.token_hex(8)}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start or join. Raises ClusterError."""
        import ray

        if ray.is_initialized():
            raise ClusterError(
                "this process already uses Ray: call ray.shutdown() first, or run in a process of its own"
            )
        logging.getLogger("ray").setLevel(logging.ERROR)
        began = time.monotonic()
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if self.options.address is None:
            self._start_here()
        else:
            self._join(self.options.address)
        self._check_resources(began + self.options.start_timeout_s)
        log.info("Ray is up after %.1f s, namespace %s", time.monotonic() - began, self.namespace)

    def stop(self) -> None:
        """End everything that ``start`` began; harmless twice."""
        self._end.set()
        if self._thread is not None and not self._ended.wait(STOP_TIMEOUT_S):
            log.warning("Ray did not shut down within %g s; its processes are killed", STOP_TIMEOUT_S)
        reaper, self._reaper = self._reaper, None
        if reaper is not None and reaper.stdin is not None:
            reaper.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                reaper.wait(STOP_TIMEOUT_S)

    # --- a cluster of our own ---------------------------------------------------------------------------------------

    def _start_here(self) -> None:
        cpus = self.options.num_cpus if self.options.num_cpus is not None else round(self.options.cpus + 0.499)
        if cpus < self.options.cpus:
            raise ClusterError(
                f"ray.num_cpus is {cpus}, but this run's processes need {self.options.cpus:g}: raise it, or leave it "
                "out (these are logical CPUs, there may be more of them than the machine has)"
            )
        self.directory = _session_directory()
        reaper = os.path.join(os.path.dirname(__file__), "ray_reaper.py")
        self._reaper = subprocess.Popen(  # noqa: S603  # our own file
            [sys.executable, "-I", "-S", reaper, self.directory, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal is not for it
            env={},
        )
        self._in_own_thread(
            lambda ray: ray.init(
                address="local",
                num_cpus=cpus,
                include_dashboard=False,
                namespace=self.namespace,
                log_to_driver=False,
                configure_logging=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=self.directory,
            ),
            "Ray did not start on this machine",
        )

    def _join(self, address: str) -> None:
        self._in_own_thread(
            lambda ray: ray.init(
                address=address,
                namespace=self.namespace,
                log_to_driver=False,
                configure_logging=False,
                runtime_env={"env_vars": ENVIRONMENT},
            ),
            f"no Ray cluster answers at ray.address {address!r}",
        )

    def _in_own_thread(self, init: Callable[[Any], Any], failure: str) -> None:
        """Run ``ray.init`` in a thread that stays until ``stop``: Ray's daemons die with the thread that made them."""
        ready = threading.Event()
        errors: list[Exception] = []

        def live() -> None:
            import ray

            try:
                init(ray)
            except Exception as error:  # noqa: BLE001  # becomes a ClusterError on the calling thread
                errors.append(error)
            ready.set()
            self._end.wait()
            with contextlib.suppress(Exception):
                ray.shutdown()
            self._ended.set()

        self._thread = threading.Thread(target=live, name="ray", daemon=True)
        self._thread.start()
        if not ready.wait(self.options.start_timeout_s):
            self._abort_start()
            raise ClusterError(f"{failure} within ray.start_timeout_s = {self.options.start_timeout_s:g} s")
        if errors:
            self.stop()
            raise ClusterError(f"{failure}: {type(errors[0]).__name__}: {errors[0]}") from errors[0]

    def _abort_start(self) -> None:
        self._end.set()
        if self._reaper is not None and self._reaper.stdin is not None:
            self._reaper.stdin.close()

    # --- after that -------------------------------------------------------------------------------------------------

    def _check_resources(self, limit: float) -> None:
        """Wait until the cluster has what the run needs free, at most until ``limit``. Raises ClusterError."""
        import ray

        needed = {"CPU": self.options.cpus, "GPU": self.options.gpus}
        while True:
            total, free = ray.cluster_resources(), ray.available_resources()
            lacking = [name for name, amount in needed.items() if free.get(name, 0.0) < amount]
            if not lacking:
                return
            never = any(total.get(name, 0.0) < needed[name] for name in lacking)
            # A joined cluster may still grow, or another run may end; one of our own has all it will ever have.
            if time.monotonic() > limit or (never and self.options.address is None):
                self.stop()
                figures = "; ".join(
                    f"{name}: {needed[name]:g} needed, {total.get(name, 0):g} there, {free.get(name, 0):g} free"
                    for name in lacking
                )
                raise ClusterError(
                    f"the Ray cluster can't hold this run ({figures}): use a larger one, or lower workers.count, "
                    "workers.cpus/gpus, trainer.world_size, trainer.cpus/gpus or data_plane.storage_units"
                )
            time.sleep(0.2)


def _session_directory() -> str:
    """A short directory for Ray's files. Those of drivers that are gone are removed."""
    base = tempfile.gettempdir()
    if len(base) > SOCKET_ROOM_CHARS:
        base = "/tmp"  # noqa: S108  # made private below
    root = os.path.join(base, f"unlost-{os.getuid()}")
    os.makedirs(root, mode=0o700, exist_ok=True)
    if os.stat(root).st_uid != os.getuid():
        raise ClusterError(f"{root} belongs to another user: set TMPDIR to a directory of your own")
    for name in os.listdir(root):
        pid = name.partition("-")[0]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            shutil.rmtree(os.path.join(root, name), ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=root)
