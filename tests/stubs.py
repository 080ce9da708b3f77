"""A scripted denoiser: it has a transformer's surface, and a script says what it predicts.

Its hidden rows ARE log-probabilities and its head is the identity, so the engine's softmax gives the scripted
probabilities back. Every call is logged. A script sees what a network would: the visible tokens of one sequence.

    stub = Stub(lambda view: {7: 0.3})            # every position: token 7 with probability 0.3
    LLM(model=stub, ...)
    stub.calls[0].num_rows

Vocabulary of 64: MASK 60, end of text 61, end of turn 62, padding 63.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from unmask.cache.context import PagedContext
from unmask.models.attention import RopeTable
from unmask.models.config import ModelConfig

VOCAB, MASK, EOS, EOT, PAD = 64, 60, 61, 62, 63


@dataclass(frozen=True)
class View:
    """One position to predict, as the script sees it."""

    position: int
    """The position that is predicted (with a shift: one more than the row's own)."""
    canvas: Mapping[int, int]
    """Position to token, of everything that the row sees, as it was when it was written."""
    call: int
    """How many calls held a sequence with this first token before (so: a request's own pass, from 0)."""

    @property
    def first(self) -> int:
        """The sequence's first token: tells requests apart."""
        return self.canvas[min(self.canvas)]


Script = Callable[[View], Mapping[int, float]]


def _sees(ctx: PagedContext) -> list[list[tuple[int, int]]]:
    """For every row the (position, pool entry) pairs that it sees: its sweep without shadows, and its live entries."""
    sight, plan = ctx.sight, ctx.plan
    entries = sight.entries().tolist()
    position = dict(zip(ctx.write_M.tolist(), plan.pos_M.tolist()))
    out = []
    for row, (seat, see) in enumerate(zip(plan.seat_M.tolist(), plan.see_M.tolist())):
        shadow = sight.shadow_SN[seat].tolist() if sight.shadow_SN is not None else [False] * see
        seen = [(pos, entries[seat][pos]) for pos in range(see) if not shadow[pos]]
        if sight.live_SJ is not None and sight.live_bits_MJ is not None:
            bits = zip(sight.live_SJ[seat].tolist(), sight.live_bits_MJ[row].tolist())
            canvas = {entry: pos for pos, entry in enumerate(entries[seat])}
            seen += [(position.get(entry, canvas.get(entry, -1)), entry) for entry, bit in bits if bit]
        out.append(seen)
    return out


@dataclass(frozen=True)
class Call:
    """One pass, as the stub saw it."""

    num_rows: int
    sequences: list[dict[int, int]] = field(repr=False)
    """Position to token, of the canvas rows of each sequence of the pass."""

    def of(self, first: int) -> dict[int, int]:
        """The sequence that starts with token `first`."""
        return next(canvas for canvas in self.sequences if canvas[min(canvas)] == first)


def stub_config(shift: int = 0, **changes: Any) -> ModelConfig:
    """The config of a stub; `shift=1` for a Dream-like one."""
    said: dict[str, Any] = {
        "family": "dream" if shift else "llada",
        "vocab_size": VOCAB,
        "hidden_size": VOCAB,
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": VOCAB // 4,
        "intermediate_size": VOCAB,
        "rope_theta": 10000.0,
        "norm_eps": 1e-5,
        "qkv_bias": False,
        "tie_embeddings": False,
        "max_positions": 256,
        "logit_shift": shift,
        "mask_token_id": MASK,
        "eos_token_ids": (EOS, EOT),
        "pad_token_id": PAD,
        "bos_token_id": None,
    }
    return ModelConfig(**said | changes)


def log_row(probabilities: Mapping[int, float], vocab_size: int = VOCAB) -> Tensor:
    """Log-probabilities [V]: the named ones, the rest of the mass spread evenly over the other ordinary ids."""
    total = sum(probabilities.values())
    assert total <= 1 + 1e-9, f"probabilities sum to {total}"
    others = [i for i in range(vocab_size) if i not in probabilities and i not in (MASK, EOS, EOT, PAD)]
    row = torch.full((vocab_size,), -math.inf, dtype=torch.float64)
    rest = max(0.0, 1 - total) / len(others)
    for token in others:
        row[token] = math.log(rest) if rest > 1e-12 else -60.0
    for token, probability in probabilities.items():
        row[token] = math.log(probability) if probability > 0 else -60.0
    return row.clamp(min=-60.0)


class Stub(nn.Module):
    """The scripted denoiser. `before`: called with the call's number at the start of each pass."""

    def __init__(self, script: Script, shift: int = 0, before: Callable[[int], None] | None = None, **changes: Any):
        super().__init__()
        self.config = stub_config(shift, **changes)
        self.rope = RopeTable(self.config.head_dim, self.config.rope_theta, self.config.max_positions)
        self.lm_head = nn.Linear(VOCAB, VOCAB, bias=False)
        self.lm_head.weight = nn.Parameter(torch.eye(VOCAB), requires_grad=False)
        self.script, self.before = script, before
        self.calls: list[Call] = []
        self._seen: dict[int, int] = defaultdict(int)
        self._written: dict[int, int] = {}  # pool entry to the token whose row wrote it last

    @property
    def head(self) -> Tensor:
        return self.lm_head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.head.T

    def reset(self) -> None:
        """Forget the log and the call counts."""
        self.calls, self._seen, self._written = [], defaultdict(int), {}

    def forward(self, token: Tensor, ctx: PagedContext) -> Tensor:
        if self.before is not None:
            self.before(len(self.calls))
        plan = ctx.plan
        tokens, positions, seats = token.tolist(), plan.pos_M.tolist(), plan.seat_M.tolist()
        assert len(tokens) == len(positions) == len(seats), "one token, position and seat a row"
        ran: dict[int, dict[int, int]] = defaultdict(dict)
        for row_token, position, seat, column in zip(tokens, positions, seats, plan.column_M.tolist()):
            if column == position and column < plan.row_SE.shape[1] - 1:  # not padding, nor scratch rows, whose
                # positions are there already
                assert position not in ran[seat], f"position {position} runs twice in one pass"
                ran[seat][position] = row_token
        self.calls.append(Call(sum(plan.num_rows_S.tolist()), list(ran.values())))
        self._written |= zip(ctx.write_M.tolist(), tokens)
        views = [{pos: self._written[entry] for pos, entry in seen} for seen in _sees(ctx)]
        number = {}
        for seat in dict.fromkeys(seats):
            view = views[seats.index(seat)]
            if not view:  # rows of padding alone
                continue
            first = view[min(view)]
            number[seat] = self._seen[first]
            self._seen[first] += 1
        rows = [
            log_row(self.script(View(position + self.config.logit_shift, view, number[seat])) if view else {})
            for position, seat, view in zip(positions, seats, views)
        ]
        return torch.stack(rows).to(self.head)

    def network(self) -> Callable[[Sequence[int]], Tensor]:
        """The same script for the oracle: raw logits of a whole canvas, not logged (`call` is always 0)."""

        def logits(canvas: Sequence[int]) -> Tensor:
            seen = dict(enumerate(canvas))
            shift = self.config.logit_shift
            return torch.stack([log_row(self.script(View(i + shift, seen, 0))) for i in range(len(canvas))])

        return logits


def spelled(prompt_length: int, tokens: Sequence[int], probability: float = 0.9) -> Script:
    """A script that spells `tokens` from the prompt's end on, the leftmost always the surest."""

    def script(view: View) -> Mapping[int, float]:
        place = view.position - prompt_length
        if not 0 <= place < len(tokens):
            return {0: 0.1}
        return {tokens[place]: probability - 0.001 * place}

    return script


def table(prompt_length: int, cells: Sequence[tuple[int, float]]) -> Script:
    """A script that predicts `cells[i]` = (token, probability) at answer position i, whatever else is there."""

    def script(view: View) -> Mapping[int, float]:
        place = view.position - prompt_length
        token, probability = cells[place] if 0 <= place < len(cells) else (0, 0.05)
        return {token: probability}

    return script


class TableTokenizer:
    """A tokenizer whose tokens are the byte strings it is given; bytes without a piece of their own are refused.

    It has the surface of the package's own tokenizer. `unknown` are ids of the model that stand for no text.
    """

    has_chat_template = False

    def __init__(self, pieces: Mapping[int, bytes], unknown: Sequence[int] = ()) -> None:
        self.pieces, self.unknown = dict(pieces), tuple(unknown)
        self.special = {MASK: b"<mask>", EOS: b"<eos>", EOT: b"<eot>", PAD: b"<pad>"}

    @property
    def vocab_size(self) -> int:
        return len(self.pieces) + len(self.special)

    def encode(self, text: str) -> list[int]:
        ids, rest = [], text.encode()
        while rest:
            token, piece = max(
                ((t, p) for t, p in self.pieces.items() if rest.startswith(p)), key=lambda item: len(item[1])
            )
            ids.append(token)
            rest = rest[len(piece) :]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        special = {} if skip_special_tokens else self.special
        return b"".join(self.pieces.get(i, special.get(i, b"")) for i in ids).decode("utf-8", errors="replace")

    def is_known(self, token: int) -> bool:
        return token not in self.unknown

    def unknown_ids(self, model_vocab_size: int) -> list[int]:
        return [i for i in self.unknown if i < model_vocab_size]

    def token_to_id(self, token: str) -> int | None:
        spelled = {piece: i for i, piece in [*self.pieces.items(), *self.special.items()]}
        return spelled.get(token.encode())

    def apply_chat_template(self, messages: Any, add_generation_prompt: bool = True) -> list[int]:
        raise NotImplementedError
