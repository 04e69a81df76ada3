"""The contract test passes what keeps the contract, says what it skips, and runs what it is told to run."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import trio
import trio.testing
from click.testing import CliRunner, Result
from contract_kit import report_of, serving, setup
from mock_worker_kit import DIALECTS, body
from toy_routers import first_of_two

from dyn_relay.net import Connection
from dyn_relay.sockets import open_network
from dyn_testkit.client import fetch
from dyn_testkit.contract import CHECKS, __main__, check_worker
from dyn_testkit.simnet import Fragmentation, Link, SimNetwork
from dyn_testkit.worker import Dialect, MockWorker, control
from dyn_testkit.worker.render import Renderer
from dyn_testkit.worker.wire import Request

TOKENIZER_ONLY = {"stop_string", "no_stop_trim", "texts_add_up"}
TOKEN_MODE_ONLY = {"refuses_stop_string_in_token_mode"}
NEEDS_LIFE = {"stream_is_not_held_back", "live_rid_is_refused", "live_rid_is_refused_to_a_stream"}
NEEDS_LIFE |= {"disconnect_aborts", "disconnect_aborts_a_unary_request"}
NEEDS_LIFE |= {name for name in CHECKS if name.startswith("abort_")} - {"abort_answers_empty"}


@pytest.mark.parametrize("tokenizer", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_the_mock_keeps_it(autojump_clock: trio.testing.MockClock, dialect: Dialect, tokenizer: bool) -> None:
    how = setup(dialect=dialect, skip_tokenizer_init=not tokenizer, api_key="secret")
    report = await check_worker(serving(how), api_key="secret")
    assert set(report.skipped) == (TOKEN_MODE_ONLY if tokenizer else TOKENIZER_ONLY)
    assert set(report.passed) | set(report.skipped) == set(CHECKS)
    assert (report.facts.dialect, report.facts.tokenizer, report.facts.context_length) == (dialect, tokenizer, 2000)


@pytest.mark.parametrize(
    "more",
    [
        {"late_finish": True, "skip_tokenizer_init": False},
        {"tokens_per_tick": 4, "dialect": "incremental"},
        {"stream_interval": 50, "dialect": "mixed"},
        {"tick": 0.5, "max_running_requests": 1},
        {"max_running_requests": 2, "dialect": "incremental"},
        {"stream_interval": 3},
        {"dp_size": 2, "radix_cache": False},
        {"min_new_tokens_needs_tokenizer": False, "health_delay": 1.0},
        {"preferred_sampling_params": {"max_new_tokens": 7, "temperature": 0.3}},
    ],
)
async def test_so_do_other_kinds_of_mock(autojump_clock: trio.testing.MockClock, more: dict[str, Any]) -> None:
    await check_worker(serving(setup(**more)))


async def test_what_a_worker_cannot_be_asked_is_skipped_with_a_reason(autojump_clock: trio.testing.MockClock) -> None:
    how = setup(tick=0.5, max_running_requests=1, admin_api_key="another")
    names = ["abort_by_prefix", "abort_all", "default_budget", "pause_and_continue"]
    report = await check_worker(serving(how), only=names)
    assert report.skipped["abort_by_prefix"] == "3 requests must run at a time; max_running_requests is 1"
    assert report.skipped["abort_all"] == "2 requests must run at a time; max_running_requests is 1"
    assert report.skipped["default_budget"] == "they take 64 s here: give answer_timeout="
    assert report.skipped["pause_and_continue"] == "/pause_generation wants another key"


async def test_a_writer_may_spell_and_add(autojump_clock: trio.testing.MockClock, monkeypatch: Any) -> None:
    """Whole numbers without a fraction, keys that nobody knows."""
    real = Renderer.answer

    def answer(self: Renderer, *more: Any, **named: Any) -> dict[str, Any]:
        value = real(self, *more, **named)
        for row in value["meta_info"].get("output_token_logprobs", ()):
            row[0] = -1
        return value | {"a_key_of_mine": 1}

    monkeypatch.setattr(Renderer, "answer", answer)
    assert not (await report_of(serving(setup()), only=["output_logprobs", "unary_keys", "unary_is_the_fold"])).broken


async def test_it_does_not_mind_how_bytes_are_cut(autojump_clock: trio.testing.MockClock) -> None:
    network = SimNetwork(3, Link(fragmentation=Fragmentation(60)))
    await check_worker(lambda: MockWorker.serve(network, "worker", 1, setup(tick=0.1)))


class Undecided(MockWorker):
    """Answers, or hangs up, as two tasks happen to come in."""

    async def _answer(self, connection: Connection, request: Request, keep: bool) -> None:
        if b"wibble" not in request.body or await first_of_two() == "one":
            await super()._answer(connection, request, keep)
        else:
            connection.abort()


async def test_in_memory_the_same_call_has_the_same_verdict(autojump_clock: trio.testing.MockClock) -> None:
    """Also about a worker that depends on the order in which trio runs its tasks."""
    names = ["unknown_field_is_ignored", "refuses_unknown_sampling_key"]
    found = [(await report_of(serving(setup(), Undecided), only=names)).outcomes for _ in range(8)]
    assert found == [found[0]] * 8


async def test_over_real_sockets() -> None:
    """A factory that yields a URL and nothing else is reached through sockets."""
    async with open_network() as network, MockWorker.serve(network, options=setup(tick=0.002)) as worker:
        report = await check_worker(lambda: nullcontext(worker.url), live_seconds=0.4)
    assert set(report.skipped) == {*TOKENIZER_ONLY, "key_is_required", "disconnect_aborts_a_unary_request"}


async def test_what_is_too_fast_to_disturb_is_skipped_with_a_reason(autojump_clock: trio.testing.MockClock) -> None:
    report = await check_worker(serving(setup(tick=0.0)))
    assert set(report.skipped) > NEEDS_LIFE
    assert "1987 tokens take 0 s" in report.skipped["abort_all"]
    assert "lower live_seconds=3" in report.skipped["abort_all"]


async def test_a_worker_that_ignores_seeds_is_a_good_worker(autojump_clock: trio.testing.MockClock) -> None:
    """If it says so: what a seed must do is skipped, and no other check relies on it."""
    report = await check_worker(serving(setup(deterministic=False)))
    assert "enable_deterministic_inference" in report.skipped["sampling_seed"]
    assert "sampling_seed" not in (await check_worker(serving(setup()), only=["sampling_seed"])).skipped


async def test_what_is_unknown_is_skipped_with_a_reason(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `/server_info` and `/v1/models` less is known; arguments fill the gap."""
    for path in ("/server_info", "/get_server_info", "/v1/models"):
        monkeypatch.delitem(control.ROUTES, path)
    names = ("expert_rows", "text_prompt", "refuses_prompt_over_context", "dialect_is_declared")
    report = await check_worker(serving(setup()), only=names)
    assert set(report.skipped) == {"expert_rows", "refuses_prompt_over_context", "dialect_is_declared"}
    assert "context length None" in report.skipped["refuses_prompt_over_context"]
    report = await check_worker(serving(setup()), only=names, experts=True, context_length=2000)
    assert set(report.skipped) == {"dialect_is_declared"}


