"""A law that cannot fail says nothing: each is given a backend that is wrong in one way, and must see it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dyn_relay.formats import catalog
from dyn_relay.formats.base import Answer, Outbound, Verdict
from dyn_testkit import faults, laws
from dyn_testkit.laws import Case
from dyn_testkit.laws import cases as some
from dyn_testkit.laws.levels import ExchangeLevel, other
from dyn_testkit.oracle import Oracle
from dyn_testkit.worker import WorkerOptions

OPTIONS = WorkerOptions(model=some.MODEL, min_new_tokens_needs_tokenizer=False)
ORACLE = Oracle(some.MODEL)
REQUEST = {
    "rid": "a",
    "stream": True,
    "input_ids": [1, 2, 3],
    "sampling_params": {"max_new_tokens": 9, "min_new_tokens": 5, "temperature": 0},
    "return_logprob": True,
}
CUT = (faults.at_token(3), faults.CLOSE)


def case(*plan, dialects=("incremental",), **fields):
    return Case(json.dumps(REQUEST | fields).encode(), plan, dialects)


class Tampered:
    """A format whose exchanges give other results: `changes` maps a method to a function of (result, attempt)."""

    def __init__(self, **changes):
        self._format = catalog.make("sglang")
        self._changes = changes

    def __getattr__(self, name):
        return getattr(self._format, name)

    def open(self, request, rid):
        return TamperedExchange(self._format.open(request, rid), self._changes)


class TamperedExchange:
    def __init__(self, exchange, changes):
        self._exchange = exchange
        self._changes = changes
        self._attempt = -1

    def __getattr__(self, name):
        real = getattr(self._exchange, name)
        if name not in self._changes and name != "dispatch":
            return real

        def call(*args, **kwargs):
            self._attempt += name == "dispatch"
            return self._changes.get(name, lambda result, _: result)(real(*args, **kwargs), self._attempt)

        return call


def observe(plan, **changes):
    return ExchangeLevel(Tampered(**changes), OPTIONS).observe(plan)


def sending(change):
    """Continuations with a changed body."""

    def tamper(outbound, attempt):
        if not attempt:
            return outbound
        body = json.loads(outbound.body)
        change(body)
        return Outbound(outbound.method, outbound.path, json.dumps(body).encode())

    return tamper


def continued(change):
    """What the client gets of continuations, changed."""
    return lambda out, attempt: change(out) if attempt and out else out


def all_laws(seen):
    laws.equivalence(seen, ORACLE)
    laws.admission(seen, "")
    laws.budget(seen, ORACLE)
    laws.snapshot(seen)
    laws.no_false_success(seen, ORACLE)


@pytest.mark.parametrize("dialects", [("incremental",), ("cumulative", "incremental"), ("mixed", "cumulative")])
@pytest.mark.parametrize("stream", [True, False])
def test_all_hold_for_what_is_right(dialects, stream):
    all_laws(observe(case(CUT, CUT, dialects=dialects, stream=stream)))


def _unreduced(body):
    body["sampling_params"]["max_new_tokens"] = 9


def _least_unreduced(body):
    body["sampling_params"]["min_new_tokens"] = 5


def _token_lost(body):
    body["input_ids"].pop()


def _token_twice(body):
    body["input_ids"].append(body["input_ids"][-1])


def _hotter(body):
    body["sampling_params"]["temperature"] = 0.5


def _extended_name(body):
    body["rid"] = "a-1"


SENT_WRONG = {
    "the whole budget again": (_unreduced, ("equivalence", "budget")),
    "the least not reduced": (_least_unreduced, ("budget",)),
    "a token lost at the join": (_token_lost, ("equivalence", "budget")),
    "a token twice at the join": (_token_twice, ("equivalence", "budget")),
    "another temperature": (_hotter, ("budget",)),
    "a rid that extends the client's": (_extended_name, ("budget",)),
}


@pytest.mark.parametrize(("change", "broken"), SENT_WRONG.values(), ids=SENT_WRONG)
def test_wrong_continuation(change, broken):
    seen = observe(case(CUT), dispatch=sending(change))
    for law in broken:
        with pytest.raises(AssertionError, match=law):
            getattr(laws, law)(seen, ORACLE)


def test_budget_of_a_router_that_writes_requests_anew():
    """What it makes of a field it makes of it in every attempt."""
    fields = {"top_logprobs_num": 2}

    def lose(body):
        del body["top_logprobs_num"]
        body["a_default"] = 1

    def always(outbound, attempt):
        return sending(lose)(outbound, 1)

    laws.budget(observe(case(CUT, **fields), dispatch=always), ORACLE, own=False)
    with pytest.raises(AssertionError, match=r"attempt 1 changed \['top_logprobs_num'\]"):
        laws.budget(observe(case(CUT, **fields), dispatch=sending(lose)), ORACLE, own=False)


SHOWN_WRONG = {
    "an event lost": lambda out: b"",
    "an event twice": lambda out: out + out,
    "the second attempt's prompt": lambda out: out.replace(b'"prompt_tokens":3', b'"prompt_tokens":6'),
    "the second attempt's count": lambda out: out.replace(b'"completion_tokens":4', b'"completion_tokens":1'),
    "the second attempt's limit": lambda out: out.replace(b'"length":9', b'"length":6'),
    "the second attempt's spans": lambda out: out.replace(b'"start":0,"end":9', b'"start":0,"end":6'),
    "the second attempt's name": lambda out: out.replace(b'"id":"a"', b'"id":"b"'),
    "no end": lambda out: out.replace(b"data: [DONE]\n\n", b""),
    "one logprob changed": lambda out: out.replace(b'"output_token_logprobs":[[-0', b'"output_token_logprobs":[[-1'),
}


@pytest.mark.parametrize("change", SHOWN_WRONG.values(), ids=SHOWN_WRONG)
def test_equivalence_sees_a_wrong_stream(change):
    seen = observe(case(CUT), feed=continued(change))
    with pytest.raises(AssertionError, match="equivalence"):
        laws.equivalence(seen, ORACLE)


def test_equivalence_sees_a_change_of_dialect():
    """Each attempt in its own worker's dialect adds up for nobody."""
    seen = observe(case(CUT, dialects=("incremental", "incremental")))
    other_half = observe(case(CUT, dialects=("cumulative", "cumulative")))
    events = [*seen.response.body.split(b"\n\n")[:4], *other_half.response.body.split(b"\n\n")[4:]]
    mixed = replace(seen, response=replace(seen.response, body=b"\n\n".join(events)))
    with pytest.raises(AssertionError, match="equivalence"):
        laws.equivalence(mixed, ORACLE)


