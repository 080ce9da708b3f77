"""Streams: deltas are settled text that is never taken back and join to the final text, whatever the order of commits;
stop strings and characters may be split over tokens; the canvas is consistent; closing early frees the engine."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from decoding.helpers import engine
from stubs import EOS, MASK, Script, Stub, TableTokenizer, View
from unmask import LLM, RequestOutput, SamplingParams

PROMPT = {"prompt_token_ids": [1, 2, 3]}
LETTERS = TableTokenizer({i: bytes([97 + i]) for i in range(26)} | {26: b" ", 27: b"\xc3", 28: b"\xa9"})


def scripted(pieces: Sequence[bytes], probabilities: Sequence[float] | None = None, end: bool = False) -> LLM:
    """An engine whose answer to PROMPT spells `pieces`, one token each; then an end of text, if asked for."""
    return scripted_stub(pieces, probabilities, end)[0]


def scripted_stub(
    pieces: Sequence[bytes], probabilities: Sequence[float] | None = None, end: bool = False
) -> tuple[LLM, Stub]:
    """The same with the stub, whose log shows every pass."""
    tokens = [*range(10, 10 + len(pieces)), *([EOS] if end else [])]
    surest = probabilities or [0.95 - 0.001 * i for i in range(len(tokens))]

    def script(view: View) -> Mapping[int, float]:
        place = view.position - 3
        return {tokens[place]: surest[place]} if 0 <= place < len(tokens) else {0: 0.1}

    stub = Stub(script)
    return engine(stub, tokenizer=TableTokenizer({0: b"?"} | {10 + i: p for i, p in enumerate(pieces)})), stub


def pull(
    llm: LLM, params: SamplingParams, canvas: bool = False, prompt: Any = PROMPT
) -> tuple[list[Any], RequestOutput]:
    """All chunks and the result; what holds for every stream is checked here."""
    chunks = list(llm.stream(prompt, params, canvas=canvas))
    assert [chunk.finished for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    output = chunks[-1].output
    assert output is not None
    answer = output.outputs[0]
    assert "".join(chunk.delta for chunk in chunks) == answer.text
    passes = [chunk.num_passes for chunk in chunks]
    assert passes == sorted(passes)
    assert passes[-1] == answer.num_forward_passes
    whole = llm.generate([prompt], params)[0].outputs[0]
    assert (answer.text, answer.token_ids) == (whole.text, whole.token_ids)
    assert (answer.finish_reason, answer.stop_reason) == (whole.finish_reason, whole.stop_reason)
    return chunks, output


def deltas(chunks: Sequence[Any]) -> list[str]:
    return [chunk.delta for chunk in chunks if chunk.delta]


def each(n: int, **said: Any) -> SamplingParams:
    """One token a pass."""
    return SamplingParams(**{"max_tokens": n, "steps": n, "block_length": 0} | said)


def test_one_token_a_chunk() -> None:
    chunks, output = pull(scripted([b"ab", b" cd", b"e"]), each(3))
    assert deltas(chunks) == ["ab", " cd", "e"]
    assert output.outputs[0].text == "ab cde"
    assert [token for chunk in chunks for token in chunk.token_ids] == output.outputs[0].token_ids


def test_only_the_settled_prefix_is_sent() -> None:
    """The second position is surest, then the third; nothing is sent until the first is decided."""
    chunks, _ = pull(scripted([b"a", b"b", b"c", b"d"], [0.5, 0.9, 0.8, 0.4]), each(4))
    assert deltas(chunks) == ["abc", "d"]
    sent = next(chunk for chunk in chunks if chunk.delta)
    assert sent.num_passes == 3


@pytest.mark.parametrize("seed", range(6))
def test_random_orders_join(seed: int) -> None:
    """Any commit order, any block length, text with characters of two bytes."""
    generator = random.Random(seed)
    raw = "aé bc éé d".encode()
    surest = [generator.uniform(0.2, 0.95) for _ in raw]
    llm = scripted([bytes([b]) for b in raw], surest)
    for block_length in (0, 1, 3, 5):
        params = SamplingParams(max_tokens=len(raw), threshold=0.6, block_length=block_length)
        chunks, output = pull(llm, params)
        assert output.outputs[0].text == raw.decode()
        assert all("\ufffd" not in chunk.delta for chunk in chunks)


def test_end_of_text_ends_the_stream() -> None:
    """The end is the surest token: what is before it still comes, what is behind it never does."""
    llm = scripted([b"a", b"b", b"c"], [0.6, 0.5, 0.4, 0.95], end=True)
    chunks, output = pull(llm, each(8))
    assert output.outputs[0].text == "abc"
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].num_forward_passes == 4
    assert deltas(chunks) == ["a", "b", "c"]


# --- B30: stop strings


def test_b30_stop_string_over_three_tokens() -> None:
    chunks, output = pull(scripted([b"ab", b"c<", b"EN", b"D>", b"xyz"]), each(5, stop=["<END>"]))
    assert "".join(deltas(chunks)) == "abc"
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "<END>")
    assert output.outputs[0].num_forward_passes == 4, "nothing is decoded after the stop string"


def test_b30_near_miss_is_delivered() -> None:
    chunks, output = pull(scripted([b"ab", b"c<", b"EN", b"X", b"xyz"]), each(5, stop=["<END>"]))
    assert "".join(deltas(chunks)) == "abc<ENXxyz"
    assert output.outputs[0].finish_reason == "length"


def test_b30_held_tail_is_delivered_at_the_end() -> None:
    for end in (False, True):
        chunks, output = pull(scripted([b"ab", b"c<", b"EN"], end=end), each(3 + end, stop=["<END>"]))
        assert "".join(deltas(chunks)) == "abc<EN"
        assert output.outputs[0].finish_reason == ("stop" if end else "length")


def test_b30_the_earliest_of_two_stops_wins() -> None:
    pieces = [b"ab", b"cde", b"fgh"]
    for stop in (["de", "cd"], ["cd", "de"], ["efg", "cd"]):
        _, output = pull(scripted(pieces), each(3, stop=stop))
        assert output.outputs[0].text == "ab"
        assert output.outputs[0].stop_reason == "cd"


def test_b30_stop_inside_text_that_settles_at_once() -> None:
    """The leftmost token comes last, so the whole text settles in one pass."""
    _, output = pull(scripted([b"ab", b"c<", b"EN", b"D>", b"xyz"], [0.1, 0.5, 0.6, 0.7, 0.8]), each(5, stop="<END>"))
    assert output.outputs[0].text == "abc"
    assert output.outputs[0].stop_reason == "<END>"


def test_b40_a_plain_string_is_a_list_of_one() -> None:
    llm = scripted([b"ab", b"c", b"d"])
    assert pull(llm, each(3, stop="c"))[1].outputs == pull(llm, each(3, stop=["c"]))[1].outputs


def test_the_stop_string_in_the_prompt_means_nothing() -> None:
    llm = scripted([b"ab", b"cd"])
    prompt = {"prompt_token_ids": [11, 11, 11]}
    assert pull(llm, each(2, stop="cdcd"), prompt=prompt)[1].outputs[0].text == "abcd"


# --- B32: characters over tokens


@pytest.mark.parametrize("block_length", [0, 1, 2, 3])
def test_b32_an_emoji_over_four_tokens(block_length: int) -> None:
    raw = "a😀b".encode()
    llm = scripted([bytes([b]) for b in raw])
    params = SamplingParams(max_tokens=6, steps=6, block_length=block_length)
    chunks, output = pull(llm, params)
    assert deltas(chunks) == ["a", "😀", "b"]
    assert output.outputs[0].text == "a😀b"


def test_b32_cut_inside_a_character() -> None:
    """The canvas ends inside it: at most one replacement character, and the same as without a stream."""
    raw = "a😀".encode()
    chunks, output = pull(scripted([bytes([b]) for b in raw]), each(3))
    text = "".join(deltas(chunks))
    assert text.startswith("a")
    assert text.count("\ufffd") <= 1
    assert text == output.outputs[0].text


def test_b32_a_stop_string_of_two_byte_characters() -> None:
    raw = "aéb".encode()
    chunks, _ = pull(scripted([bytes([b]) for b in raw]), each(4, stop="é"))
    assert deltas(chunks) == ["a"]


def test_b32_leading_spaces_stay() -> None:
    chunks, _ = pull(scripted([b" a", b" ", b"b "]), each(3))
    assert "".join(deltas(chunks)) == " a b "


# --- the canvas


def test_canvas_of_every_pass() -> None:
    surest = [0.5, 0.9, 0.3, 0.8]
    chunks, output = pull(scripted([b"a", b"b", b"c", b"d"], surest), each(4, trajectory=True), canvas=True)
    answer = output.outputs[0]
    assert [chunk.num_passes for chunk in chunks if chunk.canvas is not None][:4] == [1, 2, 3, 4]
    fate = {event.position: event for event in answer.trajectory or []}
    assert [fate[i].num_pass for i in range(4)] == [3, 1, 4, 2]
    for chunk in chunks:
        assert len(chunk.canvas) == 4
        for place, cell in enumerate(chunk.canvas):
            if fate[place].num_pass > chunk.num_passes:
                assert (cell.token_id, cell.probability, cell.num_pass) == (None, None, None)
            else:
                assert (cell.token_id, cell.num_pass) == (10 + place, fate[place].num_pass)
                assert cell.probability == pytest.approx(surest[place], abs=1e-4)
                assert cell.text == "abcd"[place]


def test_canvas_ends_with_the_text() -> None:
    """Cells behind an end of text are gone or undecided; none shows a token that is not returned."""
    llm = scripted([b"a", b"b", b"c"], [0.6, 0.5, 0.4, 0.95], end=True)
    chunks, output = pull(llm, each(8), canvas=True)
    last = [cell.token_id for cell in chunks[-1].canvas if cell.token_id not in (None, EOS)]
    assert last == output.outputs[0].token_ids


def test_no_canvas_unless_asked_for() -> None:
    chunks, _ = pull(scripted([b"a", b"b"]), each(2))
    assert all(chunk.canvas is None for chunk in chunks)


def test_b34_several_answers_at_once() -> None:
    """Each chunk belongs to one answer; joined by index they are the answers of the call without a stream."""

    def script(_: View) -> Mapping[int, float]:
        return dict.fromkeys(range(26), 1 / 26)

    llm = engine(Stub(script), tokenizer=LETTERS)
    params = SamplingParams(max_tokens=6, steps=6, temperature=1.0, seed=2, n=3)
    chunks = list(llm.stream(PROMPT, params))
    whole = llm.generate([PROMPT], params)[0]
    assert len({answer.text for answer in whole.outputs}) == 3
    for answer in whole.outputs:
        assert "".join(chunk.delta for chunk in chunks if chunk.index == answer.index) == answer.text
    assert [chunk.finished for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].output.outputs == whole.outputs


def test_stop_strings_of_one_answer_spare_the_others() -> None:
    def script(_: View) -> Mapping[int, float]:
        return dict.fromkeys(range(26), 1 / 26)

    llm = engine(Stub(script), tokenizer=LETTERS)
    said = {"max_tokens": 12, "steps": 12, "temperature": 1.0, "seed": 2, "n": 4}
    free = llm.generate([PROMPT], SamplingParams(**said))[0].outputs
    letter = next(text for text in free[0].text if sum(text in other.text for other in free) < 4)
    for answer, plain in zip(llm.generate([PROMPT], SamplingParams(stop=letter, **said))[0].outputs, free):
        assert answer.text == plain.text.split(letter)[0]
        assert answer.finish_reason == ("stop" if letter in plain.text else "length")


# --- life of a stream


def test_closing_early_frees_the_engine() -> None:
    llm, stub = scripted_stub([b"a"] * 20)
    baseline = llm.generate([PROMPT], each(20))[0].outputs[0]
    for _ in range(40):  # more streams than there are seats
        stream = llm.stream(PROMPT, each(20))
        next(stream)
        stream.close()
    stub.calls.clear()
    assert llm.generate([PROMPT], each(20))[0].outputs[0] == baseline
    assert [call.num_rows for call in stub.calls] == [23] * 20, "abandoned requests still run"


def test_an_unread_stream_costs_nothing() -> None:
    llm, stub = scripted_stub([b"a"] * 4)
    stream = llm.stream(PROMPT, each(4))
    stream.close()
    stub.calls.clear()
    llm.generate([PROMPT], each(4))
    assert [call.num_rows for call in stub.calls] == [7] * 4


def test_a_stream_and_a_batch_at_once() -> None:
    """A batch may run while a stream is half read."""
    llm = scripted([b"a", b"b", b"c", b"d"])
    stream = llm.stream(PROMPT, each(4))
    first = next(stream)
    assert llm.generate([PROMPT], each(4))[0].outputs[0].text == "abcd"
    assert first.delta + "".join(chunk.delta for chunk in stream) == "abcd"


def test_special_tokens_in_the_text() -> None:
    def script(view: View) -> Mapping[int, float]:
        return {EOS if view.position == 4 else 0: 0.9}

    llm = engine(Stub(script), tokenizer=LETTERS)
    kept = SamplingParams(max_tokens=3, steps=3, ignore_eos=True, skip_special_tokens=False)
    assert pull(llm, kept)[1].outputs[0].text == "a<eos>a"
    assert pull(llm, kept.replace(skip_special_tokens=True))[1].outputs[0].text == "aa"


def test_ids_the_tokenizer_does_not_know_are_never_predicted() -> None:
    script: Script = lambda _: {40: 0.6, MASK: 0.2, 5: 0.1}  # noqa: E731
    llm = engine(Stub(script), tokenizer=TableTokenizer({5: b"f"}, unknown=[40]))
    for temperature in (0.0, 1.0):
        output = llm.generate(
            [PROMPT], SamplingParams(max_tokens=8, threshold=0.9, temperature=temperature, seed=1, trajectory=True)
        )[0].outputs[0]
        assert not {40, MASK} & set(output.token_ids)
    greedy = llm.generate([PROMPT], SamplingParams(max_tokens=2, threshold=0.9, trajectory=True))[0].outputs[0]
    assert greedy.text == "ff"
    # they stay in the denominator
    assert greedy.trajectory[0].probability == pytest.approx(0.1, abs=1e-4)


def test_text_prompts() -> None:
    llm = engine(Stub(lambda view: {view.canvas[0]: 0.9}), tokenizer=LETTERS)
    output = llm.generate("cab", SamplingParams(max_tokens=2, steps=1))
    output = output[0] if isinstance(output, list) else output
    assert output.prompt == "cab"
    assert output.prompt_token_ids == [2, 0, 1]
    assert output.outputs[0].text == "cc"
