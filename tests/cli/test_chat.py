from __future__ import annotations

import io

import pytest
from rich.console import Console

from cli.fake_llm import TEXT, FakeLLM
from unmask.cli.chat import MINI, Conversation, talk, typed_lines
from unmask.config import SamplingParams
from unmask.errors import RequestError


@pytest.fixture
def conversation():
    console = Console(file=io.StringIO(), width=100, force_terminal=True, _environ={})
    return Conversation(FakeLLM(), SamplingParams(), console, system="Be brief.")


def roles(messages):
    return [message["role"] for message in messages]


def written(conversation):
    return conversation.console.file.getvalue()


def test_piped_lines_are_turns_of_one_conversation(unmask, llm):
    result = unmask("chat", "--system", "Be brief.", stdin=b"one\n\ntwo\n")
    assert (result.exit_code, result.stdout) == (0, (TEXT + "\n") * 2)
    assert result.stderr.strip() == MINI
    messages = llm.calls[1][1]["messages"]
    assert roles(messages) == ["system", "user", "assistant", "user"]
    assert [m["content"] for m in messages] == ["Be brief.", "one", TEXT, "two"]


@pytest.mark.usefixtures("llm")
def test_no_remark_about_another_model(unmask):
    assert unmask("chat", "-m", "dir", stdin=b"one\n").stderr == ""


def test_reset_and_exit_in_a_pipe(unmask, llm):
    result = unmask("chat", "-m", "dir", stdin=b"one\n/reset\ntwo\n/exit\nthree\n")
    assert result.exit_code == 0
    assert [roles(what["messages"]) for _, what, _ in llm.calls] == [["user"], ["user"]]
    assert result.stdout == (TEXT + "\n") * 2


def test_an_unknown_command_is_no_message(unmask, llm):
    result = unmask("chat", "-m", "dir", stdin=b"/help\n")
    assert "unknown command /help" in result.stderr
    assert llm.calls == []


def test_a_model_without_a_template(unmask, llm):
    llm.tokenizer.has_chat_template = False
    result = unmask("chat", stdin=b"one\n")
    assert result.exit_code == 2
    assert "no chat template" in result.stderr


@pytest.mark.usefixtures("llm")
def test_invalid_utf8_counts_from_the_start(unmask):
    result = unmask("chat", "-m", "dir", stdin=b"one\nt\xff\n")
    assert result.exit_code == 2
    assert "offset 5" in result.stderr


def test_an_error_in_a_pipe_ends_it(unmask, llm):
    llm.error = RequestError("too long")
    assert unmask("chat", "-m", "dir", stdin=b"one\ntwo\n").exit_code == 2
    assert len(llm.calls) == 1


def test_the_canvas_is_drawn_on_a_terminal(conversation):
    talk(conversation, iter(["one"]))
    assert "░" in written(conversation) or "∎" in written(conversation)
    assert "8 tokens · 4 passes" in written(conversation)
    assert roles(conversation.history) == ["system", "user", "assistant"]


@pytest.mark.parametrize(("method", "legend"), [("flash-verify", True), ("vanilla", False)])
def test_the_canvas_has_the_legend_of_the_method(conversation, method, legend):
    conversation.llm = FakeLLM(method=method, delay=0.06)
    talk(conversation, iter(["one"]))
    assert ("not recomputed" in written(conversation)) is legend


def test_without_the_canvas_the_settled_text_comes(conversation):
    conversation.show_canvas = False
    talk(conversation, iter(["one"]))
    assert "∎" not in written(conversation)
    assert "Done" in written(conversation)


@pytest.mark.parametrize("show_canvas", [True, False])
def test_ctrl_c_costs_one_turn(conversation, show_canvas):
    conversation.show_canvas = show_canvas
    conversation.llm.interrupt_after = 2
    talk(conversation, iter(["one"]))
    assert roles(conversation.history) == ["system"]
    assert "cancelled" in written(conversation)
    conversation.llm.interrupt_after = None
    talk(conversation, iter(["two"]))
    assert [m["content"] for m in conversation.history][1:] == ["two", TEXT]


def test_an_error_costs_one_turn(conversation, capsys):
    conversation.llm.error = RequestError("too long")
    talk(conversation, iter(["one", "/exit"]))
    assert roles(conversation.history) == ["system"]
    assert capsys.readouterr().err == "error: too long\n"


def test_ctrl_d_leaves_and_ctrl_c_drops_the_line(monkeypatch, conversation):
    answers = iter([KeyboardInterrupt(), "hello", EOFError()])

    def typed(_prompt):
        answer = next(answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr("builtins.input", typed)
    assert list(typed_lines(conversation.console)) == ["hello"]
