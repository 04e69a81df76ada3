"""Text of answers that were cut: that of the uninterrupted run, wherever the cut was."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import trio

from dyn_testkit import faults
from dyn_testkit.engine import Model
from dyn_testkit.faults import CLOSE, KILL_WORKER, FaultPlan, at_token
from dyn_testkit.oracle import Oracle
from dyn_testkit.relay import until
from dyn_testkit.tokenizer import BYTE_LEVEL, PLAIN, SENTENCE_PIECE
from dyn_testkit.worker import WorkerOptions, control
from dyn_testkit.worker.texts import detokenize
from dyn_testkit.worker.wire import Reply, json_reply
from tests.relay.harness import judged, world

#: Characters of one to four bytes; joined, variant and flag emoji; accents; Hangul in one and in jamo; Chinese.
TEXTS = {
    "two, three and four bytes": "é€😀",
    "joined": "👩\u200d👨\u200d👩 ok",
    "variant": "a\ufe0f b\ufe0f",
    "flags": "🇩🇪🇪🇪",
    "accent after its letter": "cafe\u0301 e\u0301",
    "Hangul": "한 한한",
    "jamo": "\u1112\u1161\u11ab \u1112\u1161",
    "Chinese": "中文中 𠀀文",
    "lines": "Hello\n\n \n\tab\r\n",
    "spaces": "  the  a the",
    "words": "Hello the world, ab.",
    "no byte token": "<0xE4>",
    "replacement": "a\ufffdb c",
    "special": "Hello<|im_end|><|im_start|> the</s><s> a",
    "only special": "<|im_end|><|im_start|></s><s><s></s><s></s>ab",
}
TOKENIZERS = {"plain": PLAIN, "byte-level": BYTE_LEVEL, "sentencepiece": SENTENCE_PIECE}
PROMPT = "ab é"

#: After how many tokens the last event ends inside a character of that stop string, or is held back since it does not.
STRADDLED = {("plain", True): [5, 6, 7, 8], ("plain", False): [5, 6], ("sentencepiece", True): [4]}

kinds = pytest.mark.parametrize("kind", TOKENIZERS)
texts = pytest.mark.parametrize("name", TEXTS)
both = pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])


def recital(kind, text, prompt=PROMPT):
    """A model that says this text after the prompt, the prompt's ids, and how many the text has."""
    tokenizer = TOKENIZERS[kind]
    before, whole = tokenizer.encode(prompt), tokenizer.encode(prompt + text)
    if whole[: len(before)] != before:
        whole = [*before, *tokenizer.encode(text)]
    return Model(recites=tuple(whole)), before, len(whole) - len(before)


async def check(kind, text, plans, stream, dialects=("cumulative",), **sampling):
    """Nothing of the answer differs from the oracle's, and the workers died as planned."""
    model, prompt, count = recital(kind, text)
    tokenizer = TOKENIZERS[kind]
    params = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True, "stream_interval": 1, **sampling}
    body = {"input_ids": prompt, "sampling_params": params, "stream": stream, "return_logprob": True}
    options = [
        WorkerOptions(model=model, tokenizer=tokenizer, skip_tokenizer_init=False, dialect=dialects[at % len(dialects)])
        for at in range(len(plans) + 1)
    ]
    faults = [FaultPlan.in_order([(at_token(cut), CLOSE)]) for cut in plans]
    async with world(plans=[*faults, None], options=options, policy="round_robin") as w:
        response = await w.ask(body)
        oracle = Oracle(model, tokenizer=tokenizer)
        assert judged(response, body, oracle, dialects[0]) == [], (plans, dialects)
        assert [len(worker.generates) for worker in w.workers] == [1] * len(options)


@both
@kinds
@texts
async def test_killed_at_every_token(autojump_clock, kind, name, stream):
    """E7: also between the tokens of one character."""
    _, _, count = recital(kind, TEXTS[name])
    for cut in range(1, count):
        for skip in (True, False) if "special" in name else (True,):
            await check(kind, TEXTS[name], [cut], stream, skip_special_tokens=skip)


@both
@kinds
@pytest.mark.parametrize("name", ["two, three and four bytes", "joined", "Chinese", "special"])
async def test_killed_again_and_again(autojump_clock, kind, name, stream):
    """After each token another worker: every seam lies next to the one before."""
    _, _, count = recital(kind, TEXTS[name])
    for first in range(1, count - 3):
        await check(kind, TEXTS[name], [first, 1, 1], stream, skip_special_tokens=False)
        await check(kind, TEXTS[name], [first, 2], stream)


