from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from cli.fake_llm import TEXT, FakeLLM
from unmask.cli import _engine, generate
from unmask.cli.generate import Job, animate
from unmask.config import SamplingParams
from unmask.errors import RequestError


def asked(llm):
    return [(name, what) for name, what, _ in llm.calls]


def as_user(text):
    return [{"role": "user", "content": text}]


def test_stdout_is_the_text_and_stderr_the_summary(unmask, llm):
    result = unmask("generate", "hello")
    assert (result.exit_code, result.stdout) == (0, TEXT + "\n")
    assert result.stderr.startswith("8 tokens · 4 passes · 2.00 tokens per pass")
    assert asked(llm) == [("chat", [as_user("hello")])]


def test_each_argument_is_a_request_of_one_batch(unmask, llm):
    result = unmask("generate", "a", "b", "--quiet")
    assert (result.stdout, result.stderr) == ((TEXT + "\n") * 2, "")
    assert asked(llm) == [("chat", [as_user("a"), as_user("b")])]


@pytest.mark.parametrize("template", [True, False])
def test_plain_text_when_raw_or_without_a_template(template, unmask, llm):
    llm.tokenizer.has_chat_template = template
    assert unmask("generate", "a", *(["--raw"] if template else [])).exit_code == 0
    assert asked(llm) == [("generate", ["a"])]


def test_a_pipe_is_one_prompt(unmask, llm):
    assert unmask("generate", stdin="zwei\nZeilen ü\n".encode()).exit_code == 0
    assert asked(llm) == [("chat", [as_user("zwei\nZeilen ü")])]


@pytest.mark.parametrize(
    ("stdin", "message"),
    [
        (b"ab\xffc", "byte 0xff at offset 2"),
        ("ü".encode()[:1], "byte 0xc3 at offset 0"),
        (b"", "the prompt on stdin is empty"),
        (b" \n", "the prompt on stdin is empty"),
    ],
)
def test_stdin_that_is_no_prompt(stdin, message, unmask, llm):
    result = unmask("generate", stdin=stdin)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert llm.calls == []


@pytest.mark.usefixtures("llm")
def test_an_empty_argument_is_told(unmask):
    assert "prompt 2 is empty" in unmask("generate", "a", "").stderr


def test_no_prompt_on_a_terminal(stdin):
    stdin(tty=True)
    with pytest.raises(ValueError, match="no prompt"):
        generate.read_prompts([])


def test_an_argument_that_is_no_text():
    with pytest.raises(ValueError, match="prompt 1 is not UTF-8 at character 1"):
        generate.read_prompts(["a\udcff"])


@pytest.mark.usefixtures("llm")
def test_json_is_one_object_a_line_and_nothing_else(unmask):
    result = unmask("generate", "a", "四", "--json", "--n", "2")
    first, second = map(json.loads, result.stdout.splitlines())
    assert (first["prompt"], second["prompt"]) == ("a", "四")
    assert [answer["text"] for answer in first["outputs"]] == [TEXT, TEXT]
    assert first["tokens_per_pass"] == 2.0
    assert result.stderr == ""


def test_json_stays_ascii_where_stdout_is(monkeypatch, capsys, llm):
    monkeypatch.setattr(generate, "_stdout_is_unicode", lambda: False)
    generate.print_json(Job(llm, SamplingParams(), False, False, None), ["四"])
    assert "\\u56db" in capsys.readouterr().out


def test_infill_with_and_without_a_question(unmask, llm):
    assert unmask("generate", "--infill", "It is [[3]].").exit_code == 0
    assert unmask("generate", "--infill", "It is [[3]].", "--question", "What?").exit_code == 0
    assert asked(llm) == [("infill", ("It is [[3]].", None)), ("infill", ("It is [[3]].", as_user("What?")))]


@pytest.mark.usefixtures("llm")
def test_a_question_needs_infill(unmask):
    assert unmask("generate", "a", "--question", "b").exit_code == 2


def test_what_the_engine_is_asked_for(unmask, llm):
    assert unmask("generate", "a", "-m", "dir", "--method", "vanilla", "--dtype", "bfloat16").exit_code == 0
    assert llm.options["model"] == "dir"
    assert llm.options["method"] == "vanilla"
    assert llm.options["dtype"] == "bfloat16"
    assert "max_num_seqs" not in llm.options


