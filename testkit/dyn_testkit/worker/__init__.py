"""Mock SGLang workers."""

from dyn_testkit.worker.core import MockWorker, Recorded, WorkerIsDead
from dyn_testkit.worker.legs import Phase
from dyn_testkit.worker.options import Dialect, WorkerOptions

__all__ = ["Dialect", "MockWorker", "Phase", "Recorded", "WorkerIsDead", "WorkerOptions"]
