"""What clients may ask of a pair: batches, samples, rooms of their own, ranks, texts, other weights."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import trio

from dyn_testkit.faults import KILL_WORKER, FaultPlan, at_token
from dyn_testkit.oracle import Oracle, differences, fold
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import MODEL, ORACLE, generate
from tests.relay.harness import judged
from tests.relay.pairs import Pairs, pairs

BOTH = pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])
LOGPROBS: dict[str, Any] = {"logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [3, 4]}
MOST = 2**63 - 1


def sent(w: Pairs, name: str) -> tuple[list[Any], list[Any]]:
    """What the legs were sent under this name, by side; "none" for nothing."""
    return (
        [one.json().get(name, "none") for worker in w.prefills for one in worker.generates],
        [one.json().get(name, "none") for worker in w.decodes for one in worker.generates],
    )


@BOTH
@pytest.mark.parametrize("more", [{}, LOGPROBS], ids=["plain", "logprobs"])
async def test_an_unprotected_answer_is_merged_too(autojump_clock, stream, more):
    """Law 5: what is not continued is no less whole."""
    async with pairs(migration_limit=0) as w:
        body = {**generate(8, stream=stream, sampling={"stream_interval": 1}), **more}
        response = await w.ask(body)
        assert dict(response.headers)[b"x-dyn-relay-migratable"].startswith(b"no")
        assert judged(response, body, ORACLE) == []


@BOTH
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
async def test_a_batch_has_a_room_for_each_prompt(autojump_clock, stream, split):
    """I4: arrays as long as the batch, whose rooms differ; every answer has its own prompt's logprobs."""
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    async with pairs(split_batches=split) as w:
        body = {**generate(6, stream=stream, sampling={"stream_interval": 1}), **LOGPROBS, "input_ids": prompts}
        response = await w.ask(body)
        assert response.status == 200
        singles = [{**body, "input_ids": prompt} for prompt in prompts]
        values = response.values() if stream else response.json()
        for index, single in enumerate(singles):
            if stream:
                answer = fold([value for value in values if value.get("index") == index], "cumulative")
            else:
                answer = values[index]
            assert differences(answer, ORACLE.answer(single)) == [], index
        await w.quiet()
        hosts, rooms = sent(w, "bootstrap_host"), sent(w, "bootstrap_room")
        assert rooms[0] == rooms[1] or sorted(rooms[0]) == sorted(rooms[1])
        if not split:
            assert [len(one) for one in (*hosts[0], *rooms[0])] == [3, 3]
        drawn = rooms[0] if split else rooms[0][0]
        assert len(set(drawn)) == 3
        assert len(w.app.rooms) == 0


@BOTH
async def test_a_split_batch_survives_a_death(autojump_clock, stream):
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    plan = FaultPlan.in_order([None, (at_token(3), KILL_WORKER)])
    options = WorkerOptions(tick=0.05)
    async with pairs(split_batches=True, decode=[plan, None], options=options, policy="round_robin") as w:
        body = {**generate(6, stream=stream, sampling={"stream_interval": 1}), **LOGPROBS, "input_ids": prompts}
        response = await w.ask(body)
        values = response.values() if stream else response.json()
        for index, prompt in enumerate(prompts):
            mine = [value for value in values if value.get("index") == index] if stream else []
            answer = fold(mine, "cumulative") if stream else values[index]
            assert differences(answer, ORACLE.answer({**body, "input_ids": prompt})) == [], index
        await w.quiet()
        plan.verify()
        assert len(w.app.rooms) == 0


@BOTH
async def test_samples_are_refused(autojump_clock, stream):
    """I4: they would share a room, and wait for each other until the engine's timeout; no worker sees them."""
    async with pairs() as w:
        response = await w.ask(generate(stream=stream, sampling={"n": 3}))
        error = (response.values()[0] if stream else response.json())["error"]
        assert (response.status, error.get("code", 400)) == ((200, 400) if stream else (400, 400))
        assert "n above 1" in error["message"]
        assert [worker.generates for worker in w.workers] == [[]] * 4