@pytest.mark.parametrize("field", ["prompt_tokens", "cached_tokens"])
def test_snapshot_sees_the_second_attempts_prompt(field):
    seen = observe(case(CUT))
    told = {"prompt_tokens": b'"prompt_tokens":3', "cached_tokens": b'"cached_tokens":1'}[field]
    assert told in seen.response.body
    wrong = seen.response.body.replace(told, told[:-1] + b"2", 1)
    with pytest.raises(AssertionError, match="snapshot"):
        laws.snapshot(replace(seen, response=replace(seen.response, body=wrong)))


def test_budget_sees_a_call_with_nothing_left():
    """A router that asks once more, though every token was delivered."""
    lost = (faults.AFTER_LAST_TOKEN, faults.CLOSE)
    seen = observe(case(lost), complete=lambda rest, attempt: None)
    with pytest.raises(AssertionError, match="nothing was left"):
        laws.budget(seen, ORACLE)


def test_admission_sees_a_wrong_verdict_and_a_splice():
    refused = case(CUT, sampling_params={"max_new_tokens": 9, "temperature": 0, "frequency_penalty": 0.5})
    laws.admission(observe(refused), "frequency_penalty")
    with pytest.raises(AssertionError, match="admission"):
        laws.admission(observe(refused), "")
    with pytest.raises(AssertionError, match="admission"):
        laws.admission(observe(case(CUT)), "frequency_penalty")
    spliced = replace(observe(case(CUT)), case=refused)
    spliced.response.headers[0] = (b"x-dyn-relay-migratable", b"no; reason=frequency_penalty")
    with pytest.raises(AssertionError, match=r"continued, though it must not be|not what the client sent"):
        laws.admission(spliced, "frequency_penalty")


