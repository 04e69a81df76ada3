"""Stops, and what depends on a tokenizer."""

from __future__ import annotations

from typing import Any

from dyn_testkit.contract.subject import Subject
from dyn_testkit.contract.table import Inapplicable, check, equal, expect

_LOOKAHEAD = 16


async def _stop(worker: Subject) -> tuple[list[int], int]:
    """An answer that ends by length, EOS not ignored, and the position of a token in it that is new there."""
    value = await worker.unary(worker.body(_LOOKAHEAD, sampling={"ignore_eos": False}))
    ids: list[int] = value["output_ids"]
    last = len(ids) - (value["meta_info"]["finish_reason"]["type"] == "stop")
    fresh = next((at for at in range(1, last) if ids[at] not in ids[:at]), None)
    if fresh is None:
        raise Inapplicable(f"its answer {ids} has no second token to stop at: give another prompt=")
    return ids, fresh


@check("§3.2, schedule_batch.py:1863")
async def stop_token(worker: Subject) -> None:
    """A stop token ends the answer, is part of it, and is what `matched` says."""
    ids, at = await _stop(worker)
    params = {"ignore_eos": False, "stop_token_ids": [ids[at]]}
    for stream in (False, True):
        value = await worker.answer(worker.body(_LOOKAHEAD, sampling=params), stream=stream)
        equal("output_ids", value["output_ids"], ids[: at + 1])
        equal("finish_reason", value["meta_info"]["finish_reason"], {"type": "stop", "matched": ids[at]})
        equal("completion_tokens", value["meta_info"]["completion_tokens"], at + 1)


@check("§3, schedule_batch.py:1856")
async def ignore_eos_ignores_stop_tokens(worker: Subject) -> None:
    """`ignore_eos` also ignores `stop_token_ids`."""
    whole = await worker.ids(worker.body(6))
    value = await worker.unary(worker.body(6, sampling={"stop_token_ids": [whole[1]]}))
    equal("output_ids", value["output_ids"], whole)
    equal("finish_reason", value["meta_info"]["finish_reason"], {"type": "length", "length": 6})


@check("§3.2")
async def stop_beats_length(worker: Subject) -> None:
    """A stop token that is also the last one allowed is a stop."""
    ids, at = await _stop(worker)
    params = {"ignore_eos": False, "stop_token_ids": [ids[at]]}
    value = await worker.unary(worker.body(at + 1, sampling=params))
    equal("finish_reason", value["meta_info"]["finish_reason"], {"type": "stop", "matched": ids[at]})


@check("§3, recorded")
async def min_new_tokens(worker: Subject) -> None:
    """Before `min_new_tokens` no stop token comes; without a tokenizer it may be refused (400)."""
    ids, at = await _stop(worker)
    least = at + 2
    params = {"ignore_eos": False, "stop_token_ids": [ids[at]], "min_new_tokens": least}
    exchange = await worker.ask("/generate", worker.body(_LOOKAHEAD, sampling=params))
    if exchange.response.status == 400 and worker.facts.tokenizer is not True:
        expect("min_new_tokens" in exchange.response.json()["error"]["message"], "the message does not name it")
        return
    value = worker.value_of(exchange)
    expect(len(value["output_ids"]) >= least, f"{len(value['output_ids'])} tokens, at least {least} were asked for")
    expect(ids[at] not in value["output_ids"][:least], "a stop token came before min_new_tokens")


async def _text(worker: Subject, **sampling: Any) -> dict[str, Any]:
    if not worker.facts.tokenizer:
        raise Inapplicable("the worker has no tokenizer (or give tokenizer=True)")
    return await worker.answer(worker.body(_LOOKAHEAD, sampling=sampling), stream=False)


def _middle(text: str) -> str:
    """Two plain characters that come first not at the very beginning of a text. Raises `Inapplicable`."""
    pairs = [text[at : at + 2] for at in range(2, len(text) - 2)]
    found = next((pair for pair in pairs if pair.isascii() and pair.isprintable() and text.find(pair) >= 2), None)
    if found is None:
        raise Inapplicable(f"no place to stop at in {text!r}: give another prompt=")
    return found


@check("§3.2, schedule_batch.py:1880")
async def stop_string(worker: Subject) -> None:
    """A stop string ends the answer, is what `matched` says, and is not in the text."""
    whole = await _text(worker)
    stop = _middle(whole["text"])
    for stream in (False, True):
        value = await worker.answer(worker.body(_LOOKAHEAD, sampling={"stop": [stop]}), stream=stream)
        equal("finish_reason", value["meta_info"]["finish_reason"], {"type": "stop", "matched": stop})
        equal("text", value["text"], whole["text"].partition(stop)[0])
        count = len(value["output_ids"])
        equal("output_ids", value["output_ids"], whole["output_ids"][:count])


@check("§3, detokenizer_manager.py:194")
async def no_stop_trim(worker: Subject) -> None:
    """With `no_stop_trim` the stop string is left in the text."""
    whole = await _text(worker)
    stop = _middle(whole["text"])
    value = await worker.unary(worker.body(_LOOKAHEAD, sampling={"stop": stop, "no_stop_trim": True}))
    expect(value["text"].startswith(whole["text"].partition(stop)[0] + stop), f"text is {value['text']!r}")


@check("§4.3, §4.7")
async def texts_add_up(worker: Subject) -> None:
    """The texts of a stream's events are those of its unary answer: growing, or parts of it."""
    whole = await _text(worker)
    events = await worker.events(worker.body(_LOOKAHEAD))
    if worker.facts.dialect == "cumulative":
        for event in events:
            expect(whole["text"].startswith(event["text"]), f"{event['text']!r} does not begin {whole['text']!r}")
    equal("text", worker.folded(events)["text"], whole["text"])


@check("§2, tokenizer_manager.py:1117")
async def ids_beat_text(worker: Subject) -> None:
    """With both `text` and `input_ids` the ids are the prompt."""
    wanted = await worker.ids(worker.body(3))
    equal("output_ids", await worker.ids(worker.body(3, text="something else")), wanted)


@check("§2, tokenizer_manager.py:1121")
async def text_prompt(worker: Subject) -> None:
    """A text prompt is tokenized; without a tokenizer it is refused (400)."""
    exchange = await worker.ask("/generate", worker.body(3, input_ids=..., text="ab"))
    if worker.facts.tokenizer is False:
        equal("status", exchange.response.status, 400)
        equal("keys of the error", list(exchange.response.json()["error"]), ["message"])
        return
    value = worker.value_of(exchange)
    expect(value["meta_info"]["prompt_tokens"] > 0, "prompt_tokens is 0")