@both
@kinds
@pytest.mark.parametrize("dialects", [("incremental",), ("cumulative", "incremental"), ("incremental", "cumulative")])
async def test_dialects(autojump_clock, kind, dialects, stream):
    for name in ("joined", "Hangul", "special", "words"):
        _, _, count = recital(kind, TEXTS[name])
        for cut in range(1, count):
            await check(kind, TEXTS[name], [cut], stream, dialects)
            if cut + 2 < count:
                await check(kind, TEXTS[name], [cut, 1], stream, dialects)


@both
@kinds
async def test_a_long_answer(autojump_clock, kind, stream):
    """More than is looked at around a cut; repeated, so that another place would look the same."""
    text = "é😀 ab the 中中한" * 12
    _, _, count = recital(kind, text)
    for cut in range(60, count - 1, 7):
        await check(kind, text, [cut], stream)


@both
@kinds
@pytest.mark.parametrize("trim", [True, False], ids=["trim", "no-trim"])
async def test_a_stop_string_at_every_split(autojump_clock, kind, trim, stream):
    """E6: the engine holds back what may become the string, so no cut is inside it."""
    text = "ab 中STOSTOP\nab é"
    _, _, count = recital(kind, text)
    for cut in range(1, count):
        for stop in ("STOP", "STOP\n", ["P\n", "OP"], "STOSTOP"):
            response, body, oracle = await stopped(kind, text, cut, stream, stop=stop, no_stop_trim=not trim)
            assert judged(response, body, oracle) == [], (cut, stop)


@both
@kinds
async def test_a_stop_string_that_begins_inside_a_cut_character(autojump_clock, kind, stream):
    """The engine that goes on sees half of it, and would miss it: exact, or an error that names the field."""
    text = "ab a中é! ab é"
    before, whole = TOKENIZERS[kind].encode(PROMPT), TOKENIZERS[kind].encode(PROMPT + text)
    loud = []
    for cut in range(1, len(whole) - len(before)):
        response, body, oracle = await stopped(kind, text, cut, stream, stop="中é" if stream else "中")
        if b'"reason":"stop"' in response.body:
            loud.append(cut)
        else:
            assert judged(response, body, oracle) == [], cut
    assert loud == STRADDLED.get((kind, stream), [])


async def stopped(kind, text, cut, stream, **sampling):
    """An answer that is cut, what was asked, and who knows the right answer."""
    model, prompt, count = recital(kind, text)
    tokenizer = TOKENIZERS[kind]
    params = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True, "stream_interval": 1, **sampling}
    body = {"input_ids": prompt, "sampling_params": params, "stream": stream}
    options = WorkerOptions(model=model, tokenizer=tokenizer, skip_tokenizer_init=False)
    plan = FaultPlan.in_order([(at_token(cut), CLOSE)])
    async with world(plans=[plan, None], options=options, policy="round_robin") as w:
        return await w.ask(body), body, Oracle(model, tokenizer=tokenizer)


# What a text answer needs ---------------------------------------------------------------------------------------------

WITH = WorkerOptions(tokenizer=SENTENCE_PIECE, skip_tokenizer_init=False, model=Model(vocab_size=41))
WITHOUT = replace(WITH, skip_tokenizer_init=True)
ORACLE = Oracle(WITH.model, tokenizer=SENTENCE_PIECE)


def plain_request(stream, **extra):
    sampling = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True, "stream_interval": 1}
    return {"text": "Hello 中", "sampling_params": sampling, "stream": stream, **extra}


def cut(*tokens, what=CLOSE):
    return [*(FaultPlan.in_order([(at_token(at), what)]) for at in tokens), None]


