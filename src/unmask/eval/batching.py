"""Does company change an answer? Requests alone against the same requests in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unmask.config import SamplingParams
from unmask.engine.llm import LLM
from unmask.engine.outputs import CommitEvent, CompletionOutput
from unmask.eval.word_problems import held_out

Settings = tuple[dict[str, Any], ...]
SETTINGS: dict[str, Settings] = {
    "confidence": (
        {},
        {"threshold": 0.8, "block_length": 16},
        {"threshold": 0.99, "block_length": 0},
        {"factor": 1.0},
        {"entropy_bound": 0.2, "block_length": 16},
        {"steps": 16, "block_length": 32},
        {"threshold": 0.9, "temperature": 0.7, "top_p": 0.95},
        {"threshold": 0.9, "cfg_scale": 0.5},
        {"steps": 24, "block_length": 0, "remasking": "random"},
        {"steps": 12, "alg": "topk_margin", "alg_temp": 0.1, "block_length": 64},
    ),
    "fast-dllm-dual": (
        {},
        {"threshold": 0.8, "block_length": 16, "refresh_interval": 3},
        {"factor": 1.0, "cfg_scale": 0.5},
        {"steps": 16, "block_length": 32},
    ),
    "flash-verify": (
        {},
        {"threshold": 0.8, "refresh_window": 32, "track": 16, "search": 4},
        {"gamma": 0.5, "accept": "product", "isolation": "reference"},
        {"threshold": 0.9, "temperature": 0.7, "top_p": 0.95, "refresh_interval": 4},
    ),
    "d2f": (
        {},
        {"block_length": 16, "tau_add": 0.5, "pipeline_depth": 2},
        {"tau_act": 0.5, "threshold": 0.7, "early_stop": False},
        {"cfg_scale": 0.5, "block_length": 24},
    ),
}
"""By method: every part of the rule, every policy's and drafter's fields, one request after the other."""


def share(method: str, num_requests: int) -> int:
    """How many of all requests are this method's: in proportion to its settings."""
    return -(-num_requests * len(SETTINGS[method]) // sum(map(len, SETTINGS.values())))


@dataclass(frozen=True)
class Difference:
    """A request whose answer depends on its company, and where the two runs part."""

    method: str
    request: int
    setting: dict[str, Any]
    num_pass: int
    """The first pass whose commits differ."""
    alone: dict[int, tuple[int, float]]
    """That pass's commits: position -> token and probability. Two runs may part where a decision was a tie to the last
    bits of a matrix product; the probabilities show whether it was."""
    together: dict[int, tuple[int, float]]


def mixed_requests(
    settings: Settings, num_requests: int, seed: int = 5
) -> tuple[list[list[dict[str, str]]], list[SamplingParams]]:
    """Conversations of unequal lengths, each with its own setting and seed; every eighth has three problems."""
    problems = held_out(num_requests, seed=seed)
    longer = held_out(num_requests // 8 + 1, seed=seed + 1, per_request=3)
    conversations, params = [], []
    for number, problem in enumerate(problems):
        question = longer[number // 8]["question"] if number % 8 == 7 else problem["question"]
        conversations.append([{"role": "user", "content": question}])
        max_tokens = 64 + 16 * (number % 5)
        setting = settings[number % len(settings)]
        params.append(SamplingParams(max_tokens=max_tokens, seed=number, trajectory=True, **setting))
    return conversations, params


def differences(llm_alone: LLM, llm_batched: LLM, num_requests: int) -> list[Difference]:
    """Requests whose tokens, passes or commit order differ between the two engines, which run the same method."""
    method = llm_alone.method.name
    conversations, params = mixed_requests(SETTINGS[method], num_requests)
    together = [result.outputs[0] for result in llm_batched.chat(conversations, params)]
    found = []
    for number, (conversation, said) in enumerate(zip(conversations, params)):
        alone = llm_alone.chat(conversation, said)[0].outputs[0]
        if _facts(alone) != _facts(together[number]):
            found.append(_difference(method, number, alone, together[number]))
    return found


def _facts(output: CompletionOutput) -> tuple[Any, ...]:
    order = [(event.position, event.num_pass) for event in output.trajectory or ()]
    return output.token_ids, output.num_forward_passes, output.finish_reason, order


def _difference(method: str, number: int, alone: CompletionOutput, together: CompletionOutput) -> Difference:
    num_passes = max(alone.num_forward_passes, together.num_forward_passes)
    for num_pass in range(1, num_passes + 1):
        a, b = (_commits(output.trajectory or (), num_pass) for output in (alone, together))
        if _tokens(a) != _tokens(b):
            break
    return Difference(method, number, SETTINGS[method][number % len(SETTINGS[method])], num_pass, a, b)


def _tokens(commits: dict[int, tuple[int, float]]) -> dict[int, int]:
    return {place: token for place, (token, _) in commits.items()}


def _commits(trajectory: Sequence[CommitEvent], num_pass: int) -> dict[int, tuple[int, float]]:
    return {e.position: (e.token_id, e.probability) for e in trajectory if e.num_pass == num_pass}
