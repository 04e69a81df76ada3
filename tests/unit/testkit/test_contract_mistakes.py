"""The usual mistakes get a message that says what to do; nothing hangs, whatever the worker does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from contract_kit import report_of, serving, setup

from dyn_relay.net import Connection, ConnectionBroken
from dyn_testkit import faults
from dyn_testkit.contract import ContractBroken, Endpoint, NoWorker, check_worker
from dyn_testkit.faults import FaultPlan
from dyn_testkit.simnet import SimNetwork
from dyn_testkit.worker import MockWorker, control, generate


async def a_coroutine() -> str:
    return "http://worker:1"


async def a_generator() -> AsyncIterator[str]:
    yield "http://worker:1"


@contextmanager
def a_plain_manager() -> Iterator[str]:
    yield "http://worker:1"


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("http://worker:1", "worker_factory must be a function without arguments, not 'http://worker:1'"),
        (MockWorker.serve(SimNetwork()), "worker_factory is a context manager; give a function that makes one"),
        (lambda: "http://worker:1", "must return an async context manager, not http://worker:1"),
        (a_coroutine, "not <coroutine.*; an `async def` that yields needs @contextlib.asynccontextmanager"),
        (a_generator, "not <async_generator.*; put @contextlib.asynccontextmanager on it"),
        (a_plain_manager, "a plain context manager is not enough"),
        (lambda: nullcontext(), "must yield a URL, or something with a `url`, not None"),
        (lambda: nullcontext(SimpleNamespace(url=8000)), "must yield a URL, or something with a `url`"),
    ],
)
async def test_a_factory_that_is_none(factory: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        await check_worker(factory)


@pytest.mark.parametrize("url", ["worker:1", "https://worker:1", "http://", "http://worker:1/v1", "http://w?x=1"])
async def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(ValueError, match=r"must be http://HOST:PORT, not '"):
        await check_worker(lambda: nullcontext(url))


@pytest.mark.parametrize(
    ("wrong", "kind", "words"),
    [
        ({"only": ["abort_by_name"]}, ValueError, r"no check 'abort_by_name'; is it abort_by_prefix"),
        ({"skip": ["xyzzy"]}, ValueError, r"no check 'xyzzy'; see CHECKS"),
        ({"only": ["health"], "skip": ["health"]}, ValueError, "leave nothing to run"),
        ({"only": []}, ValueError, "leave nothing to run"),
        ({"dialect": "mixd"}, ValueError, "dialect= must be one of cumulative, incremental, mixed, not 'mixd'"),
        ({"live_seconds": 0}, ValueError, "live_seconds= must be 0.1 at least, not 0"),
        ({"answer_timeout": -1}, ValueError, "answer_timeout= must be 0.1 at least, not -1"),
        ({"only": "health"}, TypeError, "collections of names, not a string"),
        ({"prompt": [5]}, ValueError, r"needs three tokens at least, not \[5\]"),
        ({"tokeniser": True}, TypeError, "unexpected keyword argument 'tokeniser'"),
    ],
)
async def test_wrong_arguments(wrong: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        await check_worker(serving(setup()), **wrong)


async def test_nobody_listens(autojump_clock: trio.testing.MockClock) -> None:
    with pytest.raises(
        NoWorker, match=r"cannot connect to http://worker:9: .*refused.*start_timeout=30 s.*listen there"
    ):
        await check_worker(lambda: nullcontext(Endpoint("http://worker:9", SimNetwork())), start_timeout=30)
    assert 29 < trio.current_time() < 31


async def test_a_worker_may_listen_late(autojump_clock: trio.testing.MockClock) -> None:
    """A factory that yields before its worker listens is waited for."""
    network = SimNetwork()

    @asynccontextmanager
    async def late() -> AsyncIterator[MockWorker]:
        worker = MockWorker(network, "worker", 1, setup())
        async with trio.open_nursery() as nursery:

            async def start() -> None:
                await trio.sleep(20)
                await worker.run()

            nursery.start_soon(start)
            yield worker
            nursery.cancel_scope.cancel()

    assert (await check_worker(late, only=["ready"])).passed == ["ready"]


async def test_a_factory_that_never_yields(autojump_clock: trio.testing.MockClock) -> None:
    @asynccontextmanager
    async def never() -> AsyncIterator[str]:
        await trio.sleep_forever()
        yield ""

    with pytest.raises(NoWorker, match="has not yielded within start_timeout=120 s"):
        await check_worker(never)


async def test_a_factory_that_never_ends(autojump_clock: trio.testing.MockClock) -> None:
    @asynccontextmanager
    async def stuck() -> AsyncIterator[MockWorker]:
        async with serving(setup())() as worker:
            yield worker
            await trio.sleep_forever()

    with pytest.raises(RuntimeError, match="has not ended within 120 s; it was cancelled"):
        await check_worker(stuck, only=["ready"])


async def test_the_factorys_own_error_is_its_own(autojump_clock: trio.testing.MockClock) -> None:
    @asynccontextmanager
    async def failing() -> AsyncIterator[str]:
        raise OSError("no GPU")
        yield ""

    with pytest.raises(OSError, match="no GPU"):
        await check_worker(failing)


@asynccontextmanager
async def saying(says: bytes | None) -> AsyncIterator[Endpoint]:
    """A server that says the same to everybody; None: nothing."""
    network = SimNetwork()
    listener = await network.listen("worker", 1)

    async def serve(connection: Connection) -> None:
        try:
            await connection.receive()
            if says is None:
                await trio.sleep_forever()
            await connection.send(says or b"")
        except ConnectionBroken:
            pass
        connection.close()

    async with trio.open_nursery() as nursery:

        async def accept() -> None:
            while True:
                nursery.start_soon(serve, await listener.accept())

        nursery.start_soon(accept)
        yield Endpoint("http://worker:1", network)
        nursery.cancel_scope.cancel()


PAGE = b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 15\r\n\r\n<h1>Welcome</h1"


@pytest.mark.parametrize(
    ("says", "words"),
    [
        (PAGE, r"is no SGLang worker: it says 200 text/html: <h1>Welcome</h1 to POST /generate \{.*the right URL"),
        (b"SSH-2.0-OpenSSH_9\r\n", "does not answer a generation of one token: the answer is not whole HTTP"),
        (b"", r"one token: the answer is not whole HTTP: eof\. Came: no answer \(eof\)"),
        (None, r"one token: no whole answer within 60 s\. Came: no answer"),
        (PAGE[:-3], r"one token: .*Came: 200 text/html: <h1>Welcome< \[cut: eof\]"),
    ],
)
async def test_something_else_listens(autojump_clock: trio.testing.MockClock, says: bytes | None, words: str) -> None:
    with pytest.raises(NoWorker, match=words):
        await check_worker(lambda: saying(says))


@pytest.mark.parametrize(
    ("key", "words"),
    [(None, r"wants a key: give api_key=\. It says 401"), ("wrong", r"does not take the api_key= that was given")],
)
async def test_a_key_is_wanted(autojump_clock: trio.testing.MockClock, key: str | None, words: str) -> None:
    with pytest.raises(NoWorker, match=words) as caught:
        await check_worker(serving(setup(api_key="secret")), api_key=key)
    assert "wrong" not in str(caught.value)


async def test_a_broken_check_says_all(autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name, the fact and its source, what was sent, what came, what is wrong."""
    monkeypatch.setattr(control, "EMPTY_OK", control.json_reply({"ok": True}))
    with pytest.raises(ContractBroken) as caught:
        await check_worker(serving(setup()), only=["abort_answers_empty", "ready"])
    assert str(caught.value) == (
        "the worker at http://worker:30000 does not keep SGLang's contract: 1 passed, 0 skipped, 1 broken\n\n"
        "abort_answers_empty (§1.1, http_server.py:1721)\n"
        "  contract: `POST /abort_request` is always 200 with an empty body, whatever the rid.\n"
        "  broken:   body: got b'{\"ok\":true}', the contract says b''\n"
        '  sent:     POST /abort_request {"rid": "' + caught.value.report.outcomes[1].sent.split('"')[3] + '"}\n'
        '  came:     200 application/json: {"ok":true}'
    )
    assert isinstance(caught.value, AssertionError)


