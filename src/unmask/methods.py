"""The table of methods: each is a row of choices on four axes, never a class.

``frontier`` says where tokens may be decided, ``policy`` what is recomputed, ``drafter`` what is tried ahead, and the
recommended sampling fields (with ``schedule``) say which predictions become final. A member is a name, or an object of
your own. What a row, the weights and a request may not combine is refused here. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from unmask.config import RECOMMENDABLE, SamplingParams, resolve_names
from unmask.errors import ConfigError, MethodError, nearest

FRONTIERS: Mapping[str, tuple[str, ...]] = {
    "whole": (),
    "blocks": ("block_length",),
    "window": ("decode_window",),
    "block-window": ("block_length", "decode_window"),
    "pipeline": ("block_length", "tau_add", "tau_act", "pipeline_depth", "early_stop"),
}
"""Where tokens may be decided, and the request fields that each member reads."""
POLICIES: Mapping[str, tuple[str, ...]] = {
    "recompute": (),
    "prefix": ("refresh_interval",),
    "dual": ("refresh_interval",),
    "tracked": ("refresh_window", "track", "refresh_interval"),
    "delayed": ("refresh_interval",),
    "block-causal": (),
    "drift": ("refresh_interval", "answer_interval"),
    "elastic": ("track", "drift_threshold"),
}
"""What is recomputed, and the request fields that each member reads."""
DRAFTERS: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "two-pass": ("search", "gamma", "accept", "isolation"),
    "one-pass": ("search", "gamma", "accept"),
    "nested": (),
}
"""What is tried ahead, and the request fields that each member reads."""
SCHEDULES = ("even", "dream", "family")
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "drift": {
        "identifier": "value",
        "writes": "values",
        "curve": "uniform",
        "form": "released",
        "ratio": 0.25,
        "mean_ratio": None,
        "min_ratio": None,
        "rank": 128,
        "refresh": "apart",
        "warmup": 0,
        "kept": "all",
        "new_first": "no",
        "reuse": "delta",
        "scored": "answer",
        "first_layer": "needed",
    },
    "elastic": {"cosine": "heads", "tested": "union", "tripping": "keep", "masks": "window", "run_new": "yes"},
    "tracked": {"mass": "logits", "mass_first_layer": 2, "mass_last_layer": None, "mass_rows": "decode"},
    "delayed": {"variant": "decode", "shift_type": "un_right", "window": 4},
    "two-pass": {"verify_rows": 32, "max_search": 8},
    "one-pass": {"max_search": 8},
    "nested": {"num_drafts": 3, "block_width": 16},
}
"""What a row may set once for all its requests, by member, with the defaults.

