"""Hypothesis strategies for requests, kills and cuts of bytes. They shrink to fewer, earlier kills, shorter prompts."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from dyn_testkit import faults
from dyn_testkit.engine import Model
from dyn_testkit.faults import FaultPlan, What, Where
from dyn_testkit.simnet import Fragmentation, Link


def prompts(model: Model, max_size: int = 12) -> st.SearchStrategy[list[int]]:
    """Token prompts, at least one token."""
    return st.lists(st.integers(0, model.vocab_size - 1), min_size=1, max_size=max_size)


@st.composite
def dictionaries(
    draw: st.DrawFn, fixed: dict[str, st.SearchStrategy[Any]], optional: dict[str, st.SearchStrategy[Any]]
) -> dict[str, Any]:
    """As `st.fixed_dictionaries`, but each optional field is there or not by itself, and shrinks away by itself."""
    found = {name: draw(values) for name, values in fixed.items()}
    return found | {name: draw(values) for name, values in optional.items() if draw(_THERE)}


_THERE = st.booleans()


def pure_sampling(model: Model, max_new_tokens: int = 16) -> st.SearchStrategy[dict[str, Any]]:
    """Sampling parameters under which the next token depends on the history alone, in many spellings."""
    temperature = st.sampled_from([0, 0.0, 1, 0.7])
    optional: dict[str, st.SearchStrategy[Any]] = {
        "sampling_seed": st.integers(0, 2**63 - 1),
        "top_p": st.sampled_from([1.0, 0.9]),
        "top_k": st.sampled_from([-1, 1, 50]),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.lists(st.integers(0, model.vocab_size - 1), max_size=3),
        "frequency_penalty": st.just(0.0),
        "repetition_penalty": st.just(1),
        "logit_bias": st.just({"3": 1.5}),
    }
    fixed = {"temperature": temperature, "max_new_tokens": st.integers(0, max_new_tokens)}
    return dictionaries(fixed, optional)


def requests(model: Model, max_new_tokens: int = 16) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies of single token-mode requests that may be continued elsewhere, unary and streaming."""
    plain = dictionaries(
        {"input_ids": prompts(model), "sampling_params": pure_sampling(model, max_new_tokens)},
        {
            "stream": st.booleans(),
            "rid": st.text("abc-0", min_size=1, max_size=6),
            "return_prompt_token_ids": st.booleans(),
        },
    )
    logprobs = dictionaries(
        {"return_logprob": st.booleans()},
        {
            "logprob_start_len": st.sampled_from([-1, 0]),
            "top_logprobs_num": st.integers(0, 2),
            "token_ids_logprob": st.lists(st.integers(0, model.vocab_size - 1), min_size=1, max_size=2),
        },
    )
    return st.builds(lambda first, second: first | second, plain, logprobs)


#: Ends of a connection, mildest first.
CUTS: tuple[What, ...] = (faults.CLOSE, faults.RESET, faults.KILL_WORKER)


def places(max_tokens: int) -> st.SearchStrategy[Where]:
    """Every place of an answer in which a connection can end, early ones first."""
    token = st.integers(1, max_tokens)
    return st.one_of(
        st.just(faults.AT_HEAD),
        st.builds(faults.at_token, st.integers(0, max_tokens)),
        st.builds(faults.inside_chunk_size, token),
        st.builds(faults.inside_json, token, st.integers(0, 400)),
        st.sampled_from([faults.AFTER_LAST_TOKEN, faults.AFTER_FINISH, faults.BEFORE_LAST_CHUNK, faults.AFTER_DONE]),
    )


def kill_plans(max_kills: int, max_tokens: int) -> st.SearchStrategy[tuple[int, ...]]:
    """How many tokens each attempt lives before it is cut; the attempt after the last one lives on."""
    return st.lists(st.integers(0, max_tokens), max_size=max_kills).map(tuple)


def fault_plans(max_faults: int, max_tokens: int) -> st.SearchStrategy[FaultPlan]:
    """The first requests to a worker are cut somewhere, later ones work."""
    entry = st.tuples(places(max_tokens), st.sampled_from(CUTS))
    return st.lists(entry, max_size=max_faults).map(FaultPlan.in_order)


def fragmentations(max_cuts: int = 30) -> st.SearchStrategy[Fragmentation]:
    """How reads are cut; shrinks to whole reads."""
    sizes = st.lists(st.integers(1, 300), max_size=max_cuts).map(tuple)
    return st.builds(Fragmentation, st.sampled_from([None, 64, 7, 1]), sizes)


def links(max_cuts: int = 30) -> st.SearchStrategy[Link]:
    """What is between two hosts; shrinks to the default link: no time, no limit, whole reads."""
    return st.builds(
        Link,
        latency=st.sampled_from([0.0, 0.001, 0.05, 2.0]),
        jitter=st.sampled_from([0.0, 0.001, 0.5]),
        bandwidth=st.sampled_from([None, 1e6, 5000.0]),
        fragmentation=fragmentations(max_cuts),
        buffer=st.sampled_from([65536, 2000, 100]),
    )
