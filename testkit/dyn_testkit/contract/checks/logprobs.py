"""Logprobs: one entry `[value, token, text]` a token."""

from __future__ import annotations

from typing import Any

from dyn_testkit.contract.compare import alike
from dyn_testkit.contract.subject import Subject
from dyn_testkit.contract.table import check, equal, expect, number, same

_COUNT = 5
_TOP = 3
#: How far a logprob of a prompt's token may be from that of the same token, generated: kernels of prefill and decode
#: round 16-bit floats otherwise. What belongs to another token is much farther away.
_PREFILL = 0.1


def _entries(entries: list[Any], tokens: list[int], what: str) -> None:
    """Entries of numbers that are logarithms of probabilities, for exactly these tokens."""
    equal(f"tokens of {what}", [entry[1] for entry in entries], tokens)
    for entry in entries:
        equal(f"parts of an entry of {what}", len(entry), 3)
        expect(number(entry[0]) and entry[0] <= 1e-6, f"{what}: {entry[0]} is no logprob")
        expect(entry[2] is None, f"{what}: a text, which nobody asked for")


def _best(entries: list[Any], count: int, taken: list[Any], what: str, tolerance: float) -> None:
    """The most likely tokens of one position, the likeliest first; `taken` is the entry of the token that is there."""
    values, tokens = [entry[0] for entry in entries], [entry[1] for entry in entries]
    equal(f"entries at a position of {what}", len(entries), count)
    _entries(entries, tokens, what)
    expect(all(type(token) is int and token >= 0 for token in tokens), f"{what}: {tokens} are no tokens")
    expect(len(set(tokens)) == count, f"{what}: {tokens} has a token twice")
    equal(f"values at a position of {what}, best first", values, sorted(values, reverse=True))
    there = [value for value, token in zip(values, tokens, strict=True) if token == taken[1]]
    expect(all(alike(value, taken[0], tolerance) for value in there), f"{what}: {there[:1]} for {taken}")
    expect(taken[0] <= values[0] + tolerance, f"{what}: {values[0]} is the best, but there is {taken}")


@check("§4.5, tokenizer_manager.py:3098")
async def output_logprobs(worker: Subject) -> None:
    """`output_token_logprobs` has one entry `[value, token, null]` an output token; its length is told too."""
    for stream in (False, True):
        value = await worker.answer(worker.body(_COUNT, return_logprob=True), stream=stream)
        meta = value["meta_info"]
        _entries(meta["output_token_logprobs"], value["output_ids"], "output_token_logprobs")
        equal("output_token_logprobs_length", meta["output_token_logprobs_length"], _COUNT)
        equal("input_token_logprobs", meta["input_token_logprobs"], [])
    for event in await worker.events(worker.body(_COUNT, return_logprob=True)):
        meta = event["meta_info"]
        equal("output_token_logprobs_length", meta["output_token_logprobs_length"], meta["completion_tokens"])


@check("§4.5")
async def no_logprobs_unasked(worker: Subject) -> None:
    """Who does not ask for logprobs gets none."""
    for stream in (False, True):
        meta = (await worker.answer(worker.body(2), stream=stream))["meta_info"]
        extra = [name for name in meta if name.endswith(("_logprobs", "_logprobs_length"))]
        equal("keys about logprobs", extra, [])


@check("§4.5, logprob_result_processor.py:26")
async def logprob_start_len(worker: Subject) -> None:
    """`input_token_logprobs` covers the prompt from `logprob_start_len` on; its first entry has no value."""
    for start in (0, 2, len(worker.prompt) - 1):
        body = worker.body(2, return_logprob=True, logprob_start_len=start)
        rows = (await worker.unary(body))["meta_info"]["input_token_logprobs"]
        equal(f"tokens from {start} on", [row[1] for row in rows], list(worker.prompt)[start:])
        equal("the first entry's value", rows[0][0], None)
        _entries(rows[1:], list(worker.prompt)[start + 1 :], "input_token_logprobs")


