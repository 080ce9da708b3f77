"""Continuous batching under a made-up load: requests of all kinds arrive, wait, run and are cancelled at any step, and
every answer that came out is compared with the same request alone.

Networks of random weights in float64: two runs of one request agree to the last decision unless the engine mixes
requests up, reads what it should not, or forgets something between steps. In float32 on a GPU the crowd runs captured
steps and kernels and the request alone neither: now and then a decision is as close as the two differ in rounding.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unmask.config import SamplingParams
from unmask.engine.axes import Axes
from unmask.engine.graphs import FixedSteps
from unmask.engine.llm import LLM
from unmask.engine.memory import bytes_for
from unmask.engine.outputs import CompletionOutput
from unmask.engine.request import Answer
from unmask.methods import METHODS
from unmask.models.config import ModelConfig
from unmask.models.transformer import Transformer

VOCAB, MASK = 96, 95
NUM_PAGES = 32  # of 16 positions: three of the longest canvases and a half, or about eight ordinary ones
NUM_ROWS = 192
"""Of a pass, on average, and for what all seats but two try ahead: so few that refreshes wait."""
NETWORKS: dict[str, dict[str, Any]] = {
    "llada": {"num_kv_heads": 4, "logit_shift": 0},
    "llada-gqa": {"num_kv_heads": 2, "logit_shift": 0},
    "dream": {"num_kv_heads": 2, "logit_shift": 1, "family": "dream", "qkv_bias": True},
}
SERVED: tuple[tuple[str, str], ...] = (
    ("confidence", "llada"),
    ("window", "llada-gqa"),
    ("dream", "dream"),
    ("fast-dllm-prefix", "llada"),
    ("fast-dllm-prefix", "dream"),
    ("fast-dllm-dual", "llada-gqa"),
    ("fast-dllm-dual", "dream"),
    ("flash-cache", "llada"),
    ("flash-cache", "dream"),
    ("flash-verify", "llada-gqa"),
    ("flash-verify-reference", "llada"),
    ("flash-verify-uncached", "llada"),
    ("one-pass", "llada-gqa"),
    ("one-pass-cache", "llada"),
    ("one-pass-cache", "dream"),
    ("dkv-cache", "llada"),
    ("dkv-cache", "dream"),
    ("dllm-cache", "llada"),
    ("dllm-cache", "dream"),
    ("spa-cache", "llada-gqa"),
    ("spa-cache", "dream"),
    ("elastic-cache", "llada"),
    ("elastic-cache", "llada-gqa"),
    ("freedave", "llada"),
    ("freedave", "llada-gqa"),
    ("freedave", "dream"),
    ("d2f", "llada"),
    ("d2f", "dream"),
    ("d2f-uncached", "llada-gqa"),
)
"""Methods, and the network each is served with."""


@dataclass(frozen=True)
class Way:
    """How the crowd is run; the request alone runs eagerly and in plain torch."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float64
    fixed: bool = False
    """Ordinary passes in fixed shape: captured on a GPU, elsewhere the same program launched as it is."""
    head_dim: int = 12
    """16 is a size that kernels take."""

    @property
    def options(self) -> dict[str, Any]:
        return {"device": self.device, "enforce_eager": not self.fixed}


PLAIN = Way()


