"""Runs the checks against one worker."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import trio

from dyn_relay.net import Network
from dyn_relay.sockets import open_network
from dyn_testkit.contract.facts import Facts, discover
from dyn_testkit.contract.report import ContractBroken, NoWorker, Outcome, Report
from dyn_testkit.contract.subject import Subject
from dyn_testkit.contract.table import CHECKS, Broken, Check, Inapplicable, Silent, short
from dyn_testkit.worker.options import Dialect

#: Between two dials of a worker that does not listen yet.
_REDIAL = 0.1


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a worker is, and how to get there: what a factory may yield."""

    url: str
    #: None: real sockets.
    network: Network | None = None


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
    checks = _chosen(only, skip)
    if len(prompt) < 3:
        raise ValueError(f"prompt= needs three tokens at least, not {list(prompt)}")
    if hasattr(worker_factory, "__aenter__"):
        raise TypeError("worker_factory is a context manager; give a function that makes one: lambda: ...")
    if not callable(worker_factory):
        raise TypeError(f"worker_factory must be a function without arguments, not {worker_factory!r}")
    manager = worker_factory()
    _require_manager(manager)
    given = Facts(dialect, tokenizer, experts, context_length, abort_by_prefix=abort_by_prefix)

    async def judge(thing: Any) -> Report | NoWorker:
        host, port, network = _endpoint(thing)
        limits = (answer_timeout, prompt, tolerance, live_seconds, longest_prompt, api_key)
        if network is not None:
            return await _judge(Subject(host, port, network, *limits), given, checks, start_timeout, on_outcome)
        async with open_network() as sockets:
            return await _judge(Subject(host, port, sockets, *limits), given, checks, start_timeout, on_outcome)

    # What is found is raised out here, where no nursery of the factory's can wrap it into a group.
    found = await _within(manager, judge, start_timeout)
    if isinstance(found, Exception):
        raise found
    if found.broken or found.not_run:
        raise ContractBroken(found)
    return found


async def _within(
    manager: AbstractAsyncContextManager[Any],
    judge: Callable[[Any], Awaitable[Report | NoWorker]],
    start_timeout: float,
) -> Report | Exception:
    found: Report | Exception | None = None
    with trio.CancelScope(deadline=trio.current_time() + start_timeout) as scope:
        async with manager as thing:
            scope.deadline = math.inf
            try:
                found = await judge(thing)
            except (TypeError, ValueError) as exc:
                found = exc
            scope.deadline = trio.current_time() + start_timeout
    if found is None:
        return NoWorker("", f"worker_factory has not yielded within start_timeout={start_timeout:g} s")
    if scope.cancelled_caught:
        return RuntimeError(f"worker_factory has not ended within {start_timeout:g} s; it was cancelled")
    return found


def _chosen(only: Iterable[str] | None, skip: Iterable[str]) -> list[Check]:
    if isinstance(only, str) or isinstance(skip, str):
        raise TypeError("only= and skip= are collections of names, not a string")
    names, without = list(CHECKS) if only is None else list(only), set(skip)
    for name in (*names, *sorted(without)):
        if name not in CHECKS:
            close = ", ".join(difflib.get_close_matches(name, CHECKS, 3))
            raise ValueError(f"there is no check {name!r}; " + (f"is it {close}?" if close else "see CHECKS"))
    return [check for check in CHECKS.values() if check.name in names and check.name not in without]


def _require_manager(manager: object) -> None:
    if hasattr(manager, "__aenter__") and hasattr(manager, "__aexit__"):
        return
    hint = ""
    if inspect.iscoroutine(manager):
        manager.close()
        hint = "; an `async def` that yields needs @contextlib.asynccontextmanager"
    elif inspect.isasyncgen(manager):
        hint = "; put @contextlib.asynccontextmanager on it"
    elif hasattr(manager, "__enter__"):
        hint = "; a plain context manager is not enough"
    raise TypeError(f"worker_factory must return an async context manager, not {short(manager)}{hint}")


def _endpoint(thing: Any) -> tuple[str, int, Network | None]:
    url = thing if isinstance(thing, str) else getattr(thing, "url", None)
    if not isinstance(url, str):
        raise TypeError(f"worker_factory must yield a URL, or something with a `url`, not {short(thing)}")
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.path.strip("/") or parts.query:
        raise ValueError(f"the worker's url must be http://HOST:PORT, not {url!r}")
    return parts.hostname, parts.port or 80, getattr(thing, "network", None)


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
