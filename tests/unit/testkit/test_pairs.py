"""A prefill/decode pair answers what one worker does (law 5); rooms, ranks, batches and infos are SGLang 0.5.23's."""

from __future__ import annotations

import base64
import re
from array import array
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from mock_worker_kit import DIALECTS, MODEL, ORACLE, body
from pair_kit import failure, joined, real, simulated, value
from test_mock_worker_captures import CAPTURES, body_shape, exchange, split

from dyn_testkit.client import fetch
from dyn_testkit.fleet import Pair
from dyn_testkit.oracle import Oracle, differences
from dyn_testkit.simnet import SimNetwork
from dyn_testkit.strategies import requests
from dyn_testkit.tokenizer import BYTE_LEVEL
from dyn_testkit.worker import Dialect, MockWorker, Phase, WorkerOptions

LOGPROBS = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [3, 4]}
PD = CAPTURES / "pd"
RECORDED = WorkerOptions(model=MODEL)


async def check_law_5(pair: Pair, asked: dict[str, Any], oracle: Oracle = ORACLE, dialect: str = "cumulative") -> None:
    """What a router can join of both answers is the answer of one worker."""
    prefill, decode = (value(response, dialect) for response in await pair.ask(asked))
    wanted = oracle.answer(asked)
    assert differences(joined(prefill, decode), wanted) == []
    assert prefill["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert prefill["output_ids"] == wanted["output_ids"][:1] or not wanted["output_ids"]
    assert len(prefill["output_ids"]) == 1
    for name, part in decode["meta_info"].items():
        assert not name.startswith("input_") or part == []


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_join_is_the_answer(autojump_clock: trio.testing.MockClock, dialect: Dialect, stream: bool) -> None:
    async with simulated(dialect=dialect) as pair:
        await check_law_5(pair, body(6, stream=stream, **LOGPROBS), dialect=dialect)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_join_is_the_answer_over_real_sockets(stream: bool) -> None:
    async with real() as pair:
        await check_law_5(pair, body(6, stream=stream, rid="mine", **LOGPROBS))


@settings(max_examples=100)
@given(requests(MODEL))
def test_any_join_is_the_answer(asked: dict[str, Any]) -> None:
    async def run() -> None:
        async with simulated() as pair:
            await check_law_5(pair, asked)

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))


async def test_text(autojump_clock: trio.testing.MockClock) -> None:
    asked = {"text": "hello there", "sampling_params": {"temperature": 0, "max_new_tokens": 9}}
    async with simulated(skip_tokenizer_init=False, tokenizer=BYTE_LEVEL) as pair:
        await check_law_5(pair, asked, Oracle(MODEL, tokenizer=BYTE_LEVEL))