@both
@pytest.mark.parametrize("asked", [{}, {"return_prompt_token_ids": True}, {"return_prompt_token_ids": False}])
async def test_a_text_as_prompt(autojump_clock, stream, asked):
    """Its ids are asked for, and told to who asked: from the first event on it is continued by them."""
    body = plain_request(stream, **asked)
    ids = ORACLE.prompt(body)
    for at in range(1, 12):
        async with world(plans=cut(at), options=WITH, policy="round_robin") as w:
            response = await w.ask(body)
            assert response.header("x-dyn-relay-migratable") == "yes"
            assert judged(response, body, ORACLE) == [], at
            first, second = (worker.generates[0].json() for worker in w.workers)
            assert (first["text"], first["return_prompt_token_ids"]) == (body["text"], True)
            assert "text" not in second
            assert second["input_ids"][: len(ids)] == ids
            await w.quiet()
            assert [row["prompt_tokens"] for row in w.rows] == [len(ids)]


@both
async def test_a_text_as_prompt_before_its_first_event(autojump_clock, stream):
    """It is begun again as it was."""
    body = plain_request(stream)
    async with world(plans=cut(0), options=WITH, policy="round_robin") as w:
        response = await w.ask(body)
        assert judged(response, body, ORACLE) == []
        assert [worker.generates[0].json()["text"] for worker in w.workers] == [body["text"]] * 2


@both
async def test_a_worker_without_a_tokenizer_does_not_continue(autojump_clock, stream):
    """N5, mixed fleets: the shape of the answer is kept, or the failure says why not."""
    body = plain_request(stream)
    async with world(plans=[*cut(4), None], options=[WITH, WITHOUT, WITH], policy="round_robin") as w:
        response = await w.ask(body)
        assert judged(response, body, ORACLE) == []
        assert w.workers[1].generates == []
    async with world(plans=cut(4, what=KILL_WORKER), options=[WITH, WITHOUT], policy="round_robin") as w:
        response = await w.ask(body)
        assert b'"reason":"no_fit_worker"' in response.body
        assert not (response.complete and response.status == 200)
    ids = {**body, "input_ids": ORACLE.prompt(body)}
    del ids["text"]
    async with world(plans=cut(4, what=KILL_WORKER), options=[WITHOUT, WITH], policy="round_robin") as w:
        response = await w.ask(ids)
        assert b'"reason":"no_fit_worker"' in response.body


BAD = {
    "not found": Reply(404, b'{"detail":"Not Found"}'),
    "an error": Reply(500, b"Internal Server Error"),
    "no JSON": Reply(200, b"<html>"),
    "another shape": Reply(200, b'{"text":"a"}'),
    "too few": Reply(200, b'{"text":["a"]}'),
}


@both
@pytest.mark.parametrize("reply", BAD.values(), ids=BAD)
async def test_a_worker_that_cannot_tell_the_text_does_not_continue(autojump_clock, monkeypatch, reply, stream):
    """The next one can; if there is none, the client is told."""

    async def answer(worker, request):
        return reply if worker.host == "w2" else detokenize(worker.options, request)

    monkeypatch.setitem(control.ROUTES, "/detokenize", (("POST",), False, answer))
    body = plain_request(stream)
    async with world(plans=[*cut(4), None], options=WITH, policy="round_robin") as w:
        response = await w.ask(body)
        assert judged(response, body, ORACLE) == []
        assert [len(worker.generates) for worker in w.workers] == [1, 1, 1]
        await w.quiet()
        assert w.workers[1].disconnects == 1  # it is not left at work for nobody
    async with world(plans=cut(4, what=KILL_WORKER), options=WITH, policy="round_robin") as w:
        response = await w.ask(body)
        assert not (response.complete and response.status == 200)
        assert b'"delivered":4' in response.body


@both
async def test_a_text_that_is_not_the_one_that_was_told(autojump_clock, monkeypatch, stream):
    """Another tokenizer, say: there is no exact text, and that is said."""

    async def answer(worker, request):
        texts = json.loads(detokenize(worker.options, request).body)["text"]
        return json_reply({"text": [text.replace("a", "b") for text in texts]})

    monkeypatch.setitem(control.ROUTES, "/detokenize", (("POST",), False, answer))
    body = {**plain_request(stream), "text": "the a a"}
    async with world(
        plans=cut(8), options=replace(WITH, model=Model(recites=(*ORACLE.prompt(body), *AS))), policy="round_robin"
    ) as w:
        response = await w.ask(body)
        assert b'"reason":"text"' in response.body
        assert not (response.complete and response.status == 200)


AS = SENTENCE_PIECE.encode("a" * 30)


