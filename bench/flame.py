"""Where the proxy's time goes: `python bench/flame.py B-paced OUT.svg`, a flame graph by py-spy of one workload.

`PYTHONPATH=OTHER/src python bench/flame.py ...` is that of another checkout. Samples are taken without stopping the
proxy, so a few are torn; time that it waits for events is left out.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import procs
from peers import PEERS, python_with
from procs import LOAD_CORE, PROXY_CORE
from workloads import WORKLOADS

PY_SPY = "py-spy==0.4.3"
#: Samples a second, and how many seconds of samples are taken.
RATE, SECS = 400, 20


def main() -> None:
    """Run the workload again and again while py-spy looks on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    procs.require_build()
    workload = WORKLOADS[options.workload]
    spy = Path(python_with(PY_SPY)).with_name("py-spy")
    worker_port, port = procs.free_ports(2)
    with (
        procs.running(procs.worker_command(worker_port, list(workload.worker)), LOAD_CORE, "flame-worker"),
        procs.running(PEERS["dyn-relay"].command(port, [worker_port]), PROXY_CORE, "flame-proxy") as proxy,
    ):
        procs.wait_until_serving(port)
        procs.load(port, *workload.warm, core=LOAD_CORE)
        command = [str(spy), "record", "--pid", str(proxy), "--rate", str(RATE), "--duration", str(SECS)]
        command += ["--nonblocking", "--output", str(options.out)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as recording:
            while recording.poll() is None:
                procs.load(port, workload.body, workload.load, core=LOAD_CORE)
    if recording.returncode:
        raise SystemExit(f"py-spy has failed: {recording.returncode}")


if __name__ == "__main__":
    main()
