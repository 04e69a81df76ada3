"""What stock SGLang keeps for its admin, and who is told here: all workers, one that is named, none, or any one.

Source: SGLang 0.5.23, all routes of `srt/entrypoints/http_server.py` and `elastic_ep.py` that have an `auth_level`
(each ADMIN_OPTIONAL; `srt/utils/auth.py` knows ADMIN_FORCE, which no route has), with their methods. A path that an
older release has, and this one not, says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: Seconds for what an engine does between two steps, and for what moves weights or waits until the engine is idle.
QUICK, SLOW = 60.0, 1800.0
PAUSE, CONTINUE = "/pause_generation", "/continue_generation"
_POST, _EITHER = ("POST",), ("GET", "POST")


@dataclass(frozen=True, slots=True)
class Order:
    """A row of `ORDERS`."""

    #: Why all are told.
    why: str
    methods: tuple[str, ...] = _POST
    #: Seconds that each worker gets.
    timeout: float = QUICK
    #: It may change what workers tell of themselves, such as the version of their weights.
    renews: bool = False


@dataclass(frozen=True, slots=True)
class One:
    """A row of `ONE_ENGINES`."""

    #: What of it is one engine's.
    why: str
    methods: tuple[str, ...] = _POST


_WEIGHTS = "a fleet has one set of weights"
_MEMORY = "the memory is wanted for something that all engines make way for"
_CACHE = "what is stale in one cache is stale in all"
_STORE = "whether a prefix is found must not depend on the worker"
_CORPUS = "a draft must not depend on the worker"
_LORA = "a request that names an adapter may go to any worker"
_WATCHED = "whoever watches a fleet wants all of it"
_KNOB = "workers that differ in it would be taken for sick, or preferred"
#: Paths whose requests go to all workers at once.
ORDERS: Mapping[str, Order] = {
    PAUSE: Order("what is paused at one goes on at another"),
    CONTINUE: Order("all were paused"),
    "/flush_cache": Order(_CACHE, _EITHER, SLOW),
    "/update_weight_version": Order(_WEIGHTS, renews=True),
    "/update_weights_from_disk": Order(_WEIGHTS, timeout=SLOW, renews=True),
    # Nothing in their bodies is of one engine, though what comes between them may be.
    "/begin_weight_update": Order(_WEIGHTS, timeout=SLOW),
    "/end_weight_update": Order(_WEIGHTS, timeout=SLOW, renews=True),
    "/weights_checker": Order(_WEIGHTS, _EITHER, SLOW),
    "/release_memory_occupation": Order(_MEMORY, _EITHER, SLOW),
    "/resume_memory_occupation": Order(_MEMORY, _EITHER, SLOW),
    "/load_lora_adapter": Order(_LORA, timeout=SLOW),
    "/unload_lora_adapter": Order(_LORA, timeout=SLOW),
    "/hicache/storage-backend": Order(_STORE, ("GET", "PUT", "DELETE"), SLOW),
    "/hicache/storage-backend/clear": Order(_CACHE, timeout=SLOW),
    # The same in releases before 0.5.23, which has no such route.
    "/clear_hicache_storage_backend": Order(_CACHE, _EITHER, SLOW),
    "/add_external_corpus": Order(_CORPUS, timeout=SLOW),
    "/remove_external_corpus": Order(_CORPUS),
    "/list_external_corpora": Order(_CORPUS, ("GET",)),
    "/configure_logging": Order(_WATCHED, _EITHER),
    "/set_trace_level": Order(_WATCHED, _EITHER),
    "/start_profile": Order(_WATCHED, _EITHER),
    "/stop_profile": Order(_WATCHED, _EITHER, SLOW),
    "/start_expert_distribution_record": Order(_WATCHED, _EITHER),
    "/stop_expert_distribution_record": Order(_WATCHED, _EITHER),
    "/dump_expert_distribution_record": Order(_WATCHED, _EITHER, SLOW),
    "/set_internal_state": Order(_KNOB, ("POST", "PUT")),
    "/freeze_gc": Order(_KNOB, _EITHER),
    "/slow_down": Order(_KNOB, _EITHER),
}
#: Those that can be for one worker alone, as `/workers/{id}/PATH`: whoever watches may look at one.
FOR_ONE: Mapping[str, Order] = {path: order for path, order in ORDERS.items() if order.why is _WATCHED}

_GROUP = "the body has one engine's rank or ports in a group"
_HANDLES = "the body has tensors, or handles of them, for one engine's ranks"
_ADDRESSES = "the answer has addresses in one engine's memory"
_SIZE = "each engine has a size of its own"
#: Paths that are about one engine. Nobody but the client can know which, so these are refused. `*` as in `routes.py`.
ONE_ENGINES: Mapping[str, One] = {
    "/init_weights_update_group": One(_GROUP),
    "/destroy_weights_update_group": One("engines join such a group one by one, and leave it so"),
    "/update_weights_from_distributed": One("the group that they come from has one engine's ranks"),
    "/update_weights_from_tensor": One(_HANDLES),
    "/update_weights_from_ipc": One(_HANDLES),
    "/load_lora_adapter_from_tensors": One(_HANDLES),
    "/init_weights_send_group_for_remote_instance": One(_GROUP),
    "/send_weights_to_remote_instance": One(_GROUP),
    "/remote_instance_transfer_engine_info": One(_ADDRESSES, ("GET",)),
    "/get_remote_instance_transfer_engine_info": One(_ADDRESSES, ("GET",)),
    "/pd_role_switch": One("each engine has a role of its own"),
    "/scale_elastic_ep": One(_SIZE),
    "/is_scaling_elastic_ep": One(_SIZE, ("GET",)),
    "/dumper/*": One("it examines one engine, and writes to that one's disk"),
}
#: Paths that any worker can answer for all, and why: they are bridged.
READS: Mapping[str, str] = {"/get_weights_by_name": "it only reads, and a fleet has one set of weights"}
#: All of them; the first has a handler of its own.
ADMIN = frozenset({"/abort_request", *ORDERS, *ONE_ENGINES, *READS})