@both
async def test_a_worker_that_dies_when_it_is_asked(autojump_clock, monkeypatch, stream):
    """Nothing of its answer was delivered: the one after it goes on from the same place."""

    async def answer(worker, request):
        if worker.host == "w2":
            worker.kill()
        return detokenize(worker.options, request)

    monkeypatch.setitem(control.ROUTES, "/detokenize", (("POST",), False, answer))
    body = plain_request(stream)
    async with world(plans=[*cut(4), None], options=WITH, policy="round_robin") as w:
        response = await w.ask(body)
        assert judged(response, body, ORACLE) == []
        prompt = len(ORACLE.prompt(body))
        assert [len(worker.generates[0].json().get("input_ids", [])) for worker in w.workers] == [
            0,
            prompt + 4,
            prompt + 4,
        ]


@both
async def test_a_client_that_leaves_while_the_worker_is_asked(autojump_clock, monkeypatch, stream):
    asked = trio.Event()

    async def answer(worker, request):
        asked.set()
        await trio.sleep_forever()

    monkeypatch.setitem(control.ROUTES, "/detokenize", (("POST",), False, answer))
    async with world(plans=cut(4), options=WITH, policy="round_robin") as w:
        connection = await w.network.connect("proxy", 30000)
        data = json.dumps(plain_request(stream)).encode()
        await connection.send(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
        await asked.wait()
        connection.close()
        await until(lambda: w.rows)
        assert [row["outcome"] for row in w.rows] == ["client_gone"]
        assert [worker.in_flight for worker in w.app.fleet.workers] == [0, 0]


@both
async def test_a_finish_that_is_lost_takes_text_with_it(autojump_clock, stream):
    """What an engine withheld until the end is not known here. (Stock sends its finish with the last token.)"""
    body = plain_request(stream)
    plan = FaultPlan.in_order([(faults.AFTER_LAST_TOKEN, CLOSE)])
    async with world(plans=[plan, None], options=WITH, policy="round_robin") as w:
        response = await w.ask(body)
        assert b'"reason":"text"' in response.body
        assert not (response.complete and response.status == 200)


@both
async def test_an_abort_while_no_worker_has_it(autojump_clock, stream):
    """The answer ends with the text that was told."""
    plan = FaultPlan.in_order([(at_token(6), CLOSE)])
    async with world(plans=[plan, None], options=WITH, policy="round_robin") as w:
        answers = []

        async def client():
            answers.append(await w.ask(plain_request(stream, rid="R")))

        w.network.hang(("w2", 30000))
        await trio.sleep(4)
        async with trio.open_nursery() as clients:
            clients.start_soon(client)
            await plan.fired()
            await trio.sleep(1)
            await w.ask({"rid": "R"}, "/abort_request")
        [response] = answers
        value = response.values()[-1] if stream else response.json()
        assert value["meta_info"]["finish_reason"]["type"] == "abort"
        assert ORACLE.answer(plain_request(stream))["text"].startswith(value["text"])
        assert "prompt_token_ids" not in value
        assert value["text"]


@both
@kinds
async def test_a_stop_token(autojump_clock, kind, stream):
    """It is the answer's last id, and none of its text; with `no_stop_trim` it is."""
    text = "ab 中é the"
    model, prompt, count = recital(kind, text)
    for cut_at in range(1, count):
        for end in range(cut_at + 1, count + 1):
            token = model.recites[len(prompt) + end - 1]
            if token in model.recites[len(prompt) : len(prompt) + end - 1]:
                continue
            for keep in (True, False):
                asked = {"stop_token_ids": [token], "ignore_eos": False, "no_stop_trim": keep}
                response, body, oracle = await stopped(kind, text, cut_at, stream, **asked)
                assert judged(response, body, oracle) == [], (cut_at, end, keep)


@kinds
async def test_an_answer_that_ends_inside_a_character(autojump_clock, kind):
    """Bytes that are no character spell what those around them make of them: exact, or said to be unknown."""
    text = "abé€😀é😀"
    _, _, count = recital(kind, text)
    loud = exact = 0
    for end in range(2, count):
        for cut_at in range(1, end):
            response, body, oracle = await stopped(kind, text, cut_at, True, max_new_tokens=end)
            if b'"reason":"text"' in response.body:
                loud += 1
            else:
                assert judged(response, body, oracle) == [], (cut_at, end)
                exact += 1
    assert exact
    assert bool(loud) == (kind == "sentencepiece")
