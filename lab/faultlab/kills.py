"""Signals to the processes of a job: what a crash, a lost host or a hanging engine looks like."""

import random
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import psutil

from faultlab.drivers import Driver

# kinds that need nothing but the processes below a driver
KILLS = ("replica", "feeder", "driver", "tree", "stop")
_STOP_S = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Kills:
    """Sends signals to processes below drivers that were started here."""

    rng: random.Random

    @property
    def by_kind(self) -> Mapping[str, Callable[[Driver], bool]]:
        """Return what does each of `KILLS` to a driver; it says whether there was a process."""
        return {
            "replica": lambda driver: self._kill_one(driver, "Replica"),
            "feeder": lambda driver: self._kill_one(driver, "MapWorker"),
            "driver": _kill_driver,
            "tree": _kill_tree,
            "stop": self._stop,
        }

    def _chosen(self, driver: Driver, title: str) -> psutil.Process | None:
        processes = driver.workers(title)
        return self.rng.choice(processes) if processes else None

    def _kill_one(self, driver: Driver, title: str) -> bool:
        process = self._chosen(driver, title)
        if process is None:
            return False
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
            return True
        return False

    def _stop(self, driver: Driver) -> bool:
        process = self._chosen(driver, "Replica")
        if process is None:
            return False
        with suppress(psutil.NoSuchProcess):
            process.suspend()
            time.sleep(_STOP_S)
            process.resume()
            return True
        return False


def _kill_driver(driver: Driver) -> bool:
    driver.kill()
    return True


def _kill_tree(driver: Driver) -> bool:
    driver.kill_tree()
    return True
