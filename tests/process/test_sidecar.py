"""`dyn-sidecar` as a process: registers, survives nothing that it must not, ends as it is told."""

from __future__ import annotations

import json
import signal
import socket
import subprocess

import trio

from dyn_relay.sockets import open_network
from dyn_testkit.client import fetch
from tests.process.kit import BIN, ENV, RELAY, WORKER, Call, get, refused, started
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import judged

SIDECAR = [str(BIN / "dyn-sidecar"), "--lease-secs", "3", "--health-check-interval-secs", "0.2"]
ALERT = ("--health-check-interval-secs", "0.2", "--health-success-threshold", "1")


async def listed(relay, count):
    """The workers that the proxy lists, once there are so many and all are ready."""
    with trio.fail_after(30):
        while True:
            found = (await get(relay, "/workers"))["workers"]
            if len(found) == count and all(one["state"] == "ready" for one in found):
                return {one["url"] for one in found}
            await trio.sleep(0.02)


async def test_the_whole_life_of_a_sidecar():
    """Registered; its engine dies under a stream, which goes on elsewhere; it withdraws, drains, and ends with 0."""
    slow = ("--tick", "0.02")
    async with (
        started(RELAY, "serve", "--port", 0, *ALERT) as relay,
        started(WORKER, *slow) as one,
        started(WORKER, *slow) as two,
        started(SIDECAR, "--engine", one.url, "--relay", relay.url) as side_one,
        started(SIDECAR, "--engine", two.url, "--relay", relay.url) as side_two,
    ):
        assert await listed(relay, 2) == {side_one.url, side_two.url}
        body = generate(60)
        call = await Call.post(relay, body)
        await call.read(3)
        loads = {each["url"]: each["in_flight"] for each in (await get(relay, "/workers"))["workers"]}
        victim, other = (one, side_two) if loads[side_one.url] else (two, side_one)
        victim.process.kill()
        assert judged(await call.rest(), body, ORACLE) == []
        assert await listed(relay, 1) == {other.url}
        last = generate(40)
        call = await Call.post(relay, last)
        await call.read(2)
        other.process.send_signal(signal.SIGTERM)
        await refused(other)
        assert judged(await call.rest(), last, ORACLE) == []
        with trio.fail_after(10):
            assert await other.process.wait() == 0
        await listed(relay, 0)


async def test_a_second_signal_ends_it_at_once():
    async with started(WORKER, "--tick", "0.1") as engine, started(SIDECAR, "--engine", engine.url) as side:
        call = await Call.post(side, generate(1000))
        await call.read(1)
        side.process.send_signal(signal.SIGTERM)
        await refused(side)
        side.process.send_signal(signal.SIGTERM)
        with trio.fail_after(5):
            assert await side.process.wait() == 1
        assert not (await call.rest()).complete


async def test_what_is_asked_is_written_down(tmp_path):
    rows = tmp_path / "rows"
    async with (
        started(WORKER) as engine,
        started(SIDECAR, "--engine", engine.url, "--requests-file", rows) as side,
        open_network() as network,
    ):
        body = generate(3, rid="r" * 32)
        await fetch(network, side.url, "/generate", body)
        await fetch(network, side.url, "/abort_request", {"rid": "r" * 32})
        await fetch(network, side.url, "/generate", b"{no", headers={"content-type": "application/json"})
        await fetch(network, side.url, "/model_info")
        side.process.send_signal(signal.SIGTERM)
        assert await side.process.wait() == 0
    seen = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [(one["path"], one["body"]) for one in seen] == [
        ("/generate", body),
        ("/abort_request", {"rid": "r" * 32}),
        ("/generate", "{no"),
    ]


def test_a_mistake_names_its_option():
    mistakes = [([], "engine"), (["--engine", "x"], "engine"), (["--engine", "http://a:1", "--listen", "x"], "listen")]
    for flags, named in mistakes:
        done = subprocess.run([str(BIN / "dyn-sidecar"), *flags], env=ENV, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert f"{named}:" in done.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        argv = [str(BIN / "dyn-sidecar"), "--engine", "http://127.0.0.1:1", "--listen", at]
        done = subprocess.run(argv, env=ENV, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert "listen" in done.stderr
