"""Mock SGLang workers."""

from dyn_testkit.worker.core import MockWorker, Recorded, WorkerIsDead
from dyn_testkit.worker.options import Dialect, WorkerOptions

__all__ = ["Dialect", "MockWorker", "Recorded", "WorkerIsDead", "WorkerOptions"]