def test_admission_sees_a_silent_loss():
    refused = case(CUT, sampling_params={"max_new_tokens": 9, "temperature": 0, "frequency_penalty": 0.5})
    seen = observe(refused)
    with pytest.raises(AssertionError, match="not told"):
        laws.admission(replace(seen, response=replace(seen.response, complete=True)), "frequency_penalty")
    assert Verdict("frequency_penalty").migratable is False


def test_fold_sees_a_short_unary_answer():
    def shorter(answer, attempt):
        value = json.loads(answer.body)
        value["output_ids"].pop()
        return Answer(200, json.dumps(value).encode())

    plan = case(CUT)
    stream = observe(plan)
    laws.fold(observe(other(plan, stream=False)), stream)
    with pytest.raises(AssertionError, match="fold"):
        laws.fold(observe(other(plan, stream=False), answer=shorter), stream)


def test_passthrough_sees_a_rerendered_event():
    plan = case()
    laws.passthrough(observe(plan), rewritten=False)
    spaced = observe(plan, feed=lambda out, _: out.replace(b'":', b'": '))
    where = r"the body is not the worker's\n  at byte 20 the worker sent b'\[9\].*', the client got b' \[9\]"
    with pytest.raises(AssertionError, match=where):
        laws.passthrough(spaced, rewritten=False)


@pytest.mark.parametrize(("kind", "good"), [(b"Text/Event-Stream;charset=UTF-8", True), (b"text/event-stream", False)])
def test_passthrough_knows_a_media_type_in_other_words(kind, good):
    seen = observe(case())
    headers = [(name, kind if name == b"content-type" else value) for name, value in seen.response.headers]
    other = replace(seen, response=replace(seen.response, headers=headers))
    if good:
        laws.passthrough(other, rewritten=False)
        return
    with pytest.raises(AssertionError, match="the content type 'text/event-stream; charset=utf-8' became"):
        laws.passthrough(other, rewritten=False)


def test_line_ends_are_named():
    seen = observe(case())
    crlf = replace(seen, response=replace(seen.response, body=seen.response.body.replace(b"\n", b"\r\n")))
    with pytest.raises(AssertionError, match=r"no \[DONE\] at the end; its lines end with CRLF, SGLang's with LF"):
        laws.equivalence(crlf, ORACLE)


def test_passthrough_lets_the_last_chunk_go():
    """A worker that was left once its [DONE] had come has not failed by itself; one that breaks off before it has."""
    seen = observe(case())
    (attempt,) = seen.attempts
    attempt.wire = attempt.wire.removesuffix(b"0\r\n\r\n")
    assert not attempt.answer.complete
    laws.passthrough(seen, rewritten=False)
    attempt.wire = attempt.wire.partition(b"data: [DONE]")[0]
    with pytest.raises(AssertionError, match="failed by itself, and its client does not see it"):
        laws.passthrough(seen, rewritten=False)


def test_passthrough_sees_a_rerendered_request():
    def rerender(outbound, _):
        return Outbound(outbound.method, outbound.path, json.dumps(json.loads(outbound.body), indent=1).encode())

    with pytest.raises(AssertionError, match="did not get what the client sent"):
        laws.passthrough(observe(case(), dispatch=rerender), rewritten=False)


HOPELESS = (CUT, *[(faults.at_token(1), faults.CLOSE)] * 3)


def test_no_false_success_sees_a_clean_end():
    """Nobody is left, and the stream ends with a last chunk and `[DONE]`."""
    laws.no_false_success(observe(case(*HOPELESS)), ORACLE)
    clean = observe(case(*HOPELESS), failure_event=lambda out, _: out + b"data: [DONE]\n\n")
    with pytest.raises(AssertionError, match="no false success"):
        laws.no_false_success(clean, ORACLE)