async def test_samples_that_are_split(autojump_clock):
    """I4: --split-batches gives each a room of its own."""
    async with pairs(split_batches=True) as w:
        body = generate(4, stream=False, sampling={"n": 3})
        response = await w.ask(body)
        single = generate(4, stream=False)
        assert [differences(value, ORACLE.answer(single)) for value in response.json()] == [[]] * 3
        assert len({room for worker in w.decodes for room in worker.rooms}) == 3


@BOTH
@pytest.mark.parametrize("name", ["bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank"])
async def test_a_clients_bootstrap_field_is_refused(autojump_clock, stream, name):
    """I1: a room that is used twice crashes both schedulers."""
    async with pairs() as w:
        value: Any = {"bootstrap_host": "p1", "bootstrap_port": 8998, "bootstrap_room": 5, "disagg_prefill_dp_rank": 0}[
            name
        ]
        response = await w.ask(generate(stream=stream, **{name: value}))
        error = (response.values()[0] if stream else response.json())["error"]
        assert response.status == (200 if stream else 400)
        assert name in error["message"]
        assert [worker.generates for worker in w.workers] == [[]] * 4
        body = generate(stream=stream, **{name: None})
        assert judged(await w.ask(body), body, ORACLE) == []


@BOTH
@pytest.mark.parametrize("room", [MOST, 2**53 + 1, 1])
async def test_a_room_is_kept_bit_by_bit(autojump_clock, stream, room):
    """I5: to the engine's bytes; with --trust-client-bootstrap clients may choose it."""
    async with pairs(trust_client_bootstrap=True, prefill=[None], decode=[None]) as w:
        body = generate(stream=stream, bootstrap_host="p1", bootstrap_port=8998, bootstrap_room=room)
        assert judged(await w.ask(body), body, ORACLE) == []
        for worker in w.workers:
            assert b'"bootstrap_room": %d' % room in worker.generates[0].request.body
            assert worker.rooms == [room]


@BOTH
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_clients_room_is_used_once(autojump_clock, stream, side):
    """I1: body with a room; the first pair does not take it, and the next one gets a room of ours."""
    async with pairs(trust_client_bootstrap=True, policy="round_robin") as w:
        (w.prefills if side == "prefill" else w.decodes)[0].scheduler.full = True
        body = generate(stream=stream, bootstrap_host="p1", bootstrap_port=8998, bootstrap_room=5)
        assert judged(await w.ask(body), body, ORACLE) == []
        prefill, decode = sent(w, "bootstrap_room")
        assert prefill == decode
        assert prefill[0] == 5
        assert len(set(prefill)) == 2
        assert sent(w, "bootstrap_host")[0] == ["p1", "p2"]


@BOTH
async def test_a_drawn_room_is_kept_bit_by_bit(autojump_clock, monkeypatch, stream):
    """I5: the largest one that is ever drawn."""
    async with pairs() as w:
        monkeypatch.setattr(w.app.rooms, "draw", lambda rank=0, ranks=1: MOST)
        body = generate(stream=stream)
        assert judged(await w.ask(body), body, ORACLE) == []
        assert [room for worker in w.workers for room in worker.rooms] == [MOST, MOST]


