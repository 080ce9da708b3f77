"""The table of methods: each is a row of choices on four axes, never a class.

``frontier`` says where tokens may be decided, ``policy`` what is recomputed, ``drafter`` what is tried ahead, and the
recommended sampling fields (with ``schedule``) say which predictions become final. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from unmask.config import RECOMMENDABLE, SamplingParams
from unmask.errors import ConfigError, MethodError, nearest

FRONTIERS: Mapping[str, tuple[str, ...]] = {"whole": (), "blocks": ("block_length",), "window": ("decode_window",)}
"""The frontiers, and the request fields that each of them reads."""
POLICIES = ("recompute",)
DRAFTERS = ("none",)
SCHEDULES = ("even", "dream")
_GEOMETRY = frozenset(name for names in FRONTIERS.values() for name in names)


def _choice(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise MethodError(f"{what} {value!r} is unknown; {nearest(value, known)}")


@dataclass(frozen=True, kw_only=True)
class Method:
    """One row. A row of your own goes to ``LLM(method=Method(...))``.

    Raises:
        MethodError: an axis member that does not exist.
    """

    name: str
    title: str
    paper: str = ""
    frontier: str = "blocks"
    policy: str = "recompute"
    drafter: str = "none"
    schedule: str = "even"
    """How a fixed schedule spreads its commits: ``even`` (LLaDA) or ``dream`` (the eps curve)."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Recommended values for what a request leaves unsaid."""

    def __post_init__(self) -> None:
        _choice("frontier", self.frontier, tuple(FRONTIERS))
        _choice("policy", self.policy, POLICIES)
        _choice("drafter", self.drafter, DRAFTERS)
        _choice("schedule", self.schedule, SCHEDULES)
        SamplingParams().filled(self.sampling)  # a row that recommends nonsense fails where it is written

    @property
    def describe(self) -> str:
        """One line for tables: the axes and the recommended sampling."""
        sampling = " ".join(f"{name}={value}" for name, value in self.sampling.items())
        return f"{self.frontier} / {self.policy} / {self.drafter}" + (f" / {sampling}" if sampling else "")

    def complete(
        self, params: SamplingParams, checkpoint: Mapping[str, Any], fallback: Mapping[str, Any]
    ) -> SamplingParams:
        """``params`` with the unsaid filled from the checkpoint, this row and the fallback, checked against the row.

        A recommendation that this row does not read is left out; a request that says such a field is refused.

        Raises:
            ConfigError: the request says a field that this method does not read.
        """
        unread = _GEOMETRY - set(FRONTIERS[self.frontier])
        for name in sorted(unread):
            if getattr(params, name):  # None is not said, and block_length=0 is the whole canvas
                takers = [row.name for row in METHODS.values() if name in FRONTIERS[row.frontier]]
                raise ConfigError(f"method {self.name!r} does not read {name}; methods that do: {', '.join(takers)}")
        if params.alg == "origin" and self.schedule != "dream":
            raise ConfigError(f"alg='origin' needs Dream's schedule; use method='dream' instead of {self.name!r}")
        recommended = {k: v for k, v in checkpoint.items() if k in RECOMMENDABLE and k not in unread}
        if self.name != checkpoint.get("method"):  # a recommended rule belongs to the recommended method
            recommended = {k: v for k, v in recommended.items() if k in ("max_tokens", "block_length")}
        return params.filled(recommended, self.sampling, fallback)


def _table(*rows: Method) -> Mapping[str, Method]:
    return MappingProxyType({row.name: row for row in rows})


METHODS: Mapping[str, Method] = _table(
    Method(
        name="vanilla",
        title="LLaDA's fixed schedule: the most confident positions of a block, so many a pass",
        paper="arXiv 2502.09992",
    ),
    Method(
        name="dream",
        title="Dream's sampler: the whole canvas, commits along the eps curve",
        paper="arXiv 2508.15487",
        frontier="whole",
        schedule="dream",
        sampling={"alg": "entropy", "eps": 1e-3},
    ),
    Method(
        name="confidence",
        title="Every candidate above a confidence threshold, at least the best",
        paper="arXiv 2505.22618",
        sampling={"threshold": 0.9},
    ),
    Method(
        name="factor",
        title="As many candidates as their joint confidence allows",
        paper="arXiv 2505.22618",
        sampling={"factor": 1.0},
    ),
    Method(
        name="entropy-bound",
        title="EB-Sampler: candidates in order of entropy, up to a bound on their sum",
        paper="arXiv 2505.24857",
        sampling={"entropy_bound": 0.1},
    ),
    Method(
        name="window",
        title="Confidence threshold over a window of the leftmost undecided positions",
        paper="arXiv 2510.14973",
        frontier="window",
        sampling={"threshold": 0.9, "decode_window": 32},
    ),
)


def method_named(name: str) -> Method:
    """The row called ``name``.

    Raises:
        MethodError: no such row; the nearest name is offered.
    """
    if name not in METHODS:
        raise MethodError(f"method {name!r} is unknown; {nearest(name, METHODS)}")
    return METHODS[name]
