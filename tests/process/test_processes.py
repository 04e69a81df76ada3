"""`--processes N`: real processes before real workers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from dyn_testkit import laws
from dyn_testkit.laws import Case, Observed
from dyn_testkit.relay import until
from tests.process.kit import ENV, RELAY, WORKER, Call, post, refused, started
from tests.process.test_kill import ORACLE, body


def children(supervisor):
    """The pids of the processes that serve, in no order."""
    pid = supervisor.process.pid
    return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def runs(pid):
    """It is there, and no zombie that nobody has asked for its exit code."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def connections(port):
    """The established connections of a server at `port`, by inode: the client's port."""
    inodes = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1].endswith(f":{port:04X}") and fields[3] == "01":
            inodes[fields[9]] = int(fields[2].split(":")[1], 16)
    return inodes


def holder(pids, port):
    """By the client's port: which of `pids` has the connection to `port`."""
    inodes = connections(port)
    found = {}
    for pid in pids:
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            try:
                link = os.readlink(f"/proc/{pid}/fd/{descriptor}")
            except OSError:
                continue
            inode = link.removeprefix("socket:[").removesuffix("]")
            if inode in inodes:
                found[inodes[inode]] = pid
    return found


def metrics(answer):
    pairs = (line.rpartition(" ") for line in answer.body.decode().splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


async def scrape(relay, processes):
    """The page, once so many answer in time: on a busy machine one may be late."""
    while True:
        answer = await (await Call.post(relay, {}, "/metrics", method="GET")).rest()
        assert answer.status == 200
        page = metrics(answer)
        if sum(value for name, value in page.items() if "process_up" in name) == processes:
            return page


async def listed(relay):
    """The workers, by all processes."""
    while True:
        answer = await (await Call.post(relay, {}, "/workers", method="GET")).rest()
        if not any(name == b"x-dyn-relay-silent" for name, _ in answer.headers):
            return answer.json()["workers"]


async def ordered(relay, path, body, status, method="POST"):
    """Return once all have done it: it is safe to do it again for one that was late, and may have done it since."""
    late = False
    while True:
        answer = await (await Call.post(relay, body, path, method=method)).rest()
        if answer.status != 504:
            assert answer.status == status or (late and answer.status == 404)
            return
        late = True


async def loaded(relay, load):
    """Return once all processes together have so much at the first worker."""
    while (await listed(relay))[0]["load"] < load:
        pass


def local(call):
    return call._stream.socket.getsockname()[1]


async def exact(request, call):
    laws.equivalence(Observed(Case(json.dumps(request).encode()), await call.rest()), ORACLE)


async def test_kill_one_of_four_under_load():
    """Must be shown 6: `kill -9` of one of `--processes 4`: the others serve on, the supervisor replaces it.

    The killed one's clients see their connections break, which nothing can help; no answer passes for a whole one.
    """
    requests = [body(number, 40, stream=True) for number in range(32)]
    async with (
        started(WORKER) as worker,
        started(RELAY, "serve", "--port", 0, "--worker-urls", worker.url, "--processes", 4) as relay,
    ):
        before = children(relay)
        assert len(before) == 4
        await post(worker, "/pause_generation", {"mode": "in_place"})
        calls = [await Call.post(relay, request) for request in requests]
        await loaded(relay, len(calls))
        held = holder(before, relay.port)
        victim = held[local(calls[0])]
        os.kill(victim, signal.SIGKILL)
        lost = [call for call in calls if held[local(call)] == victim]
        spared = [number for number, call in enumerate(calls) if held[local(call)] != victim]
        assert spared  # 32 connections and four listeners
        for call in lost:
            answer = await call.rest()
            assert not answer.complete
        await until(lambda: len(children(relay)) == 4 and victim not in children(relay))
        [newcomer] = set(children(relay)) - set(before)
        late = []
        while newcomer not in holder(children(relay), relay.port).values():
            request = body(1000 + len(late), 8, stream=False)
            late.append((request, await Call.post(relay, request)))
        await post(worker, "/continue_generation", {})
        for number in spared:
            await exact(requests[number], calls[number])
        for request, call in late:
            await exact(request, call)
        relay.process.terminate()
        assert await relay.process.wait() == 0


async def test_what_all_must_know_reaches_all_and_the_replacement():
    """A worker that joins, one that leaves, an abort: whichever process is asked; one page of metrics for all."""
    async with (
        started(WORKER) as first,
        started(WORKER) as second,
        started(RELAY, "serve", "--port", 0, "--worker-urls", first.url, "--processes", 3) as relay,
    ):
        [known] = await listed(relay)
        await ordered(relay, "/workers", {"url": second.url}, 202)
        for _ in range(12):
            assert [worker["url"] for worker in await listed(relay)] == [first.url, second.url]
        await ordered(relay, f"/workers/{known['id']}", {}, 202, method="DELETE")
        for victim in children(relay)[:2]:  # what they had been told is not in the configuration
            os.kill(victim, signal.SIGKILL)
            await until(lambda victim=victim: len(set(children(relay)) - {victim}) == 3)
        await scrape(relay, 3)
        for _ in range(12):
            assert [worker["url"] for worker in await listed(relay)] == [second.url]

        await post(second, "/pause_generation", {"mode": "in_place"})
        calls = [await Call.post(relay, body(number, 20, stream=False)) for number in range(8)]
        await loaded(relay, 8)
        assert (await scrape(relay, 3))["dyn_relay_requests_in_flight"] == 8
        await ordered(relay, "/abort_request", {"rid": "request-"}, 200)
        for call in calls:
            answer = await call.rest()
            assert answer.json()["meta_info"]["finish_reason"]["type"] == "abort"
        relay.process.terminate()
        assert await relay.process.wait() == 0


async def test_counters_outlive_the_process_that_counted():
    """What a scraper was told is not taken back by a death: Prometheus would take it for a restart from zero."""
    async with (
        started(WORKER) as worker,
        started(RELAY, "serve", "--port", 0, "--worker-urls", worker.url, "--processes", 2) as relay,
    ):
        for number in range(16):
            await exact(body(number, 4, stream=False), await Call.post(relay, body(number, 4, stream=False)))
        done = 'dyn_relay_requests_total{outcome="done"}'
        assert (await scrape(relay, 2))[done] == 16
        for victim in children(relay):
            os.kill(victim, signal.SIGKILL)
            await until(lambda victim=victim: len(set(children(relay)) - {victim}) == 2)
        after = await scrape(relay, 2)
        assert after[done] == 16
        assert after["dyn_relay_ttft_seconds_count"] == 16
        assert after["dyn_relay_requests_in_flight"] == 0
        await exact(body(99, 4, stream=False), await Call.post(relay, body(99, 4, stream=False)))
        assert (await scrape(relay, 2))[done] == 17


async def test_first_signal_drains_all():
    """K1 with several processes; the signal goes to the whole group, as init systems send it, and counts once."""
    requests = [body(number, 30, stream=True) for number in range(12)]
    async with (
        started(WORKER) as worker,
        started(RELAY, "serve", "--port", 0, "--worker-urls", worker.url, "--processes", 3) as relay,
    ):
        await post(worker, "/pause_generation", {"mode": "in_place"})
        calls = [await Call.post(relay, request) for request in requests]
        await loaded(relay, len(calls))
        for pid in (relay.process.pid, *children(relay)):
            os.kill(pid, signal.SIGTERM)
        await refused(relay)
        await post(worker, "/continue_generation", {})
        for request, call in zip(requests, calls, strict=True):
            await exact(request, call)
        assert await relay.process.wait() == 0


async def test_second_signal_ends_all_at_once():
    async with (
        started(WORKER, "--tick", 0.01) as worker,
        started(RELAY, "serve", "--port", 0, "--worker-urls", worker.url, "--processes", 2) as relay,
    ):
        calls = [await Call.post(relay, body(number, 100_000, stream=True)) for number in range(6)]
        for call in calls:
            await call.read(events=2)
        relay.process.terminate()
        await refused(relay)
        relay.process.terminate()
        assert await relay.process.wait() == 1
        for call in calls:
            assert not (await call.rest()).complete


async def test_processes_whose_supervisor_is_killed_drain():
    """None is left behind, and no answer is lost."""
    async with (
        started(WORKER) as worker,
        started(RELAY, "serve", "--port", 0, "--worker-urls", worker.url, "--processes", 2) as relay,
    ):
        pids = children(relay)
        await post(worker, "/pause_generation", {"mode": "in_place"})
        call = await Call.post(relay, body(1, 20, stream=True))
        await loaded(relay, 1)
        relay.process.kill()
        await refused(relay)
        await post(worker, "/continue_generation", {})
        await exact(body(1, 20, stream=True), call)
        await until(lambda: not any(map(runs, pids)))


def test_a_process_that_cannot_start_ends_it_all(tmp_path):
    """Loudly, after some tries, with exit code 1."""
    nowhere = tmp_path / "missing" / "trace.jsonl"
    done = subprocess.run(
        [*RELAY, "serve", "--port", "0", "--processes", "2", "--trace-file", str(nowhere)],
        capture_output=True,
        text=True,
        env=ENV,
        check=False,
    )
    assert done.returncode == 1
    assert "dies again and again" in done.stderr
    assert "listening" not in done.stdout


@pytest.mark.parametrize("shared", [False, True], ids=["another program", "another proxy"])
def test_a_taken_port_is_an_error(shared):
    """Though SO_REUSEPORT would let two proxies share one."""
    with socket.socket() as taken:
        if shared:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [*RELAY, "serve", "--port", port, "--processes", "2"],
            capture_output=True,
            text=True,
            env=ENV,
            check=False,
        )
    assert done.returncode == 1
    assert "in use" in done.stderr