async def test_rows_are_prefills_up_to_the_prompt_and_decodes_from_there(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Decode has rows for the prompt, too, but it has never computed it: they are stale."""

    def rows(answer: dict[str, Any]) -> list[int]:
        return array("i", base64.b64decode(answer["meta_info"]["routed_experts"])).tolist()

    asked = body(4, return_routed_experts=True)
    width = MODEL.layers * MODEL.experts_per_token
    prompt = width * len(asked["input_ids"])
    async with simulated(routed_experts=True) as pair:
        prefill, decode = (rows(value(response)) for response in await pair.ask(asked))
    wanted = rows(Oracle(MODEL, routed_experts=True).answer(asked))
    assert len(prefill) == prompt
    assert prefill + decode[prompt:] == wanted
    assert len(decode) == len(wanted)
    assert decode[:prompt] != prefill


async def test_decode_goes_on_from_what_prefill_computed(autojump_clock: trio.testing.MockClock) -> None:
    """So a router that sends the legs different prompts gets an answer to neither."""
    other = {"input_ids": [9, 8, 7]}
    async with simulated() as pair:
        prefill, decode = (value(response) for response in await pair.ask(body(6), prefill=other))
    assert prefill["output_ids"] == decode["output_ids"][:1]
    assert decode["output_ids"] == ORACLE.answer(body(6) | other)["output_ids"]
    assert decode["output_ids"] != ORACLE.answer(body(6))["output_ids"]


async def test_a_logprob_that_prefill_was_not_asked_for(autojump_clock: trio.testing.MockClock) -> None:
    async with simulated() as pair:
        _, decode = await pair.ask(body(3), decode={"return_logprob": True})
    got = value(decode)["meta_info"]["output_token_logprobs"]
    wanted = ORACLE.answer(body(3, return_logprob=True))["meta_info"]["output_token_logprobs"]
    assert (got[0][0], got[1:]) == (0.0, wanted[1:])


async def test_cached_tokens_are_prefills(autojump_clock: trio.testing.MockClock) -> None:
    async with simulated() as pair:
        for cached in (0, 2):
            answers = [value(response)["meta_info"]["cached_tokens"] for response in await pair.ask(body(4))]
            assert answers == [cached, cached]
        assert (bool(pair.prefill.scheduler.cache), bool(pair.decode.scheduler.cache)) == (True, False)


# As recorded ----------------------------------------------------------------------------------------------------------


def masked(wire: bytes) -> Any:
    """The form of a recorded or given answer; rids in texts are nobody's."""
    lines, found = split(re.sub(rb"rid='[0-9a-f]{32}'", b"rid='" + 32 * b"x" + b"'", wire))
    return lines, body_shape(lines, found)


async def recorded(network: SimNetwork, name: str, port: int) -> None:
    """Send what was sent; what comes must have the form of what came."""
    wire = await exchange(await network.connect("127.0.0.1", port), (PD / f"{name}.req").read_bytes())
    assert masked(wire) == masked((PD / f"{name}.wire").read_bytes())


@pytest.mark.parametrize("name", ["u_basic", "s_basic", "s_logprob", "u_err", "u_long"])
async def test_same_form(autojump_clock: trio.testing.MockClock, name: str) -> None:
    network = SimNetwork()
    options = WorkerOptions(disaggregation="prefill"), WorkerOptions(disaggregation="decode")
    async with (
        MockWorker.serve(network, "127.0.0.1", 31001, options[0]),
        MockWorker.serve(network, "127.0.0.1", 31002, options[1]),
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(recorded, network, f"{name}.prefill", 31001)
        nursery.start_soon(recorded, network, f"{name}.decode", 31002)


async def test_a_dead_prefill_worker_as_recorded(autojump_clock: trio.testing.MockClock) -> None:
    network = SimNetwork()
    options = WorkerOptions(disaggregation="prefill"), WorkerOptions(disaggregation="decode")
    async with (
        MockWorker.serve(network, "127.0.0.1", 31001, options[0]) as prefill,
        MockWorker.serve(network, "127.0.0.1", 31002, options[1]) as decode,
    ):
        await Pair(prefill, decode).ask(body(2))
        prefill.kill()
        await recorded(network, "after_kill_prefill.decode", 31002)
        assert trio.current_time() == 10  # two heartbeats


async def test_a_dead_decode_worker_as_recorded(autojump_clock: trio.testing.MockClock) -> None:
    """The prefill leg waits: its head is out, and nothing more. (The recording ends here; the leg does after 300 s.)"""
    network = SimNetwork()
    name = "after_kill_decode.prefill"
    options = WorkerOptions(disaggregation="prefill")
    async with MockWorker.serve(network, "127.0.0.1", 31001, options) as prefill:
        connection = await network.connect("127.0.0.1", 31001)
        await connection.send((PD / f"{name}.req").read_bytes())
        assert split(await connection.receive())[0] == split((PD / f"{name}.wire").read_bytes())[0]
        await prefill.reaches_phase(2002, Phase.BOOTSTRAP)
        assert b"timed out after 300.0s in KVPoll.Bootstrapping" in await connection.receive()
        assert trio.current_time() == 300


# Rooms, ranks, batches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [1, 2**53 + 1, 2**63 - 1])
async def test_rooms_are_exact(autojump_clock: trio.testing.MockClock, room: int) -> None:
    """I5"""
    async with simulated() as pair:
        await check_law_5(pair, body(3, bootstrap_room=room))
        assert pair.prefill.rooms == pair.decode.rooms == [room]
        phases = [(room, Phase.BOOTSTRAP), (room, Phase.TRANSFER), (room, Phase.TRANSFERRED)]
        assert pair.prefill.phases == pair.decode.phases == phases


async def test_the_largest_room_over_real_sockets() -> None:
    """I5"""
    async with real() as pair:
        await check_law_5(pair, body(3, bootstrap_room=2**63 - 1))
        assert pair.prefill.rooms == pair.decode.rooms == [2**63 - 1]


@pytest.mark.parametrize(
    ("prefill", "decode"), [(2**53 + 1, float(2**53 + 1)), (2**53 + 1, 2**53), (2**63, 2**63), (5, -5)]
)
async def test_rooms_that_never_meet(autojump_clock: trio.testing.MockClock, prefill: float, decode: float) -> None:
    """I5: a room that was rounded on one way, and one that is no int64."""
    async with simulated() as pair:
        answers = await pair.ask(body(3), {"bootstrap_room": prefill}, {"bootstrap_room": decode})
        assert [failure(answer)[0] for answer in answers] == [500, 500]
        assert trio.current_time() == 300
        assert pair.prefill.rooms == [prefill]
        assert pair.decode.rooms == [int(decode)]


async def test_room_0_is_none(autojump_clock: trio.testing.MockClock) -> None:
    """Decode takes it for a room that was not written yet."""
    async with simulated() as pair:
        prefill, decode = await pair.ask(body(3, bootstrap_room=0))
        assert value(prefill)["meta_info"]["finish_reason"]["type"] == "length"
        status, message = failure(decode)
        assert status == 500
        assert message.startswith("Decode transfer failed for request rank=0 decode_req.req.rid=")
        assert message.endswith(
            "KVTransferError(bootstrap_room=0): Request 0 timed out after 300.0s in KVPoll.WaitingForInput"
        )
        assert (pair.prefill.live, pair.decode.live) == (0, 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_no_room(autojump_clock: trio.testing.MockClock, role: str, stream: bool) -> None:
    async with simulated() as pair:
        worker = pair.prefill if role == "prefill" else pair.decode
        answer = await worker.ask(body(3, stream=stream, rid="r"))
        words = "Invalid request: Disaggregated request received without bootstrap room id. req.rid='r'"
        assert failure(answer) == (400, words)
        assert answer.status == (200 if stream else 400)
        assert worker.rooms == []


@pytest.mark.parametrize("n", [2, 3])
async def test_samples_hang(autojump_clock: trio.testing.MockClock, n: int) -> None:
    """I4"""
    asked = body(3, bootstrap_room=4)
    asked["sampling_params"]["n"] = n
    async with simulated() as pair:
        answers = await pair.ask(asked)
        assert trio.current_time() == 300
        assert [failure(answer)[0] for answer in answers] == [500, 500]
        assert pair.prefill.rooms == pair.decode.rooms == [4]
        assert pair.prefill.alive
        assert pair.decode.alive
        await check_law_5(pair, body(3))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("listed", [False, True])
async def test_batches(autojump_clock: trio.testing.MockClock, stream: bool, listed: bool) -> None:
    """A room for each prompt; one that is given alone is the first of as many."""
    prompts = [[7, 8, 9], [4, 5], [6]]
    rooms = [11, 2**62, 13] if listed else [11, 12, 13]
    async with simulated() as pair:
        meeting: dict[str, Any] = {"bootstrap_room": 11}
        if listed:
            ports = [pair.prefill.bootstrap_port] * 3
            meeting = {"bootstrap_host": ["prefill"] * 3, "bootstrap_port": ports, "bootstrap_room": rooms}
        prefill, decode = await pair.ask(body(4, stream=stream) | {"input_ids": prompts} | meeting)
        assert sorted(pair.prefill.rooms) == sorted(pair.decode.rooms) == sorted(rooms)
    wanted = [ORACLE.answer(body(4) | {"input_ids": prompt})["output_ids"] for prompt in prompts]
    if stream:
        last = {each["index"]: each["output_ids"] for each in decode.values()}
        assert [last[index] for index in range(3)] == wanted
        assert {each["index"]: each["output_ids"] for each in prefill.values()} == dict(
            enumerate(ids[:1] for ids in wanted)
        )
    else:
        assert [each["output_ids"] for each in decode.json()] == wanted
        assert [each["output_ids"] for each in prefill.json()] == [ids[:1] for ids in wanted]


@pytest.mark.parametrize("prefill", [0, 1])
@pytest.mark.parametrize("decode", [0, 1])
async def test_pinned_ranks(autojump_clock: trio.testing.MockClock, prefill: int, decode: int) -> None:
    """Prefill's rank is told to both, to each in its own field; decode's to decode."""
    async with simulated(dp_size=2) as pair:
        for room in (10, 11):
            answers = await pair.ask(
                body(3, bootstrap_room=room),
                {"routed_dp_rank": prefill},
                {"routed_dp_rank": decode, "disagg_prefill_dp_rank": prefill},
            )
            assert [value(answer)["meta_info"]["dp_rank"] for answer in answers] == [prefill, decode]


async def test_the_room_chooses_the_rank_of_prefill(autojump_clock: trio.testing.MockClock) -> None:
    async with simulated(dp_size=2) as pair:
        for room in (7, 8, 9):
            prefill, decode = await pair.ask(body(3, bootstrap_room=room))
            assert value(prefill)["meta_info"]["dp_rank"] == room % 2
            assert value(decode)["output_ids"] == ORACLE.answer(body(3))["output_ids"]


@pytest.mark.parametrize(("prefill", "decode"), [({"routed_dp_rank": 1}, {}), ({}, {"disagg_prefill_dp_rank": 1})])
async def test_a_wrong_rank_never_meets(
    autojump_clock: trio.testing.MockClock, prefill: dict[str, int], decode: dict[str, int]
) -> None:
    """The room alone says 0."""
    async with simulated(dp_size=2) as pair:
        answers = await pair.ask(body(3, bootstrap_room=10), prefill, decode)
        assert [failure(answer)[0] for answer in answers] == [500, 500]
        assert trio.current_time() == 300


async def test_a_rank_that_is_not_there(autojump_clock: trio.testing.MockClock) -> None:
    asked = body(3, bootstrap_host="prefill", bootstrap_room=10, disagg_prefill_dp_rank=2)
    async with simulated(dp_size=2) as pair:
        status, message = failure(await pair.decode.ask(asked | {"bootstrap_port": pair.prefill.bootstrap_port}))
    assert status == 500
    assert message.startswith("Decode handshake failed for request rank=0")
    assert "Could not fetch bootstrap info for: prefill_dp_rank: 2" in message


# Infos ----------------------------------------------------------------------------------------------------------------


async def test_infos(autojump_clock: trio.testing.MockClock) -> None:
    async with simulated() as pair:
        for worker, role, balance in (
            (pair.prefill, "prefill", "follow_bootstrap_room"),
            (pair.decode, "decode", "round_robin"),
        ):
            info = (await worker.ask(None, "/server_info")).json()
            assert info["disaggregation_mode"] == info["internal_states"][0]["disaggregation_mode"] == role
            assert info["disaggregation_bootstrap_port"] == worker.bootstrap_port
            assert info["load_balance_method"] == balance
            assert (await worker.ask(None, "/model_info")).json()["disaggregation_mode"] == role
            assert (await worker.ask(None, "/health")).status == 200


@pytest.mark.parametrize("where", ["memory", "sockets"])
async def test_the_bootstrap_server(where: str) -> None:
    async with (simulated if where == "memory" else real)(dp_size=2) as pair:
        worker = pair.prefill
        url = f"http://{worker.host}:{worker.bootstrap_port}"

        async def get(path: str) -> Any:
            return await fetch(worker.network, url, path)

        def route(*ranks: int) -> str:
            names = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
            return "/route?" + "&".join(f"{name}={rank}" for name, rank in zip(names, ranks, strict=True))

        health = await get("/health")
        assert (health.status, health.body) == (200, b"OK")
        whole = (await get(route(-1, -1, -1, -1))).json()
        assert (whole["dp_size"], whole["follow_bootstrap_room"]) == (2, True)
        assert whole["prefill_http_port"] == worker.port
        assert (await get(route(1, 0, 0, 0))).status == 200
        assert (await get(route(2, 0, 0, 0))).status == 404
        assert (await get("/route?prefill_dp_rank=0")).status == 400
        assert (await get("/generate")).status == 404
        worker.kill()
        await worker.restart()
        assert url == f"http://{worker.host}:{worker.bootstrap_port}"
        assert (await get("/health")).status == 200


async def test_decode_has_a_port_of_its_own_to_look_at(autojump_clock: trio.testing.MockClock) -> None:
    network = SimNetwork()
    async with (
        MockWorker.serve(network, "w1", 1, WorkerOptions(model=MODEL, disaggregation="prefill")) as prefill,
        MockWorker.serve(network, "w2", 1, WorkerOptions(model=MODEL, disaggregation="decode")) as decode,
    ):
        await check_law_5(Pair(prefill, decode), body(3, bootstrap_port=None))


async def test_a_bootstrap_port_in_use() -> None:
    network = SimNetwork()
    setup = WorkerOptions(disaggregation="prefill")
    async with MockWorker.serve(network, "w1", 1, setup):
        with pytest.raises(OSError, match="bootstrap port 8998"):
            async with MockWorker.serve(network, "w1", 2, setup):
                pass
        assert network.listening == {("w1", 1), ("w1", 8998)}
