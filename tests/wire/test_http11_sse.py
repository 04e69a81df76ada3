"""The SSE splitter: any fragmentation, any line ends, nothing but blank lines matter (C6, D4)."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from wire_kit import feed_all, pieces

from dyn_relay.http11.errors import EventTooLarge
from dyn_relay.http11.sse import LARGE, Splitter, comment

BOM = b"\xef\xbb\xbf"
HUGE = 1 << 30


def reference(stream: bytes) -> list[tuple[bytes, bytes]]:
    """The same split, line by line."""
    events, block, data = [], b"", []
    for number, line in enumerate(re.findall(rb"[^\n]*\n", stream)):
        block += line
        text = line[:-1].removesuffix(b"\r")
        if number == 0:
            text = text.removeprefix(BOM)
        if not text:
            events.append((block, b"\n".join(data)))
            block, data = b"", []
        elif text.startswith(b"data:"):
            data.append(text[5:].removeprefix(b" "))
        elif text == b"data":
            data.append(b"")
    return events


def split(parts: list[bytes], max_event: int = HUGE) -> list[tuple[bytes, bytes]]:
    splitter = Splitter(max_event)
    return [event for part in parts for event in splitter.feed(part)]


line_end = st.sampled_from([b"\n", b"\r\n"])
text = st.one_of(
    st.sampled_from([b"", b"x", b'{"text":"data: [DONE]\\n\\ndata: {}"}', b"[DONE]", b"a\rb", "🙂é".encode()]),
    st.binary(max_size=20).map(lambda raw: raw.replace(b"\n", b"").replace(b"\r", b"")),
)
prefix = st.sampled_from([b"data: ", b"data:", b"data", b":", b": ", b"event: ", b"id:", b"", b"dataset: ", b"data:  "])
line = st.builds(lambda start, rest, end: start + rest + end, prefix, text, line_end)
block = st.builds(lambda lines, end: b"".join(lines) + end, st.lists(line, max_size=4), line_end)
streams = st.builds(
    lambda bom, blocks, rest: bom + b"".join(blocks) + rest,
    st.sampled_from([b"", BOM]),
    st.lists(block, max_size=6),
    st.sampled_from([b"", b"data: half", b"\r", b"data: x\r\n\r", b"data: x\n"]),
)


@settings(max_examples=512)
@given(stream=streams, cuts=st.lists(st.integers(0, 400), max_size=12))
@example(stream=b"\r\n\r\n\n\ndata: x\n\r\n", cuts=[1, 2, 3, 4, 5])
@example(stream=BOM + b"\r\ndata: x\n\n", cuts=[1, 2, 3, 4])
@example(stream=b"data: x\r\n\n", cuts=[])
@example(stream=b"data: a\n\ndata: b\n\n: c\n\ndata: d\n\n", cuts=[])
@example(stream=b"data: a\n\ndata: b\n\n\n\ndata: c\ndata: d\n\ndata: e\n", cuts=[])
@example(stream=b"data: a\n\ndata: b\n\n" + BOM + b"\n\ndata: c\n\n", cuts=[])
@example(stream=b"data: \n\ndata:\n\ndata: a\n\ndata: ", cuts=[])
@example(stream=b"data: x\n\n" + BOM + b"data: y\n\n", cuts=[9])
def test_any_fragmentation_gives_the_same_events(stream: bytes, cuts: list[int]) -> None:
    expected = reference(stream)
    splitter = Splitter(HUGE)
    events = [event for part in pieces(stream, cuts) for event in splitter.feed(part)]
    assert events == expected
    delivered = b"".join(raw for raw, _ in events)
    assert stream.startswith(delivered)
    assert splitter.pending == len(stream) - len(delivered)
    assert split([stream[i : i + 1] for i in range(len(stream))]) == expected


@settings(max_examples=300)
@given(junk=st.lists(st.sampled_from([b"\r", b"\n", b"d", b"data:", b" ", BOM]), max_size=30).map(b"".join))
def test_line_ends_in_any_order_are_split_as_by_lines(junk: bytes) -> None:
    assert split([junk]) == split([junk[i : i + 1] for i in range(len(junk))]) == reference(junk)


def test_c6_the_text_of_an_end_marker_ends_nothing_at_any_split() -> None:
    stream = b'data: {"text":"// data: [DONE]\\n\\ndata: {}"}\n\ndata: {"a":1}\r\n\r\ndata: [DONE]\n\n'
    expected = [
        b'{"text":"// data: [DONE]\\n\\ndata: {}"}',
        b'{"a":1}',
        b"[DONE]",
    ]
    for at in range(len(stream) + 1):
        assert [data for _, data in split([stream[:at], stream[at:]])] == expected


def test_many_events_in_one_read_and_one_event_alone() -> None:
    one = b'data: {"a":1}\n\n'
    assert split([one]) == [(one, b'{"a":1}')]
    assert split([one * 3]) == [(one, b'{"a":1}')] * 3
    assert split([one[:-1], b"\n" + one]) == [(one, b'{"a":1}')] * 2


@pytest.mark.parametrize(
    "stream",
    [
        b"data: a\n\ndata: bc\n\n",
        b"data: a\ndata: bc\n\ndata: d\n\n",
        b"data: a\r\n\ndata: b\n\n",
        b"data: ab\r\r\n\ndata: c\n\n",
        b"data: a\n\n" + BOM + b"data: b\n\n",
        b": a\ndata: bc\n\n",
    ],
)
def test_an_event_in_two_reads_is_the_one_that_it_is_in_one(stream: bytes) -> None:
    for cut in range(1, len(stream)):
        assert split([stream[:cut], stream[cut:]]) == reference(stream), cut


def test_a_comment_is_a_block_without_data() -> None:
    assert split([comment(b"keep-alive")]) == [(b": keep-alive\n\n", b"")]


@pytest.mark.parametrize("step", [1, 7, 64, 1000])
def test_the_limit_holds_whatever_the_fragmentation(step: int) -> None:
    event = b"data: " + b"x" * 92 + b"\n\n"
    assert len(event) == 100
    stream = event + event[:-2] + b"y\n\n"
    splitter = Splitter(100)
    with pytest.raises(EventTooLarge, match="100 bytes"):
        feed_all(splitter.feed, stream, step)
    assert len(split([event[i : i + step] for i in range(0, 100, step)], 100)) == 1


def test_an_endless_event_is_refused_before_it_ends() -> None:
    splitter = Splitter(1000)
    with pytest.raises(EventTooLarge):
        feed_all(splitter.feed, b"x" * 1100, 100)


def test_a_large_event_in_small_reads_costs_linear_work() -> None:
    """32 MiB in 64 KiB reads; each byte may be searched once or twice, never once a read (that would be 8 GiB)."""
    size, step = 32 << 20, 65536
    part = b"y" * step
    splitter = Splitter(size + 100)
    assert splitter.feed(b"data: ") == []
    for _ in range(size // step):
        assert splitter.feed(part) == []
    ((raw, data),) = splitter.feed(b"\n\n")
    assert raw == b""  # there is one copy of it
    assert data == part * (size // step)
    assert splitter.pending == 0


def test_one_copy_of_what_is_large() -> None:
    """G7: framed as engines frame it, its own bytes are known without them; in any other framing they are kept."""
    line = b"y" * LARGE
    usual = b"data: " + line + b"\n\n"
    others = [
        b"data:" + line + b"\n\n",
        b"data: " + line + b"\r\n\r\n",
        b"data: " + line + b"\n\r\n",
        b"data: " + line + b"\rz\n\n",
        b"data: " + line + b"\ndata: z\n\n",
        b"id: 1\ndata: " + line + b"\n\n",
        b": " + line + b"\n\n",
        usual[-LARGE + 7 :].replace(b"y", b"data: ", 1),
    ]
    for block in [usual, *others]:
        for step in (50_000, 1 << 18):
            splitter = Splitter(4 * LARGE)
            pieces = [block[at : at + step] for at in range(0, len(block), step)]
            [(raw, data)] = [event for piece in pieces for event in splitter.feed(piece)]
            assert raw == (b"" if block is usual else block)
            assert data == Splitter(4 * LARGE).feed(block)[0][1]
            assert splitter.pending == 0