identifier: what tells that a row drifted. ratio: the share of an answer's rows that a layer computes, at the curve's
peak; 0 recomputes none between refreshes. mean_ratio: in place of it, the mean over the layers. curve: how it goes
over the layers: the same in all, as published for the network, either (auto), or mu, rho_s, rho_p and rho_e as
`unmask profile` measures them. form: depths of the layers on it, see `unmask.cache.budget`. min_ratio: what layers
before the peak have at least; None is 1/16 for a published curve in the released form and 0 else. rank: numbers of a
proxy; up to 1 a share of the values' width. warmup: passes up to this number recompute everything. new_first: what the
last pass committed is chosen, beside the number. reuse, scored, first_layer, writes: see `unmask.cache.drift`.
mass: raw attention logits or softmax weights tell which decided positions matter; summed over the layers from
mass_first_layer up to mass_last_layer (exclusive; None: all), and over the rows of the decode or the refresh window.
cosine: the drift of attention is measured between vectors over the heads, or over the keys. tested: whose tracked
positions a layer tests, of all layers (union) or its own. tripping: whether the layer that drifted is recomputed too
(redo). masks: undecided positions that run, those that may be decided (window) or all. run_new: whether what the last
pass committed runs.
verify_rows: rows of a verification, the context included. max_search: the largest `search` of a request, of which a
"one-pass" has two rows each but the first.
variant: rows of tokens are kept once they are known for a pass (decode), those of the prompt for good (prefill), or
both (pd); or all are kept but those of the last pass's tokens, of what is decided next in a random order, and of the
`window` undecided positions nearest to each of these (greedy). shift_type: under shifted logits, which of the row's own
token and the one that it scores must be known: both (un_right), its own (right), or the other (un).
num_drafts: tokens that are tried ahead in a pass. block_width: the longest block of a request; with policy "prefix",
whose views carry what follows the block, too, the longest answer.
"""
MAX_VERIFY_ROWS = 64  # the rows of one verification see each other through a list of this many entries
_UNREAD: Mapping[str, tuple[str, ...]] = {"nested": ("refresh_interval",)}
"""Fields that a member keeps others from reading. A drafter makes passes fewer, so counting them gives other refreshes
and other answers, where it promises the answers of one token a pass."""
MAX_ONE_PASS_SEARCH = 22  # and those of one-pass verification: two rows a draft but the first, and its canvas entry
_SEARCHING = ("two-pass", "one-pass")
_AXIS_FIELDS = frozenset(name for axis in (FRONTIERS, POLICIES, DRAFTERS) for names in axis.values() for name in names)
_CACHED_BY_BLOCK = ("prefix", "dual")
_ADAPTIVE = ("threshold", "factor", "entropy_bound")
_AXES = {"frontier": FRONTIERS, "policy": POLICIES, "drafter": DRAFTERS}
_PROTOCOL: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "frontier": ("unmask.decoding.frontier.Frontier", ("advance", "retire", "reach")),
    "policy": (
        "unmask.cache.policy.CachePolicy",
        ("due", "rows", "most_rows", "counted", "observe", "planes", "gate", "mass", "refreshes", "recurs", "static"),
    ),
    "drafter": (
        "unmask.decoding.drafter.Drafter",
        ("scratch", "settle", "num_scratch", "num_second", "num_pending", "parts", "static", "shift"),
    ),
}
"""The base class of each axis, and what the engine asks of a member."""
_LEFT_OPEN = ("Frontier.advance", "Frontier.reach", "CachePolicy.rows", "CachePolicy.most_rows")
"""What the base classes leave to their members."""
_CLASSES = {
    "unmask.decoding.frontier": {
        "Whole": "whole",
        "Blocks": "blocks",
        "Window": "window",
        "BlockWindow": "block-window",
        "Pipeline": "pipeline",
    },
    "unmask.cache.policy": {
        "Recompute": "recompute",
        "Prefix": "prefix",
        "Dual": "dual",
        "Tracked": "tracked",
        "BlockCausal": "block-causal",
    },
    "unmask.cache.delayed": {"Delayed": "delayed"},
    "unmask.cache.drift": {"Drift": "drift"},
    "unmask.cache.elastic": {"Elastic": "elastic"},
    "unmask.decoding.drafter": {"Drafter": "none", "TwoPass": "two-pass", "Nested": "nested"},
    "unmask.decoding.one_pass": {"OnePass": "one-pass"},
}
"""The classes behind the names, by module: an object that extends one is held to what that one may combine."""
OWN = "own"
"""The kind of a member that extends none of them."""


class Weights(Protocol):
    """What legality asks of a model; `unmask.models.config.ModelConfig` has it."""

    @property
    def family(self) -> str: ...
    @property
    def attention(self) -> str: ...
    @property
    def logit_shift(self) -> int: ...


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _four_numbers(what: str, value: Any) -> None:
    """A budget's mu, rho_s, rho_p and rho_e."""
    four = isinstance(value, (tuple, list)) and [_number(x) for x in value] == [True] * 4
    mu, start, peak, end = value if four else [-1] * 4
    if not (0 <= mu <= 1 and 0 < start <= peak <= 1 and 0 < end <= peak):
        raise MethodError(
            f"{what} must be 'uniform', 'published', 'auto', or four numbers as `unmask profile` measures them: mu "
            f"from 0 to 1, rho_s, rho_p and rho_e above 0 up to 1, and rho_p the largest; got {value!r}"
        )


def _choice(what: str, value: str, known: Iterable[str]) -> None:
    if value not in tuple(known):
        raise MethodError(f"{what} {value!r} is unknown; {nearest(str(value), known)}")