def network(name: str, seed: int = 0, way: Way = PLAIN) -> Transformer:
    """A small network of random weights, sharp enough that thresholds are met now and then."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 4 * way.head_dim,
        "num_layers": 3,
        "num_heads": 4,
        "head_dim": way.head_dim,
    }
    facts: dict[str, Any] = {
        "family": "llada",
        "intermediate_size": 96,
        "rope_theta": 10000.0,
        "norm_eps": 1e-6,
        "qkv_bias": False,
        "tie_embeddings": False,
        "max_positions": 256,
        "mask_token_id": MASK,
        "eos_token_ids": (94,),
        "pad_token_id": 94,
        "bos_token_id": None,
    }
    model = Transformer(ModelConfig(**sizes | facts | NETWORKS[name]), dtype=torch.float64)
    model.init_weights(std=0.35, generator=torch.Generator().manual_seed(seed))
    return model.to(way.device, way.dtype).eval()


@dataclass(frozen=True)
class Asked:
    """One request of the load."""

    prompt: list[int]
    params: SamplingParams
    arrives: int
    """Engine step from which on it is queued."""
    cancelled: int | None
    """Steps after its arrival at which its caller leaves, if it is still there; None: stays."""


def load(method: str, count: int, seed: int) -> list[Asked]:
    """Requests of mixed lengths, rules and patience. Some share a prompt, as chats with one system prompt do."""
    r = random.Random(f"{method} {seed}")
    shared = [_prompt(r) for _ in range(3)]
    out, now = [], 0
    for number in range(count):
        now += r.choice((0, 0, 0, 1, 2, 5))
        prompt = r.choice(shared) if r.random() < 0.25 else _prompt(r)
        cancelled = r.randrange(12) if r.random() < 0.15 else None
        out.append(Asked(prompt, SamplingParams(seed=number, trajectory=True, **_said(method, r)), now, cancelled))
    return out


def _prompt(r: random.Random) -> list[int]:
    return [r.randrange(94) for _ in range(r.choice((1, 3, r.randint(1, 80), r.randint(1, 40))))]


def _said(method: str, r: random.Random) -> dict[str, Any]:
    """Everything that a request of this method may say, at random."""
    row = METHODS[method]
    said: dict[str, Any] = {"max_tokens": r.choice((1, 7, r.randint(1, 64), r.randint(8, 32)))}
    said |= r.choice(({"threshold": r.choice((0.2, 0.5, 0.9))}, {"factor": 1.0}, {"threshold": 0.3}))
    if r.random() < 0.25:
        said |= {"temperature": 0.8, "top_p": 0.9}
    if r.random() < 0.5:
        said |= {"stop_token_ids": (r.randrange(94),), "ignore_eos": r.random() < 0.5}
    if row.kinds[2] == "none" and row.kinds[1] != "elastic" and r.random() < 0.2:
        said["cfg_scale"] = 0.7
    choices: dict[str, Sequence[Any]] = {
        "block_length": (0, 4, 7, 16),
        "decode_window": (3, 8, 16),
        "refresh_interval": (1, 3, 5),
        "answer_interval": (1, 2, 4),
        "refresh_window": (4, 12, 64),
        "track": (0, 3, 16, 64),
        "drift_threshold": (0.5, 0.9, 0.99),
        "search": (1, 4, 8),
        "gamma": (0.0, 0.2, 0.8),
        "accept": ("agreement", "product"),
        "isolation": ("strict", "reference"),
        "tau_add": (0.0, 0.1, 0.7),
        "tau_act": (0.3, 0.95, 1.0),
        "pipeline_depth": (1, 2, 4),
        "early_stop": (True, False),
    }
    said |= {name: r.choice(values) for name, values in choices.items() if name in row.reads and r.random() < 0.6}
    if row.kinds[2] == "nested":  # proved by what takes one token a pass: no other rule, and blocks within its width
        said = {name: said[name] for name in ("max_tokens", "stop_token_ids", "ignore_eos") if name in said}
        said["block_length"] = r.choice((4, 7, 16))
    return said


def engine(method: str, network_name: str, seats: int, way: Way = PLAIN, **more: Any) -> LLM:
    """An engine that serves a method's load."""
    settings = {"tokenizer": None, "max_num_seqs": seats, "allow_attention_mismatch": True}
    llm = LLM(network(network_name, way=way), method=method, **settings | way.options | more)
    if way.fixed and llm.engine.fixed is None and llm.engine.axes.static:
        llm.engine.fixed = FixedSteps(llm.engine.step_program, capture=lambda step: step)
    return llm


def _rows_ahead(method: str, network_name: str, way: Way) -> int:
    """Rows of a seat for what is tried ahead: beside the canvas's, or in a pass of its own."""
    axes = Axes.of(METHODS[method], network(network_name, way=way).config)
    return max(axes.drafter.num_second, axes.rows_beside)


def _pool_bytes(method: str, network_name: str, seats: int, way: Way) -> int:
    """Memory of `NUM_PAGES`, the trash page, and the seats' scratch entries."""
    model = network(network_name, way=way)
    return bytes_for(model, Axes.of(METHODS[method], model.config), num_pages=NUM_PAGES, num_seats=seats)


def answers(llm: LLM, asked: Asked) -> list[Answer]:
    """A request as the engine takes it."""
    return llm.prompts.request({"prompt_token_ids": asked.prompt}, asked.params).answers


def together(llm: LLM, requests: Sequence[Asked]) -> Iterator[tuple[int, CompletionOutput | None]]:
    """Outcome of every request: its answer, None where its caller left before."""
    waiting = list(enumerate(requests))
    inside: dict[int, Answer] = {}
    step = 0
    while waiting or inside:
        while waiting and waiting[0][1].arrives <= step:
            number, asked = waiting.pop(0)
            (inside[number],) = answers(llm, asked)
            llm.engine.add(inside[number])
        for number, answer in list(inside.items()):
            asked = requests[number]
            if asked.cancelled is not None and step >= asked.arrives + asked.cancelled:
                llm.engine.abort(answer)
                yield number, inside.pop(number).output
        llm.engine.step()
        for number, answer in list(inside.items()):
            if answer.error is not None:
                raise answer.error
            if answer.output is not None:
                yield number, inside.pop(number).output
        step += 1