async def test_a_missing_key_is_named(autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    methods, admin, _ = control.ROUTES["/model_info"]

    async def other(worker: MockWorker, request: Any) -> Any:
        return control.json_reply({"model_path": "m"})

    monkeypatch.setitem(control.ROUTES, "/model_info", (methods, admin, other))
    report = await report_of(serving(setup()), only=["weight_version_is_the_servers"])
    assert report.broken == {"weight_version_is_the_servers": "the answer has no 'weight_version'"}


async def test_what_is_broken_for_one_reason_is_told_once(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first check has the whole story, the others are named."""
    monkeypatch.setattr(generate, "DONE", b"data: [END]\n\n")
    with pytest.raises(ContractBroken) as caught:
        await check_worker(serving(setup()), only=["meta_keys", "one_finish", "counters_grow"])
    assert str(caught.value).count("broken:   the last event is not `data: [DONE]`") == 1
    assert "  so, too:  2 other checks: counters_grow, one_finish" in str(caught.value)


def hanging(path: str) -> Callable[[pytest.MonkeyPatch], None]:
    async def hang(worker: MockWorker, request: Any) -> Any:
        await trio.sleep_forever()

    return lambda patch: patch.setitem(control.ROUTES, path, (("GET",), False, hang))


async def test_a_hanging_route_is_a_failure(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging("/ready")(monkeypatch)
    report = await report_of(serving(setup()), only=["ready", "unary_keys"], answer_timeout=7.0)
    assert report.broken == {"ready": "no whole answer within 7 s"}
    assert report.passed == ["unary_keys"]


async def test_a_stalled_stream_is_a_failure(autojump_clock: trio.testing.MockClock) -> None:
    """Every stream stops after two tokens."""
    plan = FaultPlan.of(faults.Fault(faults.at_token(2), faults.STALL, lambda seen: b'"stream": true' in seen.body))
    network = SimNetwork()
    report = await report_of(
        lambda: MockWorker.serve(network, "worker", 1, setup(), plan), only=["one_finish", "ready"], dialect="mixed"
    )
    assert report.broken == {"one_finish": "no whole answer within 60 s"}


async def test_a_worker_that_dies_ends_the_run(autojump_clock: trio.testing.MockClock) -> None:
    """Checks that cannot be run any more are not called broken, and time is not wasted on them."""
    plan = FaultPlan.of(
        faults.Fault(faults.at_token(3), faults.KILL_WORKER, lambda seen: b"return_prompt" in seen.body)
    )
    network = SimNetwork()
    with pytest.raises(
        ContractBroken, match=r"not run, the worker has not answered any more since prompt_token_ids: b"
    ):
        await check_worker(
            lambda: MockWorker.serve(network, "worker", 1, setup(), plan),
            only=["unary_keys", "prompt_token_ids", "batch", "rid_is_made"],
        )