@BOTH
@pytest.mark.parametrize("policy", ["kv_aware", "round_robin", "least_loaded"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_all_rank_pairs(autojump_clock, stream, policy, side):
    """Two prefill and two decode ranks: each of the four pairs serves; both legs name the rank that has the prompt.

    One stage goes by the policy; chance in the other one brings all pairs together.
    """
    policies = {"policy": "random", f"{side}_policy": policy}
    async with pairs(prefill=[None], decode=[None], options=WorkerOptions(dp_size=2), dp_aware=True, **policies) as w:
        for number in range(24):
            body = {**generate(4, stream=stream, **LOGPROBS), "input_ids": [number, 6, 7]}
            assert judged(await w.ask(body), body, ORACLE) == [], number
        (prefill, decode), (_, named) = sent(w, "routed_dp_rank"), sent(w, "disagg_prefill_dp_rank")
        assert named == prefill
        rooms, _ = sent(w, "bootstrap_room")
        assert [room % 2 for room in rooms] == prefill
        assert set(zip(prefill, decode, strict=True)) == set(product((0, 1), (0, 1)))


@BOTH
@pytest.mark.parametrize("dialect", ["cumulative", "incremental"])
@pytest.mark.parametrize("token", [0, 1, 4, 7])
async def test_texts(autojump_clock, stream, dialect, token):
    """A prompt that is a text, and an answer that is one, over the death of a decode worker."""
    plan = FaultPlan.in_order([(at_token(token), KILL_WORKER)])
    options = WorkerOptions(skip_tokenizer_init=False, dialect=dialect)
    oracle = Oracle(MODEL, tokenizer=options.tokenizer)
    async with pairs(decode=[plan, None], options=options, policy="round_robin") as w:
        body = {**generate(8, stream=stream, sampling={"stream_interval": 1}), **LOGPROBS, "text": "hello you"}
        del body["input_ids"]
        assert judged(await w.ask(body), body, oracle, dialect) == []
        await w.quiet()
        plan.verify()
        assert len(w.app.rooms) == 0


@BOTH
async def test_weights_of_the_decode_worker_are_told(autojump_clock, stream):
    """H2: the tokens are the decode workers', and so are the versions; over a death they tile the answer."""
    plan = FaultPlan.in_order([(at_token(5), KILL_WORKER)])
    async with pairs(decode=[plan, None], weights=("default", "8"), policy="round_robin") as w:
        response = await w.ask(generate(8, stream=stream, sampling={"stream_interval": 1}))
        meta = (response.values()[-1] if stream else response.json())["meta_info"]
        spans = [{"version": "default", "start": 0, "end": 5}, {"version": "8", "start": 5, "end": 8}]
        assert meta["weight_versions"] == spans


@BOTH
@pytest.mark.parametrize("tokens", [1, 8])
async def test_weights_of_the_two_workers_that_differ(autojump_clock, stream, tokens):
    """H2: the first token, and what all others build upon, are the prefill worker's: the answer crosses versions."""
    async with pairs(prefill=[None], decode=[None], weights=("8",)) as w:
        response = await w.ask(generate(tokens, stream=stream))
        await w.quiet()
        assert w.rows[0]["crossed_versions"]
        assert stream or response.header("x-dyn-relay-crossed-versions") == "yes"


@BOTH
async def test_two_workers_of_the_same_weights(autojump_clock, stream):
    """H2: --weight-version-policy same: a decode worker without a prefill worker that fits gets nothing."""
    config = {"policy": "round_robin", "weight_version_policy": "same"}
    async with pairs(prefill=[None], decode=[None, None], weights=("8", "default"), **config) as w:
        for _ in range(3):
            body = generate(8, stream=stream)
            assert judged(await w.ask(body), body, ORACLE) == []
        assert [len(worker.generates) for worker in w.decodes] == [0, 3]
        await w.quiet()
        assert not any(row["crossed_versions"] for row in w.rows)
        w.decodes[1].kill()
        response = await w.ask(generate(8, stream=stream))
        assert response.status == 503
        assert b"weight_version" in response.body
        assert w.decodes[0].generates == []


@BOTH
async def test_weights_that_must_be_the_same(autojump_clock, stream):
    """H2: --weight-version-policy same leaves other decode workers, and other prefill workers, out."""
    plan = FaultPlan.in_order([(at_token(5), KILL_WORKER)])
    weights = ("default", "8", "default")
    config = {"policy": "round_robin", "weight_version_policy": "same"}
    async with pairs(prefill=[None], decode=[plan, None, None], weights=weights, **config) as w:
        body = generate(8, stream=stream, sampling={"stream_interval": 1})
        assert judged(await w.ask(body), body, ORACLE) == []
        assert [len(worker.generates) for worker in w.decodes] == [1, 0, 1]


@BOTH
@pytest.mark.parametrize("aware", [True, False], ids=["dp-aware", "unaware"])
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_the_client_names(autojump_clock, stream, aware, rank):
    """Both legs take it, and the decode worker is told where the prompt is."""
    async with pairs(prefill=[None], decode=[None], options=WorkerOptions(dp_size=2), dp_aware=aware) as w:
        for _ in range(4):
            body = {**generate(4, stream=stream, **LOGPROBS), "routed_dp_rank": rank}
            assert judged(await w.ask(body), body, ORACLE) == []
        assert sent(w, "routed_dp_rank") == ([rank] * 4, [rank] * 4)
        assert sent(w, "disagg_prefill_dp_rank")[1] == [rank] * 4


@BOTH
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("protected", [True, False])
async def test_a_rank_that_the_client_names_at_another_pair(autojump_clock, stream, rank, protected):
    """What goes out as it came names it again, and so decode must be told again."""
    config: dict[str, Any] = {"options": WorkerOptions(dp_size=2), "policy": "round_robin"}
    async with pairs(prefill=[None, None], decode=[None, None], **config) as w:
        w.decodes[0].scheduler.full = True
        for _ in range(6):
            sampling = {} if protected else {"frequency_penalty": 0.5}
            body = generate(4, stream=stream, routed_dp_rank=rank, sampling=sampling)
            with trio.fail_after(60):
                assert judged(await w.ask(body), body, ORACLE) == []


@BOTH
@pytest.mark.parametrize("given", [{"bootstrap_room": 7}, {"bootstrap_host": "p1"}, {"bootstrap_port": 8998}], ids=str)
async def test_what_a_trusted_client_leaves_out_is_ours(autojump_clock, stream, given):
    async with pairs(trust_client_bootstrap=True, prefill=[None], decode=[None]) as w:
        body = generate(stream=stream, **given)
        assert judged(await w.ask(body), body, ORACLE) == []


@BOTH
async def test_a_trusted_clients_room_that_is_in_use(autojump_clock, stream):
    """It would kill both workers: the second request gets another one."""
    options = WorkerOptions(tick=0.5)
    async with pairs(trust_client_bootstrap=True, prefill=[None], decode=[None], options=options) as w:
        bodies = [generate(4, stream=stream, bootstrap_room=7, input_ids=[number, 1]) for number in range(3)]
        wrong: list[list[str]] = []

        async def client(body: dict[str, Any]) -> None:
            wrong.append(judged(await w.ask(body), body, ORACLE))

        async with trio.open_nursery() as clients:
            for body in bodies:
                clients.start_soon(client, body)
        assert wrong == [[]] * 3
        assert w.prefills[0].rooms.count(7) == 1
        assert len(set(w.prefills[0].rooms)) == 3


@BOTH
@pytest.mark.parametrize(
    ("prompts", "room"), [(1, 0), (1, MOST + 1), (1, 1.5), (1, "7"), (1, True), (2, [11, 11]), (2, [11]), (2, 11)]
)
async def test_a_trusted_clients_room_that_would_crash_or_hang(autojump_clock, stream, prompts, room):
    """400 with the field's name, and no worker sees it."""
    async with pairs(trust_client_bootstrap=True) as w:
        ids = [5, 6] if prompts == 1 else [[5, 6]] * prompts
        response = await w.ask(generate(stream=stream, input_ids=ids, bootstrap_room=room))
        assert b"bootstrap_room" in response.body
        assert b'"code":400' in response.body or response.status == 400
        assert [worker.generates for worker in w.workers] == [[]] * 4


async def test_bytes_of_the_decode_worker_pass(autojump_clock):
    """Where nothing is to be merged the client gets the decode worker's own events, and the workers its own body."""
    async with pairs() as w:
        raw = b'{"rid":"a","x":[1e2, 1.50],"input_ids":[5,6,7],"stream":true,"sampling_params":{"max_new_tokens":4}}'
        response = await w.ask(raw)
        [recorded] = [one for worker in w.decodes for one in worker.generates]
        assert raw.removeprefix(b"{") in recorded.request.body
        # Of bytes that are written again nothing would be left of a worker's own number.
        assert all(b'"e2e_latency":0.0' in event or event == b"[DONE]" for event in response.events()[-2:])