@check("§4.5")
async def prompt_logprobs_are_the_outputs(worker: Subject) -> None:
    """A token has the logprob in a prompt that it had when it was generated after the same tokens."""
    first = await worker.unary(worker.body(_COUNT, return_logprob=True))
    prompt = [*worker.prompt, *first["output_ids"]]
    body = worker.body(1, input_ids=prompt, return_logprob=True, logprob_start_len=0)
    for stream in (False, True):
        rows = (await worker.answer(body, stream=stream))["meta_info"]["input_token_logprobs"][len(worker.prompt) :]
        for row, wanted in zip(rows, first["meta_info"]["output_token_logprobs"], strict=True):
            close = same(row[1], wanted[1]) and alike(row[0], wanted[0], max(_PREFILL, worker.tolerance))
            expect(close, f"{wanted} was generated, in a prompt it is {row}")


@check("§4.5")
async def logprob_start_at_the_end(worker: Subject) -> None:
    """`logprob_start_len` -1, and the prompt's length, give no prompt logprobs."""
    for start in (-1, len(worker.prompt)):
        body = worker.body(2, return_logprob=True, logprob_start_len=start)
        equal(f"rows from {start} on", (await worker.unary(body))["meta_info"]["input_token_logprobs"], [])


@check("§4.5")
async def top_logprobs(worker: Subject) -> None:
    """`top_logprobs_num` best tokens at each position, best first; at temperature 0 the best one is taken."""
    body = worker.body(_COUNT, return_logprob=True, top_logprobs_num=_TOP, logprob_start_len=0)
    for stream in (False, True):
        value = await worker.answer(body, stream=stream)
        meta = value["meta_info"]
        equal("positions of output_top_logprobs", len(meta["output_top_logprobs"]), _COUNT)
        for token, chosen, best in zip(
            value["output_ids"], meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True
        ):
            _best(best, _TOP, chosen, "output_top_logprobs", worker.tolerance)
            clear = best[0][0] - best[1][0] > worker.tolerance
            expect(not clear or best[0][1] == token, f"token {token} was taken, {best[0]} is best")
            expect(abs(best[0][0] - chosen[0]) <= worker.tolerance, f"token {token} was taken, {best[0]} is best")
        equal("positions of input_top_logprobs", len(meta["input_top_logprobs"]), len(worker.prompt))
        expect(not meta["input_top_logprobs"][0], "the first position of the prompt has top logprobs")
        for best, row in zip(meta["input_top_logprobs"][1:], meta["input_token_logprobs"][1:], strict=True):
            _best(best, _TOP, row, "input_top_logprobs", worker.tolerance)


@check("§4.5")
async def token_ids_logprob(worker: Subject) -> None:
    """`token_ids_logprob` gives the logprobs of just these tokens, at every position."""
    asked = sorted({worker.prompt[-1], *(await worker.ids(worker.body(_COUNT)))})
    body = worker.body(_COUNT, return_logprob=True, token_ids_logprob=asked, logprob_start_len=0)
    for stream in (False, True):
        meta = (await worker.answer(body, stream=stream))["meta_info"]
        for name, count in (("input_token_ids_logprobs", len(worker.prompt)), ("output_token_ids_logprobs", _COUNT)):
            rows = meta[name]
            equal(f"positions of {name}", len(rows), count)
            for row in rows[1:] if name.startswith("input") else rows:
                _entries(row, asked, name)
        expect(not meta["input_token_ids_logprobs"][0], "the first position of the prompt has logprobs")
        for taken, row in zip(meta["output_token_logprobs"], meta["output_token_ids_logprobs"], strict=True):
            there = row[asked.index(taken[1])]
            expect(alike(there[0], taken[0], worker.tolerance), f"{there} among them, {taken} was taken")


@check("§2, tokenizer_manager.py:2526")
async def text_in_logprobs(worker: Subject) -> None:
    """`return_text_in_logprobs` puts each token's text into its entry, if there is a tokenizer."""
    body = worker.body(2, return_logprob=True, return_text_in_logprobs=True)
    texts = [entry[2] for entry in (await worker.unary(body))["meta_info"]["output_token_logprobs"]]
    kind = str if worker.facts.tokenizer else type(None)
    expect(all(isinstance(text, kind) for text in texts), f"texts are {texts}")


@check("§4.5, recorded")
async def logprobs_of_no_tokens(worker: Subject) -> None:
    """With `max_new_tokens` 0 the prompt's logprobs come alone."""
    meta = (await worker.unary(worker.body(0, return_logprob=True, logprob_start_len=0)))["meta_info"]
    equal("input_token_logprobs", len(meta["input_token_logprobs"]), len(worker.prompt))
    expect(len(meta["output_token_logprobs"]) <= 1, f"{len(meta['output_token_logprobs'])} output entries")
