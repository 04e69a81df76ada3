"""`dyn-mock-worker` as a process."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import grpc
import httpx
import pytest
import zmq

from dyn_relay.grpc import methods
from dyn_relay.grpc import sglang_pb2 as pb

START = [sys.executable, "-c", "from dyn_testkit.cli import main; main()"]
BODY = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 3, "temperature": 0}, "stream": True}


@contextmanager
def worker(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    # Whoever runs the tests in the background has it ignored, and a worker that inherits that ignores it, too.
    heeded = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    argv = [*START, "--port", "0", *flags]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, preexec_fn=heeded)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("listening on http://127.0.0.1:")
        yield process, line.removeprefix("listening on ").strip()
    finally:
        process.kill()
        process.communicate()


def test_it_serves_and_dies_on_demand() -> None:
    with worker("--dialect", "incremental", "--weight-version", "v7", "--fault", "1:kill@2") as (process, url):
        whole = httpx.post(f"{url}/generate", json=BODY, trust_env=False)
        assert whole.text.count('"weight_version":"v7"') == 3
        assert whole.text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.post(f"{url}/generate", json=BODY, trust_env=False)
        assert process.wait(timeout=30) == 137


def test_a_pair_of_processes() -> None:
    flags = ["--disaggregation-bootstrap-port", "0", "--bootstrap-timeout", "30", "--fault", "1:kill@transfer"]
    with (
        worker("--disaggregation-mode", "prefill", *flags) as (process, prefill),
        worker("--disaggregation-mode", "decode", "--heartbeat", "0.05") as (_, decode),
        ThreadPoolExecutor() as threads,
    ):
        told = httpx.get(f"{prefill}/server_info", trust_env=False).json()
        assert told["disaggregation_mode"] == "prefill"
        meeting = {"bootstrap_host": "127.0.0.1", "bootstrap_port": told["disaggregation_bootstrap_port"]}
        body = BODY | meeting | {"bootstrap_room": 2**63 - 1, "stream": False}
        alone = threads.submit(httpx.post, f"{prefill}/generate", json=body, trust_env=False)
        whole = httpx.post(f"{decode}/generate", json=body, trust_env=False).json()
        assert len(whole["output_ids"]) == 3
        assert alone.result().json()["output_ids"] == whole["output_ids"][:1]
        dying = threads.submit(httpx.post, f"{prefill}/generate", json=body, trust_env=False)
        failed = httpx.post(f"{decode}/generate", json=body, trust_env=False)
        assert (failed.status_code, "Lost connection" in failed.text) == (500, True)
        assert isinstance(dying.exception(), httpx.RemoteProtocolError)
        assert process.wait(timeout=30) == 137


def test_it_serves_grpc_beside_http() -> None:
    with worker("--grpc-port", "0", "--fault", "0:grpc14@2", "--fault", "1:goaway11@head", "--fault", "3:kill@1") as (
        process,
        url,
    ):
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("listening on grpc://127.0.0.1:")
        request = pb.GenerateRequest(input_ids=[1, 2], sampling_params=pb.SamplingParams(max_new_tokens=3))
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
        with grpc.insecure_channel(line.rpartition("/")[2].strip()) as channel:
            ends = [over_grpc(channel, request) for _ in range(4)]
        assert [code for code, _ in ends] == ["UNAVAILABLE", "UNAVAILABLE", "OK", "UNAVAILABLE"]
        assert ends[2][1] == 3
        assert process.wait(timeout=30) == 137


def over_grpc(channel: grpc.Channel, request: pb.GenerateRequest) -> tuple[str, int]:
    """How the call ends, and how many ids came."""
    method = methods.GENERATE
    ask = channel.unary_stream(method.path, method.request.SerializeToString, method.response.FromString)
    call = ask(request, timeout=30, wait_for_ready=True)
    try:
        ids = [len(message.output_ids) for message in call]
    except grpc.RpcError:
        ids = [0]
    return call.code().name, ids[-1]


def test_an_interrupt_ends_it_quietly() -> None:
    with worker() as (process, _):
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0


def test_a_bad_fault_is_a_usage_error() -> None:
    ended = subprocess.run([*START, "--fault", "kill@2"], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "--fault" in ended.stderr


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ([], None),
        (["--with-tokenizer"], "<300>"),
        (["--tokenizer", "byte-level"], "\ufffd"),
        (["--with-tokenizer", "--tokenizer", "sentencepiece"], ""),
    ],
)
def test_its_tokenizer(flags: list[str], text: str | None) -> None:
    token = 300
    with worker(*flags) as (_, url):
        asked = {"text": "a"} if text is not None else {"input_ids": [1]}
        answer = httpx.post(f"{url}/generate", json=asked, trust_env=False)
        assert answer.status_code == 200
        assert ("text" in answer.json()) == (text is not None)
        told = httpx.post(f"{url}/detokenize", json={"tokens": [token]}, trust_env=False)
        assert told.json().get("text") == text


def test_it_publishes_its_cache() -> None:
    with worker("--kv-events", '{"page_size": 4, "topic": "t", "replay": false}') as (_, url):
        told = httpx.get(f"{url}/server_info", trust_env=False).json()["kv_events"]
        assert (told["publisher"], told["topic"], told["block_size"], told["dp_size"]) == ("zmq", "t", 4, 1)
        assert "replay_endpoint_port_base" not in told
        with zmq.Context() as context, context.socket(zmq.SUB) as socket:
            socket.subscribe(b"t")
            socket.connect(f"tcp://127.0.0.1:{told['endpoint_port_base']}")
            for begin in range(1000):  # until the subscription has arrived
                body = {"input_ids": [begin, 2, 3, 4, 5], "sampling_params": {"max_new_tokens": 1}}
                httpx.post(f"{url}/generate", json=body, trust_env=False)
                if socket.poll(20):
                    break
            topic, _, payload = socket.recv_multipart()
            assert topic == b"t"
            assert b"BlockStored" in payload


@pytest.mark.parametrize(
    ("text", "problem"), [("[]", "JSON object"), ('{"page": 4}', "no such option"), ('{"page_size": "x"}', "Expected")]
)
def test_bad_options_of_the_cache(text: str, problem: str) -> None:
    ended = subprocess.run([*START, "--kv-events", text], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert problem in ended.stderr