def alone(llm: LLM, asked: Asked) -> CompletionOutput:
    """The same request with nobody beside it."""
    return llm.generate({"prompt_token_ids": asked.prompt}, asked.params)[0].outputs[0]


@dataclass(frozen=True)
class Outcome:
    """What a load showed."""

    method: str
    network: str
    num_requests: int
    num_cancelled: int
    num_passes: int
    num_waits: int
    """Times that a seat stood still because its refresh waited for rows."""
    most_seats: int
    """Seats taken at the same time."""
    different: list[int]
    """Requests whose answer is not the one they get alone."""
    lost_pages: int
    """Pages that nobody gave back."""
    num_host_waits: int
    """Times that the host waited for a GPU while it gave somebody a seat: then nothing is queued behind a pass."""


def compare(method: str, network_name: str, count: int, *, seed: int = 0, seats: int = 8, way: Way = PLAIN) -> Outcome:
    """Run a load, then each of its requests alone. A small row budget makes refreshes wait, a small pool admissions."""
    llm = engine(
        method,
        network_name,
        seats,
        way,
        max_num_batched_tokens=NUM_ROWS + (seats - 2) * _rows_ahead(method, network_name, way),
        kv_cache_memory_bytes=_pool_bytes(method, network_name, seats, way),
    )
    counts = {"waits": 0, "most": 0, "host": 0}
    who_waits = llm.engine._who_waits

    def counted(look: Any) -> list[Answer]:
        waits = who_waits(look)
        counts["waits"] += len(waits)
        return waits

    seat = llm.engine._seat

    def seated(answer: Answer) -> None:
        with host_waits() as waited:
            seat(answer)
        counts["host"] += len(waited)
        counts["most"] = max(counts["most"], sum(len(each.seats) for each in llm.engine.scheduler.running))

    llm.engine._who_waits, llm.engine._seat = counted, seated  # type: ignore[method-assign]
    requests = load(method, count, seed)
    outcomes = dict(together(llm, requests))
    eager = dataclasses.replace(way, fixed=False)
    solo = engine(method, network_name, 2, eager, enable_prefix_caching=False, kernels="reference")
    different = [
        number
        for number, out in outcomes.items()
        if out is not None and facts(out) != facts(alone(solo, requests[number]))
    ]
    kept = llm.engine.prefixes.num_pages if llm.engine.prefixes is not None else 0
    return Outcome(
        method=method,
        network=network_name,
        num_requests=count,
        num_cancelled=sum(out is None for out in outcomes.values()),
        num_passes=llm.engine.stats.num_passes,
        num_waits=counts["waits"],
        most_seats=counts["most"],
        different=different,
        lost_pages=llm.engine.pool.num_used - kept,
        num_host_waits=counts["host"],
    )


@contextmanager
def host_waits() -> Iterator[list[str]]:
    """What made the host wait for the GPU inside, as far as torch notices; nothing without a GPU."""
    waited: list[str] = []
    if not torch.cuda.is_available():
        yield waited
        return
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waited
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waited += [text for each in told if "called a synchronizing" in (text := str(each.message))]


WATCHED = ("cache", "core", "decoding", "engine")
"""Parts of the package that a load tests: a result is as old as the last change of their code."""


def source_digest(package: Path | None = None) -> str:
    """A digest of the code under `WATCHED`; comments, docstrings and layout do not count."""
    root = package or Path(__file__).parents[1]
    found = hashlib.sha256()
    for path in sorted(path for part in WATCHED for path in (root / part).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):  # texts that stand alone are docstrings
                node.body = [each for each in body if not _is_text(each)]  # type: ignore[attr-defined]
        found.update(f"{path.relative_to(root).as_posix()}\n{_dump(tree)}\n".encode())
    return found.hexdigest()


def _dump(value: Any) -> str:
    """A syntax tree in words. Those of `ast.dump` change from Python to Python: newer ones know more fields, which are
    empty."""
    if isinstance(value, list):
        return f"[{' '.join(map(_dump, value))}]"
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = (f"{name}={_dump(each)}" for name, each in ast.iter_fields(value) if each not in (None, []))
    return f"{type(value).__name__}({' '.join(fields)})"


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def facts(out: CompletionOutput) -> tuple[Any, ...]:
    """All that may not depend on company. Rows may: a prompt whose K/V are there already does not run again. So may the
    last bits of a probability."""
    plain = dataclasses.asdict(out)
    del plain["num_rows"]
    plain["trajectory"] = [(e["position"], e["token_id"], e["num_pass"]) for e in plain["trajectory"]]
    return tuple(plain.items())
