"""Text of answers that were cut: that of the uninterrupted run, wherever the cut was."""

from __future__ import annotations

import pytest

from dyn_testkit.engine import Model
from dyn_testkit.faults import CLOSE, FaultPlan, at_token
from dyn_testkit.oracle import Oracle
from dyn_testkit.tokenizer import BYTE_LEVEL, PLAIN, SENTENCE_PIECE
from dyn_testkit.worker import WorkerOptions
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
        for stop in ("STOP", "STOP\n", ["P\n", "OP"], "STOSTOP", "é"):
            await check_stop(kind, text, cut, stream, stop=stop, no_stop_trim=not trim)


async def check_stop(kind, text, cut, stream, **sampling):
    """The answer is the oracle's. A cut that the answer did not live to see is none."""
    model, prompt, count = recital(kind, text)
    tokenizer = TOKENIZERS[kind]
    params = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True, "stream_interval": 1, **sampling}
    body = {"input_ids": prompt, "sampling_params": params, "stream": stream}
    options = WorkerOptions(model=model, tokenizer=tokenizer, skip_tokenizer_init=False)
    async with world(
        plans=[FaultPlan.in_order([(at_token(cut), CLOSE)]), None], options=options, policy="round_robin"
    ) as w:
        response = await w.ask(body)
        assert judged(response, body, Oracle(model, tokenizer=tokenizer)) == [], (cut, sampling)