_ALLOWED: Mapping[str, tuple[str, ...] | int | float] = {
    "identifier": ("value", "proxy", "input", "attention"),
    "writes": ("dense", "values", "sparse"),
    "curve": ("uniform", "published", "auto"),
    "form": ("released", "paper"),
    "ratio": 0.0,
    "mean_ratio": 0.0,
    "min_ratio": 0.0,
    "rank": 2,
    "refresh": ("apart", "together"),
    "warmup": 0,
    "kept": ("all", "chosen"),
    "new_first": ("no", "yes"),
    "reuse": ("delta", "absolute"),
    "scored": ("answer", "all"),
    "first_layer": ("needed", "all", "chosen"),
    "cosine": ("heads", "keys"),
    "tested": ("union", "own"),
    "tripping": ("keep", "redo"),
    "masks": ("window", "all"),
    "run_new": ("no", "yes"),
    "mass": ("logits", "softmax"),
    "mass_rows": ("decode", "refresh"),
    "mass_first_layer": 0,
    "mass_last_layer": 1,
    "variant": ("decode", "prefill", "pd", "greedy"),
    "shift_type": ("un", "un_right", "right"),
    "window": 0,
    "verify_rows": 2,
    "max_search": 1,
    "num_drafts": 1,
    "block_width": 1,
}
"""Values of each option: these words, integers from this one on, or numbers from this one to 1; None where it is the
default. A curve may also be four numbers, and a rank a share."""
_READ_WITH: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "rank": ("identifier", ("proxy",)),
    "warmup": ("refresh", ("together",)),
    "window": ("variant", ("greedy",)),
    "shift_type": ("variant", ("decode", "prefill", "pd")),
}
"""Options that are read beside some values of another one only: said beside others they are a mistake."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """One row. A row of your own goes to ``LLM(method=Method(...))``.

    Raises:
        MethodError: an axis member or option that does not exist, or members that exclude each other.
    """

    name: str
    title: str
    paper: str = ""
    frontier: Any = "blocks"
    """A name of `FRONTIERS`, or an `unmask.decoding.frontier.Frontier` of your own; so for the next two axes. All
    engines that run the row share the object."""
    policy: Any = "recompute"
    """A name of `POLICIES`, or an `unmask.cache.policy.CachePolicy`."""
    drafter: Any = "none"
    """A name of `DRAFTERS`, or an `unmask.decoding.drafter.Drafter`."""
    schedule: str = "even"
    """How a fixed schedule spreads its commits: ``even`` (LLaDA), ``dream`` (the eps curve), or as the ``family`` of
    the weights does."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Recommended values for what a request leaves unsaid."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What holds for all requests alike: see `OPTIONS`."""

    def __post_init__(self) -> None:
        for axis, known in _AXES.items():
            member = getattr(self, axis)
            if isinstance(member, str):
                _choice(axis, member, known)
            else:
                _check_own(f"method {self.name!r}", axis, member)
        _choice("schedule", self.schedule, SCHEDULES)
        self._check_members()
        self._check_options()
        self._check_sampling()

    # --- what it is

    @property
    def describe(self) -> str:
        """One line for tables: the axes and the recommended sampling."""
        said = " ".join(f"{name}={value}" for name, value in [*self.sampling.items(), *self.options.items()])
        return " / ".join(self.members) + (f" / {said}" if said else "")

    @property
    def members(self) -> tuple[str, str, str]:
        """Its members for messages: their names, and the class names of your own."""
        return _word(self.frontier), _word(self.policy), _word(self.drafter)

    @property
    def kinds(self) -> tuple[str, str, str]:
        """Names of its members; of your own that of the class which they extend, or "own". What may go together is
        decided by these."""
        drafter = _kind(self.drafter)
        if drafter == "none" and not isinstance(self.drafter, str) and _tries_ahead(self.drafter):
            drafter = OWN
        return _kind(self.frontier), _kind(self.policy), drafter

    @property
    def reads(self) -> frozenset[str]:
        """The request fields that only some methods read and this one does."""
        read = [name for axis in _AXES for name in _reads(axis, getattr(self, axis))]
        return frozenset(read) - frozenset(_UNREAD.get(self.kinds[2], ()))

    @property
    def attention(self) -> str:
        """What its rows see, in the words of `ModelConfig.attention`: "full" or "block_causal"."""
        of_kind = "block_causal" if self.kinds[0] == "pipeline" else "full"
        return str(getattr(self.frontier, "attention", of_kind))

    @property
    def all_options(self) -> Mapping[str, Any]:
        """The options of its members, the defaults filled in."""
        named = [member for member in (self.policy, self.drafter) if isinstance(member, str)]  # others: constructors'
        defaults = {name: value for member in named for name, value in OPTIONS.get(member, {}).items()}
        return MappingProxyType(defaults | dict(self.options))

    def option(self, name: str) -> Any:
        """One option of its members.

        Raises:
            MethodError: none of them has it.
        """
        self._check_option_name(name)
        return self.all_options[name]

    def schedule_for(self, config: Weights) -> str:
        """How a fixed schedule spreads its commits on these weights: ``even`` or ``dream``."""
        if self.schedule != "family":
            return self.schedule
        return "dream" if config.family == "dream" else "even"

    # --- what it may not be

    def _check_members(self) -> None:
        me, (frontier, policy, drafter), (where, what, ahead) = f"method {self.name!r}", self.members, self.kinds
        causal = self.attention == "block_causal"
        if what == "block-causal" and where != "pipeline":
            raise MethodError(
                f"{me}: policy {policy!r} keeps whole blocks for good, which frontier {frontier!r} does not finish "
                "in order; use frontier 'pipeline', or policy 'recompute'"
            )
        if causal and what not in ("recompute", "block-causal"):
            raise MethodError(
                f"{me}: frontier {frontier!r} has blocks that do not see what follows, and policy {policy!r} is for "
                "rows that see the whole canvas; use policy 'block-causal', or 'recompute'"
            )
        if what in _CACHED_BY_BLOCK and where != "blocks":
            raise MethodError(
                f"{me}: policy {policy!r} recomputes one block at a time, and frontier {frontier!r} decides outside of "
                "it; use frontier 'blocks', or policy 'recompute'"
            )
        if what == "drift" and ahead != "none":
            raise MethodError(
                f"{me}: policy {policy!r} chooses among the answer's rows in every layer, and drafter {drafter!r} "
                "brings rows that are none of it; use drafter 'none', or policy 'recompute'"
            )
        if what == "elastic" and ahead != "none":
            raise MethodError(
                f"{me}: policy {policy!r} may recompute the whole canvas from any layer on, and drafter {drafter!r} "
                "brings rows that are none of it; use drafter 'none', or policy 'recompute'"
            )
        if ahead in (*_SEARCHING, OWN) and causal:
            raise MethodError(
                f"{me}: drafter {drafter!r} verifies with rows that see the whole canvas, and those of frontier "
                f"{frontier!r} do not; use drafter 'none', or frontier 'window'"
            )
        if ahead == "nested" and what not in _CACHED_BY_BLOCK:
            raise MethodError(
                f"{me}: drafter {drafter!r} tries tokens of a block on a canvas that is left alone meanwhile, but for "
                f"what follows, and policy {policy!r} recomputes more; use policy 'dual' or 'prefix', or drafter 'none'"
            )
        if ahead == "nested" and not isinstance(self.drafter, str) and self.drafter.ahead != (what == "prefix"):
            raise MethodError(
                f"{me}: the views of drafter {drafter!r} must carry what policy {policy!r} recomputes in a pass; use "
                f"{drafter}(..., ahead={what == 'prefix'}), or drafter 'nested'"
            )

    def _check_option_name(self, name: str) -> None:
        mine = self.members[1:]
        owners = [member for member, options in OPTIONS.items() if name in options]
        if owners and not set(owners) & set(mine):
            raise MethodError(
                f"method {self.name!r} has no option {name!r}, which belongs to {owners[0]!r}; its members are "
                f"{' and '.join(repr(member) for member in mine)}"
            )
        if not owners:
            known = [option for member in mine for option in OPTIONS.get(member, {})]
            hint = nearest(name, known) if known else "its members have none"
            raise MethodError(f"method {self.name!r} has no option {name!r}; {hint}")

    def _check_options(self) -> None:
        for name, value in self.options.items():
            self._check_option_name(name)
            self._check_option_value(name, value)
        for name, (other, values) in _READ_WITH.items():
            if self._sets(name) and (value := self.option(other)) not in values:
                raise MethodError(
                    f"method {self.name!r}: option {name}={self.options[name]!r} is not read with {other}={value!r}; "
                    f"leave it out, or use {other}={' or '.join(repr(each) for each in values)}"
                )
        if self.policy == "drift":
            self._check_ratios()
        if self.policy == "tracked":
            self._check_mass_layers(self.option("mass_first_layer"), self.option("mass_last_layer"))
        if self.drafter == "two-pass":
            self._check_verify_rows(self.option("verify_rows"), self.option("max_search"))
        if self.drafter == "nested":
            self._check_views(self.option("num_drafts"), self.option("block_width"))
        if self.drafter == "one-pass" and (most := self.option("max_search")) > MAX_ONE_PASS_SEARCH:
            raise MethodError(
                f"method {self.name!r}: max_search={most}, and one pass can verify {MAX_ONE_PASS_SEARCH} drafts; "
                f"use at most {MAX_ONE_PASS_SEARCH}"
            )

    def _check_option_value(self, name: str, value: Any) -> None:
        allowed, what = _ALLOWED[name], f"method {self.name!r}: option {name}"
        if name == "curve" and not isinstance(value, str):
            _four_numbers(what, value)
            return
        if isinstance(allowed, tuple):
            _choice(what, value, allowed)
            return
        if value is None and next(options[name] for options in OPTIONS.values() if name in options) is None:
            return
        if isinstance(allowed, float):
            if not _number(value) or not allowed <= value <= 1:
                raise MethodError(f"{what} must be a number from {allowed:g} to 1, got {value!r}")
            return
        if name == "rank" and _number(value) and 0 < value <= 1:
            return
        if not _number(value) or not isinstance(value, int) or value < allowed:
            more = ", or a share of the values' width above 0 up to 1" if name == "rank" else ""
            raise MethodError(f"{what} must be an integer of at least {allowed}{more}, got {value!r}")

    def _sets(self, name: str) -> bool:
        """Whether the row gives an option another value than the table does."""
        owner = next(options for options in OPTIONS.values() if name in options)
        return name in self.options and self.options[name] != owner[name]

    def _check_ratios(self) -> None:
        me = f"method {self.name!r}"
        for name in ("form", "min_ratio"):
            if self._sets(name) and self.option("curve") == "uniform":
                raise MethodError(
                    f"{me}: option {name}={self.options[name]!r} is of a curve, and curve='uniform' has the same ratio "
                    "in all layers; leave it out, or use curve='published', 'auto' or four numbers"
                )
        if self._sets("mean_ratio") and self._sets("ratio"):
            raise MethodError(
                f"{me}: ratio={self.options['ratio']} is at the curve's peak, and "
                f"mean_ratio={self.options['mean_ratio']} the mean over the layers; use one of them"
            )
        if self._sets("kept") and self.option("identifier") == "value" and self.option("writes") != "sparse":
            raise MethodError(
                f"{me}: option kept='chosen' keeps of a row what it was when it was computed, and with "
                f"identifier='value' that is V, which writes={self.option('writes')!r} renews in every pass; use "
                "writes='sparse'"
            )

    def _check_mass_layers(self, first: int, last: int | None) -> None:
        if last is not None and last <= first:
            raise MethodError(
                f"method {self.name!r}: mass_last_layer={last} (exclusive) leaves no layer from "
                f"mass_first_layer={first} on; use at least {first + 1}"
            )

    def _check_verify_rows(self, rows: int, search: int) -> None:
        if rows > MAX_VERIFY_ROWS:
            raise MethodError(f"method {self.name!r}: verify_rows={rows}, at most {MAX_VERIFY_ROWS} are possible")
        if 2 * search > rows:
            raise MethodError(
                f"method {self.name!r}: max_search={search} needs {2 * search} rows of a verification and "
                f"verify_rows={rows}; use verify_rows of at least {2 * search}, or max_search of at most {rows // 2}"
            )

    def _check_views(self, num_drafts: int, width: int) -> None:
        """A block and its views are one list, of fixed shape unless they carry what follows, too."""
        if num_drafts > width:
            raise MethodError(
                f"method {self.name!r}: num_drafts={num_drafts} do not fit block_width={width}; use fewer"
            )
        if self.kinds[1] == "dual" and (entries := (num_drafts + 1) * width) > MAX_VERIFY_ROWS:
            raise MethodError(
                f"method {self.name!r}: num_drafts={num_drafts} over block_width={width} need {entries} entries and "
                f"{MAX_VERIFY_ROWS} are possible; use a block_width of at most {MAX_VERIFY_ROWS // (num_drafts + 1)}, "
                "or fewer drafts"
            )

    def _check_sampling(self) -> None:
        """A row that recommends nonsense fails where it is written."""
        SamplingParams().filled(self.sampling)
        said = resolve_names(self.sampling, set(RECOMMENDABLE), "recommended sampling")
        for name in sorted(_AXIS_FIELDS - self.reads):
            if _said(name, said.get(name)):
                raise MethodError(
                    f"method {self.name!r} recommends {name}={said[name]}, which its members "
                    f"({', '.join(self.members)}) do not read; leave it out"
                )
        if self.drafter in _SEARCHING and (said.get("search") or 0) > (most := self.option("max_search")):
            raise MethodError(
                f"method {self.name!r} recommends search={said['search']} over its option max_search={most}; "
                "change one of them"
            )

    # --- what it makes of a request

    def complete(
        self, params: SamplingParams, checkpoint: Mapping[str, Any], fallback: Mapping[str, Any]
    ) -> SamplingParams:
        """``params`` with the unsaid filled from the checkpoint, this row and the fallback, checked against the row.

        A recommendation that this row does not read is left out; a request that says such a field is refused.

        Raises:
            ConfigError: the request says a field that this method does not read, or asks for what it cannot do.
        """
        unread = _AXIS_FIELDS - self.reads
        for name in sorted(unread):
            if _said(name, getattr(params, name)):
                takers = [row.name for row in METHODS.values() if name in row.reads]
                raise ConfigError(f"method {self.name!r} does not read {name}; methods that do: {', '.join(takers)}")
        recommended = {k: v for k, v in checkpoint.items() if k in RECOMMENDABLE and k not in unread}
        if self.name != checkpoint.get("method"):  # a recommended rule belongs to the recommended method
            recommended = {k: v for k, v in recommended.items() if k in ("max_tokens", "block_length")}
        if self.kinds[2] == "nested" and not 0 < recommended.get("block_length", 0) <= self._block_width():
            recommended.pop("block_length", None)  # advice for methods that take longer blocks
        complete = params.filled(recommended, self.sampling, fallback)
        self._check_request(complete)
        return complete

    def _check_request(self, params: SamplingParams) -> None:
        self._check_schedule(params)
        if self.kinds[1] == "elastic" and params.cfg_scale > 0:
            raise ConfigError(
                f"cfg_scale={params.cfg_scale} mixes two canvases, and method {self.name!r} decides for each by itself "
                "which of its rows run; use cfg_scale=0, or a method such as 'flash-cache'"
            )
        drafter = self.kinds[2]
        if drafter == "none":
            return
        if params.cfg_scale > 0:
            raise ConfigError(
                f"cfg_scale={params.cfg_scale} mixes two canvases and method {self.name!r} verifies on one; "
                f"use cfg_scale=0, or a method that tries nothing ahead ({self._without_drafter()})"
            )
        if drafter == "nested":
            self._check_proved_rule(params)
            self._check_block_width(params)
        most = self.all_options.get("max_search")  # a drafter of your own knows its limit itself
        if params.search is not None and most is not None and params.search > most:
            raise ConfigError(
                f"search={params.search} is over the {most} that method {self.name!r} has rows for; "
                f"use at most {most}, or a Method with a larger option max_search"
            )

    def _check_schedule(self, params: SamplingParams) -> None:
        """A fixed schedule counts on candidates that the frontier has to offer."""
        origin = params.alg == "origin"
        frontier = self.kinds[0]
        if origin and (self.schedule == "even" or frontier not in ("whole", "blocks")):
            raise ConfigError(
                "alg='origin' needs Dream's schedule, over blocks or the whole canvas; "
                f"use method='dream' instead of {self.name!r}"
            )
        adaptive = any(getattr(params, name) is not None for name in _ADAPTIVE)
        if frontier in ("pipeline", OWN) and (not adaptive or params.alg == "confidence_threshold_budget"):
            said = f"steps={params.steps}" if params.steps is not None else "no threshold, factor or entropy_bound"
            raise ConfigError(
                f"method {self.name!r} opens blocks as they fill, so that a fixed schedule ({said}) finds fewer "
                "candidates than it counts on; use a threshold, or a method with frontier 'blocks'"
                if frontier == "pipeline"
                else f"method {self.name!r}: a fixed schedule ({said}) counts on candidates that frontier "
                f"{self.members[0]!r} need not have; use a threshold, or extend Whole, Blocks or Window"
            )

    def _check_proved_rule(self, params: SamplingParams) -> None:
        """Nested drafts are proved by what a pass would have taken: all above a threshold, else the most probable."""
        by_prob = ("maskgit_plus", "low_confidence")
        ordered = [name for name in ("alg", "remasking") if getattr(params, name) not in by_prob]
        drawn = [name for name in ("temperature", "alg_temp") if getattr(params, name) > 0]
        for names, what in (
            (("steps", "factor", "entropy_bound"), "commits by another rule"),
            (ordered, "ranks otherwise"),
            (drawn, "draws anew in every pass"),
        ):
            for name in names:
                if (value := getattr(params, name)) is not None:
                    raise ConfigError(
                        f"{name}={value} {what}, and method {self.name!r} proves its tokens by what a pass with a "
                        f"threshold would commit; leave it out, or use {self._without_drafter()!r}"
                    )
        if params.threshold is None:
            raise ConfigError(
                f"method {self.name!r} has no rule; use threshold=2 for one token at a time, or a lower one"
            )

    def _check_block_width(self, params: SamplingParams) -> None:
        answer = params.max_tokens or 0
        longest, width = min(params.block_length or answer, answer), self._block_width()
        if self.kinds[1] == "prefix" and answer > width:
            raise ConfigError(
                f"an answer of {answer} positions is over the {width} that method {self.name!r} has rows for in each "
                f"view; use max_tokens of at most {width}, or a Method with a larger option block_width"
            )
        if longest > width:
            raise ConfigError(
                f"a block of {longest} positions is over the {width} that method {self.name!r} has rows for; use a "
                f"block_length of at most {width}, or a Method with a larger option block_width"
            )

    def _block_width(self) -> int:
        width = self.option("block_width") if isinstance(self.drafter, str) else self.drafter.block_width
        return int(width)

    def _without_drafter(self) -> str:
        alike = [row.name for row in METHODS.values() if (row.frontier, row.policy) == (self.frontier, self.policy)]
        return next((name for name in alike if METHODS[name].drafter == "none"), "confidence")


def _word(member: Any) -> str:
    return member if isinstance(member, str) else type(member).__name__


def _kind(member: Any) -> str:
    """The name of a member; of an object, that of the nearest class that has one."""
    if isinstance(member, str):
        return member
    found = (_CLASSES.get(each.__module__, {}).get(each.__name__) for each in type(member).__mro__)
    return next((name for name in found if name is not None), OWN)


def _tries_ahead(drafter: Any) -> bool:
    return bool(drafter.num_scratch or drafter.num_second or drafter.num_pending)


def _reads(axis: str, member: Any) -> tuple[str, ...]:
    """The request fields that a member reads: its ``reads``, or what the member that it extends does."""
    of_kind = _AXES[axis].get(_kind(member), ())
    return of_kind if isinstance(member, str) else tuple(getattr(member, "reads", of_kind))


def _left_open(method: Any) -> bool:
    ours = str(getattr(method, "__module__", "")).startswith("unmask.")
    return ours and getattr(method, "__qualname__", "") in _LEFT_OPEN


def _check_own(me: str, axis: str, member: Any) -> None:
    """An object in place of a name is what the engine will ask things of."""
    base, asked = _PROTOCOL[axis]
    if isinstance(member, type):
        raise MethodError(
            f"{me}: {axis} {member.__name__} is a class and a row takes an object; use {member.__name__}()"
        )
    missing = [name for name in asked if not hasattr(member, name)]
    missing += [name for name in asked if _left_open(getattr(member, name, None))]
    if missing:
        raise MethodError(
            f"{me}: {axis} {_word(member)!r} is without {', '.join(missing)}; extend {base}, which says what each gets "
            "and returns"
        )
    reads = getattr(member, "reads", ())
    if isinstance(reads, str):
        raise MethodError(f"{me}: reads of {axis} {_word(member)!r} is a text; use a tuple, ({reads!r},)")
    for name in reads:
        if name not in _AXIS_FIELDS:
            hint = nearest(str(name), _AXIS_FIELDS)
            raise MethodError(
                f"{me}: {axis} {_word(member)!r} reads {name!r}, and no request has such a field for members; {hint}. "
                "What all requests share can be an argument of its constructor"
            )
    if (sees := getattr(member, "attention", "full")) not in ("full", "block_causal"):
        raise MethodError(f"{me}: attention of {axis} {_word(member)!r} is {sees!r}; use 'full' or 'block_causal'")


def _said(name: str, value: Any) -> bool:
    """None is not said, and block_length=0 is the whole canvas."""
    return value is not None and not (name == "block_length" and value == 0)


def leads(method: Method, logit_shift: int) -> bool:
    """Whether the first pass of a block decides its first position only.

    That position is scored by a row before the block, which the policies that recompute one block run in its first pass
    only; the reference takes it there, alone and whatever its confidence.
    """
    if not isinstance(method.frontier, str):
        return bool(getattr(method.frontier, "lead", False))
    return method.kinds[1] in _CACHED_BY_BLOCK and logit_shift != 0


def check_weights(method: Method, config: Weights, *, allow: bool) -> None:
    """Whether these weights can run the method. ``allow`` lets the attention differ from what they were trained for.

    Raises:
        MethodError: they cannot.
    """
    by_block = method.kinds[1] in _CACHED_BY_BLOCK
    if by_block and config.logit_shift and not leads(method, config.logit_shift):
        raise MethodError(
            f"method {method.name!r} recomputes one block at a time, and this network scores its first position from "
            f"outside of it; make frontier {method.members[0]!r} with lead=True, or use policy 'recompute'"
        )
    ahead = method.kinds[2]
    if ahead in ("nested", "one-pass") and not isinstance(method.drafter, str):
        if method.drafter.shift != config.logit_shift:
            raise MethodError(
                f"method {method.name!r}: drafter {method.members[2]!r} is for logits that are shifted by "
                f"{method.drafter.shift}, and those of this network are by {config.logit_shift}; make it with "
                f"shift={config.logit_shift}"
            )
    elif ahead not in ("none", "nested", "one-pass") and config.logit_shift:
        raise MethodError(
            f"method {method.name!r} verifies each position by its own row, and this network scores a position from "
            f"row p - {config.logit_shift}; use a method with drafter 'none', such as {method._without_drafter()!r}"
        )
    if method.kinds[1] == "elastic" and config.logit_shift:
        raise MethodError(
            f"method {method.name!r} runs the rows of the positions that it may decide, and this network scores a "
            f"position from row p - {config.logit_shift}; use a method such as 'flash-cache'"
        )
    if allow or method.attention == config.attention:
        return
    words = {"full": "full", "block_causal": "block-causal"}
    instead = {"full": "'confidence'", "block_causal": "'d2f'"}[config.attention]
    raise MethodError(
        f"method {method.name!r} has {words[method.attention]} attention and these weights were trained for "
        f"{words[config.attention]} attention; use a method such as {instead}. To run it all the same, with undefined "
        "quality: allow_attention_mismatch=True / --allow-attention-mismatch"
    )


def check_prefix_caching(method: Method, wanted: bool | None) -> bool:
    """Whether requests with the same prompt share its keys and values; None takes them where that is exact.

    Raises:
        MethodError: wanted where what follows a prompt changes its keys and values.
    """
    exact = method.policy == "block-causal" and method.frontier == "pipeline"
    if wanted and not exact:
        raise MethodError(
            f"enable_prefix_caching=True, and with policy {method.members[1]!r} of method {method.name!r} a prompt's "
            "keys and values depend on what follows; leave it out, or use policy 'block-causal' (method 'd2f')"
        )
    return exact if wanted is None else wanted


_ROWS: dict[str, Method] = {}


def _table(*rows: Method) -> Mapping[str, Method]:
    _ROWS.update({row.name: row for row in rows})
    return MappingProxyType(_ROWS)


_FAST_DLLM: Mapping[str, Any] = {"threshold": 0.9, "block_length": 32}
_WINDOW: Mapping[str, Any] = {"threshold": 0.9, "decode_window": 16}
_FLASH_CACHE: Mapping[str, Any] = {**_WINDOW, "refresh_window": 64, "track": 64}
_VERIFY: Mapping[str, Any] = {"search": 8, "gamma": 0.8, "accept": "agreement", "isolation": "strict"}
_ONE_PASS: Mapping[str, Any] = {"search": 8, "gamma": 0.8, "accept": "agreement"}
_D2F: Mapping[str, Any] = {
    "block_length": 32,
    "tau_add": 0.1,
    "tau_act": 0.95,
    "threshold": 0.9,
    "strict_threshold": True,
    "pipeline_depth": 4,
}
_ONE_BY_ONE: Mapping[str, Any] = {
    "block_length": 1,
    "tau_add": 1.0,
    "tau_act": 1.0,
    "threshold": 2.0,
    "pipeline_depth": 1,
}


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
    Method(
        name="fast-dllm-prefix",
        title="Blocks, with keys and values kept for what lies before the block",
        paper="arXiv 2505.22618",
        policy="prefix",
        schedule="family",
        sampling=_FAST_DLLM,
    ),
    Method(
        name="fast-dllm-dual",
        title="Blocks, with keys and values kept for what lies before and after the block",
        paper="arXiv 2505.22618",
        policy="dual",
        schedule="family",
        sampling=_FAST_DLLM,
    ),
    Method(
        name="dllm-cache",
        title="The answer's rows whose values drifted most; prompt and answer anew at intervals of their own",
        paper="arXiv 2506.06295",
        policy="drift",
        sampling={**_FAST_DLLM, "refresh_interval": 50, "answer_interval": 7},
    ),
    Method(
        name="spa-cache",
        title="The answer's rows whose singular proxies drifted most, more of them in the layers where rows drift more",
        paper="arXiv 2602.02544",
        policy="drift",
        options={"identifier": "proxy", "writes": "dense", "curve": "auto", "refresh": "together"},
        sampling={**_FAST_DLLM, "refresh_interval": 50, "answer_interval": 7},
    ),
    Method(
        name="elastic-cache",
        title="A window, until a layer's attention has drifted: from there on everything is recomputed",
        paper="arXiv 2510.14973",
        frontier="window",
        policy="elastic",
        sampling={**_WINDOW, "track": 1, "drift_threshold": 0.9},
    ),
    Method(
        name="flash-cache",
        title="A window, recomputed with the decided positions that its queries attend to most",
        paper="arXiv 2609.26796",
        frontier="window",
        policy="tracked",
        sampling=_FLASH_CACHE,
    ),
    Method(
        name="flash-verify",
        title="flash-cache, and a second pass that checks predictions ahead, each without having seen it",
        paper="arXiv 2609.26796",
        frontier="window",
        policy="tracked",
        drafter="two-pass",
        sampling={**_FLASH_CACHE, **_VERIFY},
    ),
    Method(
        name="flash-verify-reference",
        title="flash-verify as its released code does it",
        paper="arXiv 2609.26796",
        frontier="window",
        policy="tracked",
        drafter="two-pass",
        sampling={**_FLASH_CACHE, **_VERIFY, "accept": "product", "isolation": "reference"},
    ),
    Method(
        name="flash-dllm",
        title="flash-verify as its paper prints it",
        paper="arXiv 2609.26796",
        frontier="window",
        policy="tracked",
        drafter="two-pass",
        sampling={**_FLASH_CACHE, **_VERIFY, "isolation": "reference"},
    ),
    Method(
        name="flash-verify-uncached",
        title="flash-verify with the whole canvas recomputed in every first pass",
        paper="arXiv 2609.26796",
        frontier="window",
        drafter="two-pass",
        sampling={**_WINDOW, **_VERIFY},
    ),
    Method(
        name="one-pass",
        title="A window, and beside every pass the rows that check what the pass before it would have taken next",
        frontier="window",
        drafter="one-pass",
        sampling={**_WINDOW, **_ONE_PASS},
    ),
    Method(
        name="one-pass-cache",
        title="one-pass over flash-cache",
        frontier="window",
        policy="tracked",
        drafter="one-pass",
        sampling={**_FLASH_CACHE, **_ONE_PASS},
    ),
    Method(
        name="dkv-cache",
        title="Anywhere in the block; what is decided is recomputed once more, and then kept",
        paper="arXiv 2505.15781",
        policy="delayed",
        schedule="family",
        sampling={"refresh_interval": 8},
    ),
    Method(
        name="freedave",
        title="fast-dllm-dual, one token at a time; in one pass as many as it would decide next in just this way",
        paper="arXiv 2510.00294",
        policy="dual",
        drafter="nested",
        sampling={"threshold": 2.0, "block_length": 16},
    ),
    Method(
        name="d2f",
        title="Blocks in a pipeline, block-causal: finished blocks are kept for good",
        paper="arXiv 2508.09192",
        frontier="pipeline",
        policy="block-causal",
        sampling=_D2F,
    ),
    Method(
        name="d2f-uncached",
        title="d2f with the whole canvas recomputed in every pass",
        paper="arXiv 2508.09192",
        frontier="pipeline",
        sampling=_D2F,
    ),
    Method(
        name="autoregressive",
        title="The next token from the left in every pass, for weights that were trained for that",
        frontier="pipeline",
        policy="block-causal",
        sampling=_ONE_BY_ONE,
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


@contextmanager
def registered(*rows: Method) -> Iterator[None]:
    """Inside, rows of your own are in the table: whatever takes a method's name (an engine, a load of
    `unmask.eval.continuous`) takes theirs.

    Raises:
        MethodError: a name that the table has already.
    """
    for row in rows:
        if row.name in _ROWS:
            raise MethodError(f"method {row.name!r} is in the table already; use another name")
    _ROWS.update({row.name: row for row in rows})
    try:
        yield
    finally:
        for row in rows:
            _ROWS.pop(row.name, None)
