"""A continuation that loses a field of the client's request, whichever, is seen with the trials of every run."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dyn_relay.formats.sglang.exchange import SglangExchange
from dyn_testkit.routers import LAWS, check_router, trials
from dyn_testkit.simnet import SimNetwork
from dyn_testkit.simulation.router import relay

SETTINGS = {"health_success_threshold": 1, "inhibited_duration_secs": 0.0}
BODIES = [trial.case.request for trial in trials.rich()]
#: What a continuation says otherwise: its name, its prompt, how it is streamed.
MOVED = {"rid", "input_ids", "stream"}
TOP = {name for body in BODIES for name in body} - MOVED
SAMPLING = {name for body in BODIES for name in body["sampling_params"]}
BUDGETS = {"max_new_tokens", "min_new_tokens"}


def losing(monkeypatch, lose):
    """This project's proxy, whose continuations were changed."""
    real = SglangExchange.dispatch

    def dispatch(self, traits, rid, now, rank=None, pairing=None):
        out = real(self, traits, rid, now)
        if not self._attempt.number:
            return out
        body = json.loads(out.body)
        lose(body)
        return replace(out, body=json.dumps(body).encode())

    monkeypatch.setattr(SglangExchange, "dispatch", dispatch)


async def report_of(monkeypatch):
    """All that are asked are the requests with many fields."""
    for name in ("equivalence", "budget"):
        monkeypatch.setitem(LAWS, name, replace(LAWS[name], trials=trials.rich))
    network = SimNetwork(1)

    def before(workers):
        return relay(network, "proxy", workers, 1, SETTINGS)

    how = {"fleets": (("incremental",) * 4,), "only": ["equivalence", "budget"], "counterexamples": 1}
    return await check_router(before, network=network, raise_on_broken=False, **how)


def test_every_run_has_them():
    assert set(trials.rich()) <= set(trials.faulted())
    assert len(TOP) > 10
    assert len(SAMPLING) > 9


async def test_nothing_lost_nothing_found(autojump_clock, monkeypatch):
    losing(monkeypatch, lambda body: None)
    report = await report_of(monkeypatch)
    assert report.held == ["equivalence", "budget"]
    assert report.continued == len(BODIES)


@pytest.mark.parametrize("name", sorted(TOP - {"sampling_params"}))
async def test_a_lost_field(autojump_clock, monkeypatch, name):
    losing(monkeypatch, lambda body: body.pop(name))
    assert f"changed [{name!r}]" in (await report_of(monkeypatch)).broken["budget"]


@pytest.mark.parametrize("name", sorted(SAMPLING - BUDGETS))
async def test_a_lost_sampling_parameter(autojump_clock, monkeypatch, name):
    losing(monkeypatch, lambda body: body["sampling_params"].pop(name, None))
    assert f"changed ['sampling_params.{name}']" in (await report_of(monkeypatch)).broken["budget"]


@pytest.mark.parametrize("name", sorted(BUDGETS))
async def test_a_lost_budget(autojump_clock, monkeypatch, name):
    losing(monkeypatch, lambda body: body["sampling_params"].pop(name))
    assert "attempt 1 asks for" in (await report_of(monkeypatch)).broken["budget"]


@pytest.mark.parametrize("name", ["lora_path", "logit_bias", "sampling_seed", "stop_token_ids", "min_new_tokens"])
async def test_what_was_lost_shows_in_the_answer(autojump_clock, monkeypatch, name):
    def lose(body):
        body.pop(name, None)
        body["sampling_params"].pop(name, None)

    losing(monkeypatch, lose)
    assert "equivalence" in (await report_of(monkeypatch)).broken
