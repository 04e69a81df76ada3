"""Runs the checks against one worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, get_args

import trio

from dyn_relay.sockets import open_network
from dyn_testkit.contract.facts import Facts, discover
from dyn_testkit.contract.report import ContractBroken, NoWorker, Outcome, Report
from dyn_testkit.contract.subject import Subject
from dyn_testkit.contract.table import CHECKS, Broken, Check, Inapplicable, Silent
from dyn_testkit.factories import (
    NotStarted,
    chosen,
    endpoint,
    repeatable,
    require_factory,
    require_manager,
    require_seconds,
    within,
)
from dyn_testkit.worker.options import Dialect

#: Between two dials of a worker that does not listen yet.
_REDIAL = 0.1
_FACTORY = "worker_factory"


async def check_worker(
    worker_factory: Callable[[], AbstractAsyncContextManager[Any]],
    *,
    only: Iterable[str] | None = None,
    skip: Iterable[str] = (),
    prompt: Sequence[int] = (5, 6, 7, 8, 9),
    api_key: str | None = None,
    dialect: Dialect | None = None,
    tokenizer: bool | None = None,
    experts: bool | None = None,
    context_length: int | None = None,
    abort_by_prefix: bool = True,
    tolerance: float = 1e-3,
    longest_prompt: int = 8192,
    live_seconds: float = 3.0,
    answer_timeout: float = 60.0,
    start_timeout: float = 120.0,
    on_outcome: Callable[[Outcome], None] | None = None,
) -> Report:
    """Check that a worker, or a mock of one, speaks as SGLang 0.5.23 does.

    Args:
        worker_factory: Called once, without arguments; returns an async context manager. What that yields is the URL,
            or has one as its `url`, and maybe a `network` to reach it with (an `Endpoint`, a `MockWorker`).
        only: Names of the checks to run; None is all of `CHECKS`.
        skip: Names of those not to run.
        prompt: Tokens of the usual request; at least three, all in the vocabulary.
        api_key: Sent with every request.
        dialect: How its streams are spelled; None: found out.
        tokenizer: Has it one? None: as `/server_info` says. So with `experts` (does it return them?) and
            `context_length` (as `/v1/models` says).
        abort_by_prefix: False if an abort of `a` spares a live `ab`.
        tolerance: How far logprobs of the same token may differ between two runs, relative and absolute.
        longest_prompt: Checks that need a longer one are skipped.
        live_seconds: What a generation would take that is aborted meanwhile.
        answer_timeout: Seconds that any one answer may take.
        start_timeout: Seconds until the factory has yielded and the worker listens; and until the factory's end.
        on_outcome: Called after each check.

    Returns:
        A `Report`. Look at its `skipped`.

    Raises:
        ContractBroken: At least one check is broken; all have run first, unless the worker has gone.
        NoWorker: There is no worker at that URL.
        TypeError, ValueError: An argument is wrong, or what the factory makes.
    """
    checks = [CHECKS[name] for name in chosen(CHECKS, only, skip, "CHECKS")]
    if len(prompt) < 3:
        raise ValueError(f"prompt= needs three tokens at least, not {list(prompt)}")
    if dialect is not None and dialect not in get_args(Dialect):
        raise ValueError(f"dialect= must be one of {', '.join(get_args(Dialect))}, not {dialect!r}")
    require_seconds(live_seconds=live_seconds, answer_timeout=answer_timeout, start_timeout=start_timeout)
    require_factory(worker_factory, _FACTORY, "without arguments")
    manager = worker_factory()
    require_manager(manager, _FACTORY)
    given = Facts(dialect, tokenizer, experts, context_length, abort_by_prefix=abort_by_prefix)

    async def judge(thing: Any) -> Report | NoWorker:
        host, port, network = endpoint(thing, _FACTORY)
        limits = (answer_timeout, prompt, tolerance, live_seconds, longest_prompt, api_key)
        if network is not None:
            with repeatable(network):
                return await _judge(Subject(host, port, network, *limits), given, checks, start_timeout, on_outcome)
        async with open_network() as sockets:
            return await _judge(Subject(host, port, sockets, *limits), given, checks, start_timeout, on_outcome)

    found = await within(manager, judge, start_timeout, _FACTORY)
    if isinstance(found, NotStarted):
        raise NoWorker("", str(found))
    if isinstance(found, Exception):
        raise found
    if found.broken or found.not_run:
        raise ContractBroken(found)
    return found


async def _judge(
    subject: Subject,
    given: Facts,
    checks: Sequence[Check],
    start_timeout: float,
    on_outcome: Callable[[Outcome], None] | None,
) -> Report | NoWorker:
    why = await _recognize(subject, start_timeout)
    if why:
        return NoWorker(subject.url, why)
    subject.facts = await discover(subject, given)
    report = Report(subject.url, subject.facts)
    gone = ""
    for check in checks:
        outcome = Outcome(check.name, "not run", gone)
        if not gone:
            outcome, silent = await _run(subject, check)
            if silent and not await _answers(subject):
                gone = f"the worker has not answered any more since {check.name}"
        report.outcomes.append(outcome)
        if on_outcome is not None:
            on_outcome(outcome)
    return report


async def _run(subject: Subject, check: Check) -> tuple[Outcome, bool]:
    """The outcome of one check; was the worker silent?"""
    subject.last = None
    reason, silent = "", False
    try:
        await check.run(subject)
        return Outcome(check.name, "passed"), False
    except Inapplicable as exc:
        return Outcome(check.name, "skipped", str(exc)), False
    except Broken as exc:
        reason, silent = str(exc), isinstance(exc, Silent)
    except KeyError as exc:
        reason = f"the answer has no {exc}"
    except (LookupError, TypeError, ValueError, AttributeError) as exc:
        reason = f"the answer has another form than the contract says: {type(exc).__name__}: {exc}"
    last = subject.last
    return Outcome(check.name, "broken", reason, last.sent if last else "", last.came() if last else ""), silent


async def _answers(subject: Subject) -> bool:
    try:
        await subject.ask("/model_info")
    except Silent:
        return False
    return True


async def _recognize(subject: Subject, start_timeout: float) -> str:
    """Why there is no worker; "" if there is one."""
    deadline = trio.current_time() + start_timeout
    while True:
        try:
            (await subject.dial()).close()
            break
        except Silent as exc:
            if trio.current_time() + _REDIAL >= deadline:
                return f"{exc} (for start_timeout={start_timeout:g} s). Does it listen there?"
        await trio.sleep(_REDIAL)
    try:
        exchange = await subject.ask("/generate", subject.body(1))
    except Silent as exc:
        came = subject.last.came() if subject.last else ""
        return f"{subject.url} does not answer a generation of one token: {exc}. Came: {came}"
    response = exchange.response
    try:
        response.json()
    except ValueError:
        return (
            f"what answers at {subject.url} is no SGLang worker: it says {exchange.came()} to {exchange.sent}. "
            "Is it the right URL?"
        )
    if response.status in (401, 403):
        wish = "wants a key: give api_key=" if subject.api_key is None else "does not take the api_key= that was given"
        return f"the worker at {subject.url} {wish}. It says {exchange.came()}"
    return ""