async def test_others_are_not_aborted(autojump_clock: trio.testing.MockClock) -> None:
    """`abort_all` is not tried on a worker that has other work."""
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1, setup()) as worker, trio.open_nursery() as nursery:
        nursery.start_soon(fetch, network, worker.url, "/generate", body(1500))
        await worker.reaches(requests=1)
        report = await check_worker(lambda: nullcontext(worker), only=["abort_all"])
    assert report.skipped == {"abort_all": "requests that are not ours are running"}


async def test_names_choose(autojump_clock: trio.testing.MockClock) -> None:
    told: list[str] = []
    report = await check_worker(
        serving(setup()),
        only=["unary_keys", "ready", "batch"],
        skip=["batch"],
        on_outcome=lambda outcome: told.append(outcome.name),
    )
    assert report.passed == told == ["ready", "unary_keys"]


async def test_expectations_are_checked(autojump_clock: trio.testing.MockClock) -> None:
    """What is given is believed, and what the worker does is held against it."""
    report = await report_of(serving(setup()), only=["dialect", "text_in_logprobs"], dialect="mixed", tokenizer=True)
    assert "streams are cumulative; expected mixed" in report.broken["dialect"]
    assert set(report.broken) == {"dialect", "text_in_logprobs"}


def test_every_check_says_what_it_is_about() -> None:
    assert len(CHECKS) > 100
    for name, check in CHECKS.items():
        assert name == check.name
        assert check.fact.endswith((".", "`")) or name.startswith("refuses_")
        assert check.source


@pytest.mark.parametrize(("match", "code"), [("prefix", 0), ("exact", 1)])
def test_from_a_shell(match: Any, code: int) -> None:
    """A table and an exit status."""
    told: list[Result] = []

    async def main() -> None:
        how = setup(tick=0.002, abort_match=match)
        async with open_network() as network, MockWorker.serve(network, options=how) as worker:
            told.append(await trio.to_thread.run_sync(shell, worker.url + "/", "--live-seconds", "0.3"))

    def shell(*arguments: str) -> Result:
        return CliRunner().invoke(__main__.main, [*arguments, "--only", "abort_by_prefix", "--only", "ready"])

    trio.run(main)
    assert told[0].exit_code == code
    assert f"{2 - code} passed, 0 skipped, {code} broken (cumulative dialect, no tokenizer)" in told[0].output
    assert ("contract: An abort of a live rid takes with it" in told[0].output) == (code == 1)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--list"], 0, "what the contract says"),
        ([], 2, "URL is missing"),
        (["http://127.0.0.1:1", "--only", "wibble"], 2, "'wibble' is not one of"),
        (["http://127.0.0.1:1", "--prompt", "a"], 2, "'a' is not a list of integers"),
        (["127.0.0.1:1"], 2, "must be http://HOST:PORT"),
        (["http://127.0.0.1:1", "--start-timeout", "0.2"], 1, "Does it listen there?"),
    ],
)
def test_shell_mistakes(arguments: list[str], code: int, words: str) -> None:
    told = CliRunner().invoke(__main__.main, arguments)
    assert (told.exit_code, words in told.output) == (code, True), told.output