def test_an_unknown_method_is_told_before_anything_is_loaded(unmask, llm):
    result = unmask("generate", "a", "--method", "vanila")
    assert (result.exit_code, result.stderr) == (2, "error: method 'vanila' is unknown; did you mean 'vanilla'?\n")
    assert not hasattr(llm, "options")


@pytest.mark.parametrize("verb", ["generate x", "chat"])
def test_an_unknown_quantization_is_told_before_anything_is_loaded(verb, unmask, llm):
    result = unmask(*verb.split(), "--quantization", "fp9")
    assert (result.exit_code, result.stderr) == (2, "error: quantization 'fp9' is unknown; did you mean 'fp8'?\n")
    assert not hasattr(llm, "options")


@pytest.mark.parametrize("verb", ["generate x", "chat", "train tiny --out run"])
def test_an_unknown_device_is_told(verb, unmask, llm):
    result = unmask(*verb.split(), "--device", "gpu")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: device 'gpu' is unknown")
    assert not hasattr(llm, "options")


def test_a_missing_gpu_is_told(monkeypatch, unmask):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = unmask("generate", "x", "--device", "cuda:1")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: device 'cuda:1': torch sees no CUDA GPU")


def test_the_whole_way_with_a_real_engine(unmask):
    model = Path(__file__).parents[1] / "data" / "golden" / "models" / "tiny-llada"
    result = unmask("generate", "x", "-m", str(model), "--device", "cpu")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "tokenizer" in result.stderr  # loaded, and honest about what it lacks


def test_a_method_that_does_not_suit_the_weights_needs_a_flag(unmask):
    question = "Ann has 3 pens and buys 4 more. How many pens does she have?"
    command = ["generate", question, "--method", "d2f", "--max-tokens", "8", "--device", "cpu", "-q"]
    refused = unmask(*command)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: method 'd2f' has block-causal attention")
    assert refused.stderr.endswith("--allow-attention-mismatch\n")
    assert refused.stderr.count("\n") == 1
    allowed = unmask(*command, "--allow-attention-mismatch")
    assert (allowed.exit_code, allowed.stderr) == (0, "")
    assert allowed.stdout.strip()


def test_a_pool_that_is_too_small_is_told(unmask):
    result = unmask("generate", "x", "--device", "cpu", "--kv-cache-memory-bytes", "1000000")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "raise kv_cache_memory_bytes" in result.stderr


def test_an_option_that_the_method_does_not_read_is_told(unmask):
    result = unmask("generate", "x", "--device", "cpu", "--method", "confidence", "--gamma", "0.5")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: method 'confidence' does not read gamma; methods that do: flash-verify")


def test_an_error_of_the_engine_is_one_line(unmask, llm):
    llm.error = RequestError("too long:\nby 3")
    result = unmask("generate", "a", "--json")
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", "error: too long: by 3\n")


def test_the_traceback_on_request(unmask, llm):
    llm.error = RequestError("too long")
    result = unmask("generate", "a", UNMASK_DEBUG="1")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr


def test_ctrl_c_is_one_line(unmask, llm):
    llm.error = KeyboardInterrupt()
    result = unmask("generate", "a")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "interrupted\n")


def test_live_prompts_come_one_after_another(capsys):
    console = Console(file=sys.stdout, force_terminal=True, width=80, _environ={})
    animate(Job(FakeLLM(), SamplingParams(n=2), False, False, None), ["first", "second"], console, 0.0)
    drawn = capsys.readouterr().out
    assert drawn.count("Done") >= 4
    assert drawn.index("first") < drawn.index("second")
    assert drawn.count("16 tokens · 8 passes · 2.00 tokens per pass") >= 2


@pytest.mark.parametrize(("method", "legend"), [("d2f", True), ("flash-cache", True), ("confidence", False)])
def test_the_legend_is_there_for_methods_that_need_it(method, legend, capsys):
    console = Console(file=sys.stdout, force_terminal=True, width=80, _environ={})
    animate(Job(FakeLLM(method=method), SamplingParams(), False, False, None), ["first"], console, 0.01)
    drawn = capsys.readouterr().out
    assert ("recomputed" in drawn) is legend
    assert ("sealing" in drawn) is (method == "d2f")


def test_stop_ids_end_the_picture_unless_eos_is_ignored():
    llm = FakeLLM()
    assert _engine.end_ids(llm, SamplingParams(stop_token_ids=(4,))) == {9, 4}
    assert _engine.end_ids(llm, SamplingParams(ignore_eos=True)) == frozenset()
