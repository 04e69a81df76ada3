"""How the proxy starts, and how it does not."""

from __future__ import annotations

import subprocess

import pytest

from tests.process.kit import BIN, ENV, RELAY, Call, get, started


async def test_port_0_is_printed():
    async with started(RELAY, "serve", "--port", 0) as relay:
        assert relay.port > 0
        assert await get(relay, "/workers") == {"workers": [], "paused": False}
        answer = await (await Call.post(relay, {"input_ids": [1]})).rest()
        assert answer.status == 503


@pytest.mark.parametrize("command", [RELAY, [str(BIN / "dyn-relay")]], ids=["module", "script"])
@pytest.mark.parametrize(
    ("args", "field"),
    [
        (["--migration-limit", "-1"], "migration_limit"),
        (["--worker-urls", "ftp://nowhere"], "worker_urls"),
    ],
)
def test_bad_option_names_the_field(command, args, field):
    done = subprocess.run([*command, "serve", *args], capture_output=True, text=True, env=ENV, check=False)
    assert done.returncode == 2
    assert field in done.stderr


def test_taken_address_is_an_error():
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run([*RELAY, "serve", "--port", port], capture_output=True, text=True, env=ENV, check=False)
    assert done.returncode == 1
    assert "in use" in done.stderr + done.stdout
    assert f"host 127.0.0.1, port {port}" in done.stderr + done.stdout


@pytest.mark.parametrize("host", ["a" * 70, "\u00e4" * 70])
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_host_that_has_no_address_is_named(processes, host):
    flags = ["--port", "0", "--host", host, "--processes", processes]
    env = {**ENV, "PYTHONUTF8": "1"}
    done = subprocess.run([*RELAY, "serve", *flags], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 1
    assert "cannot start" in done.stderr
    assert f"host {host}, port 0" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_trace_file_that_cannot_be_opened_is_named(processes, tmp_path):
    """Also by a process that ends at once: what it has to say is written first."""
    flags = ["--port", "0", "--processes", processes, "--trace-file", str(tmp_path / "no" / "trace")]
    done = subprocess.run([*RELAY, "serve", *flags], capture_output=True, text=True, env=ENV, check=False)
    assert done.returncode == 1
    started = done.stderr.count("process started") if processes == "2" else 1
    assert done.stderr.count("cannot start") == started
    assert f"option='trace_file {tmp_path}/no/trace'" in done.stderr + done.stdout
