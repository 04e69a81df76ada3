"""Runs the laws on one router."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import trio

from dyn_relay.net import Network
from dyn_relay.sockets import open_network
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
from dyn_testkit.laws import Stage
from dyn_testkit.laws.answers import DIALECTS
from dyn_testkit.laws.cases import MODEL
from dyn_testkit.routers.report import LawsBroken, NoRouter, Outcome, Report
from dyn_testkit.routers.subject import GaveUp, Hung, Subject
from dyn_testkit.routers.table import LAWS
from dyn_testkit.routers.trials import Trial, drawn, simpler
from dyn_testkit.worker import Dialect, WorkerOptions

#: More workers than any trial but the hopeless ones can fail, all of one dialect; and one fleet of all.
FLEETS: tuple[tuple[Dialect, ...], ...] = (*((dialect,) * 4 for dialect in DIALECTS), (*DIALECTS, "cumulative"))
OPTIONS = WorkerOptions(model=MODEL, min_new_tokens_needs_tokenizer=False, lora_adapters=("adapter",))
_FACTORY = "router_factory"
#: Simpler cases that are tried for a counter-example.
_SHRINKS = 24
#: Characters of a reason by which like ones are counted.
_REASON = 110
#: The law of requests that never end.
_HANGS = "liveness"
#: What a law raises over an answer that it cannot read.
_UNREADABLE = (LookupError, TypeError, ValueError, AttributeError)

RouterFactory = Callable[[Sequence[str]], AbstractAsyncContextManager[Any]]


async def check_router(
    router_factory: RouterFactory,
    *,
    only: Iterable[str] | None = None,
    skip: Iterable[str] = (),
    network: Network | None = None,
    fleets: Sequence[Sequence[Dialect]] = FLEETS,
    examples: int = 0,
    seed: int = 0,
    counterexamples: int = 2,
    answer_timeout: float = 10.0,
    recovery_timeout: float = 30.0,
    start_timeout: float = 60.0,
    raise_on_broken: bool = True,
    on_outcome: Callable[[Outcome], None] | None = None,
) -> Report:
    """Check that a router keeps the laws while its workers fail.

    Args:
        router_factory: Called with the base URLs of the workers, once a fleet; returns an async context manager. What
            that yields is the router's URL, or has one as its `url`. Let it take failed workers back at once.
        only: Names of the laws to run; None is all of `LAWS`.
        skip: Names of those not to run.
        network: Where the workers listen and the router is reached: a `SimNetwork`, say. None: real sockets.
        fleets: The dialects of the workers, fleet by fleet. Give fewer to a router that needs all workers alike.
        examples: So many of Hypothesis's examples, besides the hard cases.
        seed: Other examples; on a network in memory also another order of what happens at the same time.
        counterexamples: How many are kept of each law; as many requests that never end, and the run is over.
        answer_timeout: Seconds within which a request must end once the faults have stopped.
        recovery_timeout: Seconds within which the router must serve again when all workers are well.
        start_timeout: Seconds until the factory has yielded and the router serves; and until the factory's end.
        raise_on_broken: False: only return.
        on_outcome: Called after each law of each fleet.

    Returns:
        A `Report`. If its `continued` is 0, the laws about continuations say nothing.

    Raises:
        LawsBroken: At least one law is broken; all have run first, unless the router hangs.
        NoRouter: There is no router.
        TypeError, ValueError: An argument is wrong, or what the factory makes.
    """
    names = chosen(LAWS, only, skip, "LAWS")
    require_factory(router_factory, _FACTORY, "of the workers' URLs")
    require_seconds(answer_timeout=answer_timeout, recovery_timeout=recovery_timeout, start_timeout=start_timeout)
    if not fleets or not all(fleets):
        raise ValueError("fleets= needs at least one fleet, and that a worker")
    for dialect in itertools.chain(*fleets):
        if dialect not in DIALECTS:
            raise ValueError(f"fleets= has fleets of {', '.join(DIALECTS)}, not of {dialect!r}")
    report = Report.of(names)
    extra = drawn(examples, seed)
    run = _Run(report, extra, counterexamples, answer_timeout, recovery_timeout, start_timeout, on_outcome)
    failure: Exception | None = None
    if network is not None:
        with repeatable(network, seed):
            failure = await run.fleets(router_factory, network, fleets)
    else:
        async with open_network() as sockets:
            failure = await run.fleets(router_factory, sockets, fleets)
    # Raised out here, where no nursery can wrap it into a group.
    if failure is not None:
        raise failure
    if (report.broken or report.not_run) and raise_on_broken:
        raise LawsBroken(report)
    return report


@dataclass(slots=True)
class _Run:
    report: Report
    extra: Sequence[Trial]
    counterexamples: int
    answer_timeout: float
    recovery_timeout: float
    start_timeout: float
    on_outcome: Callable[[Outcome], None] | None

    async def fleets(
        self, factory: RouterFactory, network: Network, fleets: Sequence[Sequence[Dialect]]
    ) -> Exception | None:
        """Fleet by fleet; what is to be raised comes back."""
        for fleet in fleets:
            stage = Stage(network, fleet, OPTIONS, cuts=True)
            failure: Exception | None = None
            async with trio.open_nursery() as nursery:
                await nursery.start(stage.run)
                failure = await self._before(factory, network, stage, fleet)
                nursery.cancel_scope.cancel()
            if failure is not None:
                return failure
        return None

    async def _before(
        self, factory: RouterFactory, network: Network, stage: Stage, fleet: Sequence[Dialect]
    ) -> Exception | None:
        async def judge(thing: Any) -> Exception | None:
            host, port, _ = endpoint(thing, _FACTORY)
            subject = Subject(
                network, host, port, stage, fleet, self.answer_timeout, self.start_timeout, self.counterexamples
            )
            try:
                await subject.recover()
            except Hung as exc:
                return NoRouter(f"what is at {subject.url} does not route to its workers: {exc}")
            subject.recovery_timeout = self.recovery_timeout
            await self._all(subject)
            self.report.continued += subject.continued
            self.report.tells = self.report.tells or subject.tells
            return None

        try:
            manager = factory(stage.urls)
            require_manager(manager, _FACTORY)
            found = await within(manager, judge, self.start_timeout, _FACTORY)
        except Exception as exc:
            return exc  # whatever the factory raises
        return NoRouter(str(found)) if isinstance(found, NotStarted) else found

    async def _all(self, subject: Subject) -> None:
        # Liveness first: what its trials have shown is there for the others, also if it ends the run.
        for outcome in sorted(self.report.outcomes.values(), key=lambda outcome: outcome.law.name != _HANGS):
            for trial in [*outcome.law.trials(), *(self.extra if outcome.law.draws else ())]:
                await self._one(subject, outcome, trial)
            if self.on_outcome is not None:
                self.on_outcome(outcome)

    async def _one(self, subject: Subject, outcome: Outcome, trial: Trial) -> None:
        try:
            words = await self._judge(subject, outcome, trial)
        except GaveUp as exc:
            outcome.stopped = str(exc)
            return
        outcome.trials += 1
        if words is None:
            return
        outcome.broken += 1
        first = words.partition("\n")[0].removeprefix(f"{outcome.law.name}: ")
        outcome.reasons[first if len(first) <= _REASON else first[:_REASON] + "..."] += 1
        if len(outcome.examples) < self.counterexamples:
            words = await self._shrunk(subject, outcome, trial, words)
            if words not in outcome.examples:
                outcome.examples.append(words)

    async def _judge(self, subject: Subject, outcome: Outcome, trial: Trial) -> str | None:
        """What the law says against a trial; None: nothing. Raises `GaveUp`."""
        try:
            await outcome.law.check(subject, trial)
        except Hung as exc:
            elsewhere = outcome.law.name != _HANGS and _HANGS in self.report.outcomes
            return None if elsewhere else str(exc)
        except AssertionError as exc:
            return str(exc)
        except _UNREADABLE as exc:
            return f"{outcome.law.name}: an answer has another form: {type(exc).__name__}: {exc}\n  {trial.case!r}"
        return None

    async def _shrunk(self, subject: Subject, outcome: Outcome, trial: Trial, words: str) -> str:
        """What the law says against the simplest like trial that was found."""
        candidates = simpler(trial) if outcome.law.name != _HANGS else iter(())
        for _ in range(_SHRINKS):
            smaller = next(candidates, None)
            if smaller is None:
                break
            try:
                found = await self._judge(subject, outcome, smaller)
            except GaveUp:
                break
            if found is not None:
                words, candidates = found, simpler(smaller)
        return words