@pytest.mark.parametrize("end", [b"", b"data: [DONE]\n\n"])
def test_no_false_success_sees_complete_framing(end):
    """C5: an error event alone stops no client; only framing that never ends does."""
    seen = observe(case(*HOPELESS), failure_event=lambda out, _: out + end)
    with pytest.raises(AssertionError, match="no false success"):
        laws.no_false_success(replace(seen, response=replace(seen.response, complete=True)), ORACLE)


def test_no_false_success_sees_a_made_up_finish():
    """Cut at the sixth token, finished as if that had been all."""
    finish = (
        b'data: {"output_ids":[],"meta_info":{"finish_reason":{"type":"length","length":6},"completion_tokens":6}}\n\n'
    )
    seen = observe(case(*HOPELESS), failure_event=lambda out, _: finish)
    told = replace(seen, response=replace(seen.response, complete=True))
    with pytest.raises(AssertionError, match="passes for"):
        laws.no_false_success(told, ORACLE)


def test_no_false_success_sees_a_short_unary_answer():
    ids = ORACLE.answer(REQUEST)["output_ids"][:6]
    body = json.dumps({"output_ids": ids, "meta_info": {"finish_reason": {"type": "length", "length": 6}}}).encode()
    seen = observe(case(*HOPELESS, stream=False), failure=lambda out, _: Answer(200, body))
    with pytest.raises(AssertionError, match="passes for"):
        laws.no_false_success(seen, ORACLE)


def test_no_false_success_sees_framing_that_hides_the_end():
    """An answer that ends with its connection looks whole wherever it is cut."""
    wire = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + json.dumps({"output_ids": [1, 2]}).encode()
    seen = observe(case())
    bare = replace(seen, response=replace(seen.response, wire=wire))
    with pytest.raises(AssertionError, match="is content with"):
        laws.truncation(bare, ORACLE, len(wire) - 3)


def _row(**fields):
    attempts = [
        {"rid": "a", "started": 0.0, "ended": 1.0, "tokens": 3},
        {"rid": "~0000000000000000000000000000001", "started": 1.0, "ended": 2.0, "tokens": 6},
    ]
    return {"attempts": attempts, "completion_tokens": 9} | fields


ONCE_WRONG = {
    "no row": ([], {}),
    "two rows": ([_row(), _row()], {}),
    "a lease kept": ([_row()], {"leases": 1.0}),
    "tokens that do not add up": ([_row(completion_tokens=8)], {}),
    "an attempt not listed": ([_row(attempts=_row()["attempts"][1:], completion_tokens=6)], {}),
    "two live attempts": (
        [_row(attempts=[_row()["attempts"][0] | {"ended": 1.5}, _row()["attempts"][1]])],
        {},
    ),
    "nothing to see": (None, None),
}


@pytest.mark.parametrize(("rows", "gauges"), ONCE_WRONG.values(), ids=ONCE_WRONG)
def test_exactly_once_sees(rows, gauges):
    seen = observe(case(CUT))
    laws.exactly_once(replace(seen, rows=[_row()], gauges={"leases": 0.0}))
    with pytest.raises(AssertionError, match="exactly once"):
        laws.exactly_once(replace(seen, rows=rows, gauges=gauges))


def test_rows_joined_as_texts_are_seen():
    rows = [b"12345", b"abcde"]
    laws.rows_survive(rows, 1)
    with pytest.raises(AssertionError):
        laws.rows_survive(rows, 1, join=lambda parts, width: "".join(parts))
    with pytest.raises(AssertionError):
        laws.rows_survive(rows, 1, split=lambda text, width, at: (text[:8], text[8:]))


def test_a_goal_that_was_never_met_is_told():
    goals = laws.Sometimes(["one kill", "stream"])
    goals.watch(observe(case()))
    with pytest.raises(laws.NeverHappened, match="never happened: one kill"):
        goals.verify()
    goals.watch(observe(case(CUT)))
    goals.verify()
