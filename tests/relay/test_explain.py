"""`POST /admission/explain`: what it says is what happens."""

from __future__ import annotations

import json

import pytest

from dyn_testkit.engine import Model
from dyn_testkit.faults import KILL_WORKER, FaultPlan, at_token
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import generate
from tests.relay.harness import world

PATH = "/admission/explain"
HEADER = "x-dyn-relay-migratable"


@pytest.mark.parametrize("dialect", ["cumulative", "incremental"])
@pytest.mark.parametrize("body", [generate(rid="r"), generate(logprob_start_len=0, top_logprobs_num=2, kv_hints={})])
async def test_the_continuation_is_the_one_that_is_sent(autojump_clock, body, dialect):
    """Of a stream, whose worker is killed at its fourth token: the same body, but for the ids and the name."""
    plan = FaultPlan.in_order([(at_token(4), KILL_WORKER)])
    options = WorkerOptions(dialect=dialect)
    async with world(plans=[plan, None], options=options, policy="round_robin") as w:
        explained = await w.ask(body, f"{PATH}?worker=w1&after=4")
        answer = await w.ask(body)
        assert answer.complete
        [recorded] = w.workers[1].generates
    found = explained.json()
    assert found["header"] == {HEADER: answer.header(HEADER)} == {HEADER: "yes"}
    told = found["worker"]
    assert (told["url"], told["text"]) == ("http://w1:30000", False)
    assert told["incremental"] == (dialect == "incremental")
    sent, real = found["continuation"]["body"], json.loads(recorded.request.body)
    assert sent["input_ids"] == [5, 6, 7, 0, 0, 0, 0]
    assert real["input_ids"][:3] == [5, 6, 7]
    same = {"rid": real["rid"], "input_ids": real["input_ids"]}
    assert {**sent, **same} == real
    assert found["stand_ins"]
    assert found["needs"]


async def test_of_a_text(autojump_clock):
    plan = FaultPlan.in_order([(at_token(3), KILL_WORKER)])
    options = WorkerOptions(skip_tokenizer_init=False)
    body = {"text": "hello", "stream": True, "sampling_params": {"max_new_tokens": 9, "ignore_eos": True}}
    async with world(plans=[plan, None], options=options, policy="round_robin") as w:
        found = (await w.ask(body, f"{PATH}?worker=w1&after=3")).json()
        assert (await w.ask(body)).complete
        [recorded] = w.workers[1].generates
    sent, real = found["continuation"]["body"], json.loads(recorded.request.body)
    assert {**sent, "rid": real["rid"], "input_ids": real["input_ids"]} == real


@pytest.mark.parametrize(
    "body",
    [
        generate(),
        generate(sampling={"frequency_penalty": 0.5}),
        generate(sampling={"stop": ["x"]}),
        generate(sampling={"max_new_tokens": None}),
        generate(return_hidden_states=True),
        generate(stream=False, logprob_start_len=-9),
        {"input_ids": [[5], [6]], "sampling_params": {"max_new_tokens": 3}},
    ],
)
async def test_the_header_is_the_one_of_the_answer(autojump_clock, body):
    options = WorkerOptions(skip_tokenizer_init=False, model=Model(context_length=64))
    async with world(options=options) as w:
        found = (await w.ask(body, f"{PATH}?worker=w1")).json()
        assert found["header"][HEADER] == (await w.ask(body)).header(HEADER)
        if found["answer"]:
            refused = await w.ask(body)
            assert (found["answer"]["status"], found["answer"]["body"]) == (refused.status, refused.body.decode())
        assert bool(found["because"]) != found["migratable"]


async def test_the_limits_of_the_proxy(autojump_clock):
    async with world(migration_limit=0) as w:
        found = (await w.ask(generate(), PATH)).json()
        assert (found["reason"], found["rule"]) == ("migration_limit", "`migration_limit` is 0")
        assert found["header"][HEADER] == (await w.ask(generate())).header(HEADER)
    async with world(migration_max_seq_len=5) as w:
        found = (await w.ask(generate(), f"{PATH}?after=2")).json()
        assert found["continuation"]["body"]["input_ids"] == [5, 6, 7, 0, 0]
        found = (await w.ask(generate(), f"{PATH}?after=3")).json()
        assert (found["migratable"], found["continuation"]) == (True, None)
        assert found["instead"].endswith("the reason migration_max_seq_len")
        long = {**generate(), "input_ids": [5] * 6}
        found = (await w.ask(long, PATH)).json()
        assert found["header"][HEADER] == (await w.ask(long)).header(HEADER) == "no; reason=migration_max_seq_len"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("body", "split"),
    [
        (generate(sampling={"n": 2}), {"index": 0, "answers": 2}),
        (generate(input_ids=[[5, 6], [7]]), {"index": 0, "answers": 2}),
        (generate(input_ids=[[5, 6], [7]] * 2, image_data=["a"] * 4), None),
        (generate(input_ids=[[5], [6] * 9]), {"index": 1, "answers": 2}),
        (generate(), None),
    ],
)
async def test_of_a_split_request(autojump_clock, body, split, stream):
    """The header is that of the whole, and which answer the rest is about is said."""
    body = {**body, "stream": stream}
    async with world(split_batches=True, migration_max_seq_len=8) as w:
        found = (await w.ask(body, PATH)).json()
        assert found["split"] == split
        assert found["header"][HEADER] == (await w.ask(body)).header(HEADER)


async def test_nobody_is_asked(autojump_clock):
    async with world() as w:
        found = (await w.ask(generate(), PATH)).json()
        assert found["worker"]["version"] == "0.5.23"
        assert found["worker"]["url"] is None
        assert found["after"] == 1
        assert [worker.generates for worker in w.workers] == [[], []]
        assert w.rows == []


@pytest.mark.parametrize(
    ("query", "body", "words"),
    [
        ("?after=x", b"{}", "after: must be a whole number of tokens, not 'x'"),
        ("?after=-1", b"{}", "after: must be"),
        ("?after=", b"{}", "after: must be"),
        ("?after=" + "9" * 5000, b"{}", "after: must be"),
        ("?after=9", json.dumps(generate()).encode(), "after: must be at most the request's 8 tokens"),
        ("", b"[1", "body: must be a JSON object"),
        ("", b'{"input_ids":[1],"x":NaN}', "body: must be a JSON object"),
    ],
)
async def test_bad_input(autojump_clock, query, body, words):
    async with world() as w:
        response = await w.ask(body, PATH + query)
        assert response.status == 400
        assert words in response.json()["message"]


async def test_bounds_and_keys(autojump_clock):
    async with world(api_key="user", admin_api_key="admin", max_payload_size=2000) as w:
        as_user, as_admin = ({"authorization": f"bearer {key}"} for key in ("user", "admin"))
        assert (await w.ask(generate(), PATH)).status == 401
        assert (await w.ask(generate(), PATH, headers=as_user)).status == 401
        assert (await w.ask(generate(), PATH, headers=as_admin)).status == 200
        assert (await w.ask(b"x" * 2001, PATH, headers=as_admin)).status == 413
        assert (await w.ask(None, PATH, headers=as_admin)).status == 405
        response = await w.ask(generate(), f"{PATH}?worker=w9", headers=as_admin)
        assert (response.status, "w9" in response.json()["error"]["message"]) == (404, True)
