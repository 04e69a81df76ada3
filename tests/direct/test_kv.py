"""KV-aware routing in direct mode: engines over gRPC on real sockets, whose events come over real ZeroMQ."""

from __future__ import annotations

import random

import trio

from dyn_relay.fleet.kv.index import RankId
from dyn_relay.fleet.policies.kv_aware import KvAware
from dyn_relay.fleet.worker import Role
from dyn_relay.sockets import open_network
from dyn_testkit.fleet import open_fleet
from dyn_testkit.relay import open_relay, until
from dyn_testkit.worker import WorkerOptions
from dyn_testkit.worker.kv_cache import KvOptions

PAGE = 4


async def test_a_request_goes_where_its_prompt_is_cached():
    prompt = random.Random(1).choices(range(5, 1000), k=5 * PAGE + 1)
    options = WorkerOptions(grpc_port=0, kv_events=KvOptions(page_size=PAGE))
    settings = {"log_level": "error", "health_check_interval_secs": 0.05, "health_success_threshold": 1, "seed": 1}
    async with open_network() as network, open_fleet(network) as fleet:
        workers = await fleet(2, options=options)
        urls = [worker.grpc_url for worker in workers]
        async with open_relay(network, workers=urls, policy="kv_aware", **settings) as relay:
            await relay.ready()
            policy = relay.app.fleet.policies[Role.REGULAR]
            assert isinstance(policy, KvAware)
            index = policy.index
            with trio.fail_after(60):
                await until(lambda: policy.sizes()["subscriptions"] == 2)
                for number in range(4):
                    body = {"input_ids": [*prompt, number], "sampling_params": {"max_new_tokens": 1}}
                    assert (await relay.ask(body)).status == 200
                    await until(lambda: index.match(index.chain(prompt, PAGE)))
            known = {rank: sum(blocks) for rank, blocks in index.match(index.chain(prompt, PAGE)).items()}
        [first] = [number for number, worker in enumerate(workers) if worker.generates]
        assert known == {RankId(f"w{first + 1}"): 5}
        assert len(workers[first].generates) == 4, "all went where the first one was"
        assert not workers[1 - first].generates
