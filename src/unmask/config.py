"""What a user may set: `SamplingParams` for one request, `EngineConfig` for the process.

Both are frozen and validated where they are made. ``None`` means "not said": such a field is filled from the
checkpoint's recommendation, then from the method's row, then from `FALLBACK`. A name that is not known is an error
that offers the nearest one; the names other projects use for the same thing are accepted (`ALIASES`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from unmask.errors import ConfigError, nearest

# Other projects' names for our fields: Fast-dLLM, SGLang, lmdeploy, Sangam, JetEngine, LLaDA, Dream, D2F, Diffulex,
# vLLM. Flash-dLLM's track_num and mask_num are not among them: they count in units of 16 positions.
ALIASES: Mapping[str, str] = {
    "gen_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "confidence_threshold": "threshold",
    "dynamic_threshold": "threshold",
    "tau_conf": "threshold",
    "skip_threshold": "threshold",
    "accept_threshold": "threshold",
    "block_add_threshold": "tau_add",
    "add_block_threshold": "tau_add",
    "add_new_block_threshold": "tau_add",
    "decoded_token_threshold": "tau_act",
    "complete_threshold": "tau_act",
    "buffer_size": "pipeline_depth",
    "verify_threshold": "gamma",
    "cache_refresh_interval": "refresh_interval",
    "denoising_steps": "steps",
    "num_denoising_steps": "steps",
    "diffusion_steps": "steps",
    "block_size": "block_length",
    "diffusion_block_size": "block_length",
    "guidance_scale": "cfg_scale",
    "gamma_entropy": "entropy_bound",
    "logits_eos_inf": "suppress_eos",
    "confidence_eos_eot_inf": "eos_confidence_last",
    "suppress_tokens": "suppress_token_ids",
    "max_num_rows": "max_num_batched_tokens",
}

REMASKING = ("low_confidence", "random")
ALGORITHMS = ("origin", "maskgit_plus", "topk_margin", "entropy", "confidence_threshold_budget")
ACCEPTANCES = ("agreement", "product")
ISOLATIONS = ("strict", "reference")
QUANTIZATIONS = ("fp8",)
KERNELS = ("auto", "reference", "triton")

# What holds when neither the request, nor the checkpoint, nor the method says anything.
FALLBACK: Mapping[str, Any] = {"max_tokens": 128}

MAX_EOS_IDS = 8  # width of the device's table of ending ids: the checkpoint's own (at most 4) and the request's
MAX_BANNED_IDS = 32  # width of the device's table of suppressed ids

T = TypeVar("T")


def resolve_names(given: Mapping[str, Any], known: set[str], what: str) -> dict[str, Any]:
    """``given`` with aliases replaced by our names.

    Raises:
        ConfigError: a name is unknown (the nearest is offered), or one field is given twice under two names.
    """
    out: dict[str, Any] = {}
    for name, value in given.items():
        field = name if name in known else ALIASES.get(name, name)
        if field not in known:
            offered = known | {alias for alias, ours in ALIASES.items() if ours in known}
            raise ConfigError(f"unknown {what} option {name!r}; {nearest(name, offered)}")
        if field in out:
            raise ConfigError(f"{what} option {field!r} is given twice, once as {name!r}; keep one of them")
        out[field] = value
    return out


def _forgiving(what: str) -> Callable[[type[T]], type[T]]:
    """Class decorator: the constructor takes aliases, and an unknown name raises `ConfigError`."""

    def wrap(cls: type[T]) -> type[T]:
        init = cls.__init__
        known = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]

        @functools.wraps(init)
        def __init__(self: Any, **given: Any) -> None:
            init(self, **resolve_names(given, known, what))

        cls.__init__ = __init__  # type: ignore[method-assign]
        return cls

    return wrap


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _int_field(name: str, value: Any, low: int, none: bool = True) -> None:
    if value is None and none:
        return
    _check(_is_int(value), f"{name} must be an integer, got {value!r}")
    _check(value >= low, f"{name} must be at least {low}, got {value}")


def _float_field(name: str, value: Any, low: float, high: float, none: bool = True) -> None:
    if value is None and none:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    _check(number, f"{name} must be a number, got {value!r}")
    _check(low <= value <= high, f"{name} must lie in [{low:g}, {high:g}], got {value}")


def _bool_field(name: str, value: Any, none: bool = True) -> None:
    _check(isinstance(value, bool) or (none and value is None), f"{name} must be True or False, got {value!r}")


def _id_tuple(name: str, value: Any) -> tuple[int, ...]:
    ids = tuple(value or ())
    _check(all(_is_int(i) and i >= 0 for i in ids), f"{name} must hold token ids (integers >= 0), got {value!r}")
    return ids


@_forgiving("sampling")
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """One request's parameters. Every request of a batch has its own; none leaks into another.

    Raises:
        ConfigError: a value out of range, an unknown name, or fields that contradict each other.
    """

    # --- how much, and when to stop
    n: int = 1
    """Answers to one prompt; answer i uses a seed derived from `seed` and i."""
    max_tokens: int | None = None
    """Answer positions on the canvas, exact: the last block may be shorter than the others."""
    min_tokens: int = 0
    """No end-of-text or stop id among the first `min_tokens` answer positions."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer; the text is cut before the earliest. Empty strings are refused."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the answer like an end-of-text token."""
    ignore_eos: bool = False
    """Treat end-of-text as an ordinary token and fill the whole canvas."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    # --- which token a position gets
    temperature: float = 0.0
    """0 takes the most probable token; above, a token is drawn from softmax(logits / temperature)."""
    top_p: float = 1.0
    """Keep the fewest most probable tokens whose probabilities reach `top_p` together (always the best one)."""
    top_k: int = 0
    """Keep the `top_k` most probable tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least `min_p` times as probable as the best one."""
    seed: int | None = None
    """Draws depend on seed, position and pass only, never on the batch. None: a fresh seed."""
    suppress_token_ids: tuple[int, ...] = ()
    """Ids that never occur in the answer; they leave the softmax too."""
    suppress_eos: bool = False
    """Never predict end-of-text (LLaDA's `logits_eos_inf`)."""
    eos_confidence_last: bool = False
    """End-of-text may be predicted, with confidence 0 (LLaDA's `confidence_eos_eot_inf`)."""
    cfg_scale: float = 0.0
    """Classifier-free guidance: logits u + (cfg_scale + 1) (c - u), u from a masked prompt. 0 is off."""

    # --- which positions are decided in a pass
    block_length: int | None = None
    """Semi-autoregressive blocks of this many positions; 0 is the whole canvas at once."""
    decode_window: int | None = None
    """For window methods: the leftmost undecided positions that may be decided now."""
    steps: int | None = None
    """Length of the fixed schedule, spread evenly over the blocks. Excludes threshold, factor, entropy_bound."""
    threshold: float | None = None
    """Commit every candidate at least this probable, and always the best one."""
    strict_threshold: bool | None = None
    """The threshold itself does not pass: a candidate must be more probable than that (D2F)."""
    factor: float | None = None
    """Fast-dLLM's factor rule: the n-th best commits while its confidence >= 1 - factor / (n + 1)."""
    entropy_bound: float | None = None
    """EB-Sampler: commit in order of entropy while the entropies before sum to at most this (nats)."""
    alg: str | None = None
    """Dream's names: maskgit_plus ranks by probability, topk_margin by p1 - p2, entropy by negative entropy; origin
    fills at random; confidence_threshold_budget is Fast-dLLM's rule for Dream (schedule and threshold together)."""
    remasking: str | None = None
    """LLaDA's names: low_confidence ranks by probability, random at random."""
    alg_temp: float = 0.0
    """Randomness of the order: positions are drawn without replacement from softmax(score / alg_temp)."""
    eps: float | None = None
    """End of Dream's time grid linspace(1, eps, steps + 1)."""
    temper_confidence: bool = False
    """Score candidates under the temperature (Dream's reference); by default confidence does not depend on it."""
    tau_add: float | None = None
    """For pipeline methods: a block is opened once this share of the one before it is decided."""
    tau_act: float | None = None
    """For pipeline methods: once this share of the block before it is decided, a block commits in every pass, its best
    candidate at least."""
    pipeline_depth: int | None = None
    """For pipeline methods: blocks in flight at most."""
    early_stop: bool | None = None
    """For pipeline methods: what follows an end of text is dropped at once. False finishes the blocks in flight and
    opens no more (D2F's reference); the answer ends at its first end of text either way."""

    # --- what is kept, and what is tried ahead
    refresh_window: int | None = None
    """For tracked caches: leftmost undecided positions that a pass recomputes; those it may decide always are."""
    track: int | None = None
    """For tracked caches: decided positions that a pass recomputes; those just committed always are. For elastic
    caches: decided positions that each layer tracks; a pass recomputes those of all layers."""
    drift_threshold: float | None = None
    """For elastic caches: below this similarity of a layer's attention to what it was, the layers behind it recompute
    everything; 0 never, above 1 always."""
    answer_interval: int | None = None
    """Drift caches: the answer alone is recomputed every so many passes, and the prompt every `refresh_interval`."""
    refresh_interval: int | None = None
    """For caches: the whole canvas is recomputed every so many passes of this request."""
    search: int | None = None
    """For verifying methods: positions whose predictions are tried ahead in a step, at most."""
    gamma: float | None = None
    """For verifying methods: least probability of a token that is tried ahead; above 1 none is accepted."""
    accept: str | None = None
    """For verifying methods: agreement takes a token that is predicted again, with at least gamma; product takes
    tokens while the product of their probabilities is at least gamma."""
    isolation: str | None = None
    """For verifying methods: what a row sees where it may not see a draft. strict: the cached position, which knows no
    draft; reference: a live masked row, which has seen some (Flash-dLLM's released code)."""

    # --- what is reported
    trajectory: bool = False
    """Report for every answer position the pass that committed it and the probability it had then."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _stop_tuple(self.stop))
        for name in ("stop_token_ids", "suppress_token_ids"):
            object.__setattr__(self, name, _id_tuple(name, getattr(self, name)))
        _check_ranges(self)
        _check_rule(self)

    def filled(self, *sources: Mapping[str, Any]) -> SamplingParams:
        """This with every unsaid field taken from the first source that says it.

        A source that would contradict what the request said (a threshold beside the request's `steps`) yields.

        Raises:
            ConfigError: a source names a field outside `RECOMMENDABLE`.
        """
        said = {f.name: v for f in dataclasses.fields(self) if (v := getattr(self, f.name)) is not None}
        for source in sources:
            fresh = resolve_names(source, set(RECOMMENDABLE), "recommended sampling")
            said = _merge(said, {k: v for k, v in fresh.items() if v is not None})
        return SamplingParams(**said)

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with these fields changed."""
        return SamplingParams(
            **{f: getattr(self, f) for f in _FIELDS} | resolve_names(changes, set(_FIELDS), "sampling")
        )


_FIELDS: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(SamplingParams))
# What a checkpoint or a method may recommend: the fields whose default is None ("not said").
RECOMMENDABLE = frozenset(field.name for field in dataclasses.fields(SamplingParams) if field.default is None)
_SWITCHES = tuple(field.name for field in dataclasses.fields(SamplingParams) if isinstance(field.default, bool))
_OPTIONAL_SWITCHES = ("strict_threshold", "early_stop")  # None leaves the choice to the method
_RULES = ("threshold", "factor", "entropy_bound")  # adaptive rules: they say how many by themselves
_ORDER = ("alg", "remasking")


def _merge(said: dict[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    """``said`` with what ``source`` adds; a request that names one rule or ranking is not given another."""
    drop: set[str] = set()
    if any(name in said for name in ("steps", *_RULES)) or said.get("alg") == "origin":
        drop |= {"steps", *_RULES}
    if any(name in said for name in _ORDER):
        drop |= set(_ORDER)
    if said.get("alg") == "confidence_threshold_budget":
        drop -= {"steps", "threshold"}
    return {name: value for name, value in source.items() if name not in drop} | said


def _stop_tuple(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    _check(all(isinstance(s, str) for s in strings), f"stop must be a string or several, got {stop!r}")
    _check(all(strings), "stop holds an empty string, which would end every answer at once; leave it out")
    return strings


def _check_ranges(p: SamplingParams) -> None:
    _int_field("n", p.n, 1, none=False)
    _int_field("max_tokens", p.max_tokens, 1)
    _int_field("min_tokens", p.min_tokens, 0, none=False)
    _int_field("top_k", p.top_k, -1, none=False)
    _int_field("seed", p.seed, 0)
    _int_field("block_length", p.block_length, 0)
    _int_field("decode_window", p.decode_window, 1)
    _int_field("steps", p.steps, 1)
    _int_field("pipeline_depth", p.pipeline_depth, 1)
    _int_field("refresh_window", p.refresh_window, 1)
    _int_field("track", p.track, 0)
    _int_field("refresh_interval", p.refresh_interval, 1)
    _int_field("answer_interval", p.answer_interval, 1)
    _int_field("search", p.search, 1)
    _float_field("temperature", p.temperature, 0, 100, none=False)
    _float_field("top_p", p.top_p, 1e-6, 1, none=False)
    _float_field("min_p", p.min_p, 0, 1, none=False)
    _float_field("cfg_scale", p.cfg_scale, 0, 100, none=False)
    _float_field("threshold", p.threshold, 0, 1e9)
    _float_field("factor", p.factor, 0, 1e9)
    _float_field("entropy_bound", p.entropy_bound, 0, 1e9)
    _float_field("alg_temp", p.alg_temp, 0, 1e6, none=False)
    _float_field("eps", p.eps, 0, 1)
    _float_field("tau_add", p.tau_add, 0, 1)
    _float_field("tau_act", p.tau_act, 0, 1)
    _float_field("gamma", p.gamma, 0, 1e9)
    _float_field("drift_threshold", p.drift_threshold, 0, 1e9)
    _check(
        p.max_tokens is None or p.min_tokens <= p.max_tokens, f"min_tokens {p.min_tokens} > max_tokens {p.max_tokens}"
    )
    for name in _SWITCHES:
        _bool_field(name, getattr(p, name), none=False)
    for name in _OPTIONAL_SWITCHES:
        _bool_field(name, getattr(p, name))
    _check_choice("accept", p.accept, ACCEPTANCES)
    _check_choice("isolation", p.isolation, ISOLATIONS)


def _check_choice(name: str, value: str | None, known: tuple[str, ...]) -> None:
    if value is not None and value not in known:
        raise ConfigError(f"{name} {value!r} is unknown; {nearest(str(value), known)}")


def _check_rule(p: SamplingParams) -> None:
    """One way to say how many tokens a pass commits; one way to rank them."""
    _check_choice("alg", p.alg, ALGORITHMS)
    _check_choice("remasking", p.remasking, REMASKING)
    _check(not (p.alg and p.remasking), f"alg={p.alg!r} and remasking={p.remasking!r} both rank positions; keep one")
    rules = [name for name in _RULES if getattr(p, name) is not None]
    _check(len(rules) < 2, f"{' and '.join(rules)} both say how many tokens to commit; keep one")
    if p.alg == "confidence_threshold_budget":
        _check(rules in ([], ["threshold"]), f"alg='confidence_threshold_budget' takes a threshold, not {rules}")
    elif rules and p.steps is not None:
        raise ConfigError(
            f"steps={p.steps} is a fixed schedule and {rules[0]}={getattr(p, rules[0])} decides adaptively; keep one "
            "of them (only alg='confidence_threshold_budget' combines steps and threshold)"
        )
    _check(not (p.alg == "origin" and rules), f"alg='origin' fills at random and takes no {''.join(rules)}")
    for name, most in (("stop_token_ids", MAX_EOS_IDS - 4), ("suppress_token_ids", MAX_BANNED_IDS)):
        _check(len(getattr(p, name)) <= most, f"{name} holds {len(getattr(p, name))} ids, at most {most} are possible")


@_forgiving("engine")
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the process decides once.

    Raises:
        ConfigError: a value out of range or an unknown name.
    """

    max_num_seqs: int = 16
    """Seats: requests that run at the same time (a guided request takes two)."""
    max_model_len: int | None = None
    """Longest canvas, prompt and answer together; None takes the checkpoint's."""
    max_num_batched_tokens: int = 8192
    """Rows of one pass. More seats than fit wait; a canvas longer than this runs alone."""
    kv_cache_memory_bytes: int | None = None
    """Bytes of the pool of keys and values; None takes what all seats need, within the share of the device's memory
    that gpu_memory_utilization leaves free."""
    gpu_memory_utilization: float = 0.9
    """Share of the device's memory that weights and pool may take together; read when kv_cache_memory_bytes is None."""
    enable_prefix_caching: bool | None = None
    """Requests with the same prompt share its keys and values; None does so where it changes no answer, which is with
    block-causal attention only."""
    allow_attention_mismatch: bool = False
    """Run a method whose attention differs from what the weights were trained for. The quality is then undefined."""
    enforce_eager: bool = False
    """On a GPU, launch every operation of every pass instead of replaying captured passes: slower, easier to debug."""
    enable_torch_compile: bool = False
    """Fuse what lies around the network in captured passes with torch.compile: 0.1 to 0.4 ms less a pass, for a minute
    at the first request of each number of seats. Without captured passes there is nothing to compile."""
    kernels: str = "auto"
    """auto runs Triton kernels where there are some; reference runs plain torch; triton is auto that refuses to start
    where no kernel can run."""
    quantization: str | None = None
    """fp8 keeps the weights of the layers' products in 8 bits, with a scale per channel, and quantises their inputs
    row by row: half of bf16's memory, on GPUs of compute capability 8.9 or more; a CPU is slow at it. None keeps the
    weights as they are."""

    def __post_init__(self) -> None:
        _int_field("max_num_seqs", self.max_num_seqs, 1, none=False)
        _int_field("max_model_len", self.max_model_len, 2)
        _int_field("max_num_batched_tokens", self.max_num_batched_tokens, 1, none=False)
        _int_field("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1)
        _float_field("gpu_memory_utilization", self.gpu_memory_utilization, 0, 1, none=False)
        _check(self.gpu_memory_utilization > 0, "gpu_memory_utilization must be more than 0; 0.9 is the default")
        _bool_field("enable_prefix_caching", self.enable_prefix_caching)
        _bool_field("allow_attention_mismatch", self.allow_attention_mismatch, none=False)
        _bool_field("enforce_eager", self.enforce_eager, none=False)
        _bool_field("enable_torch_compile", self.enable_torch_compile, none=False)
        _check(
            not (self.enforce_eager and self.enable_torch_compile),
            "enable_torch_compile compiles captured passes, and enforce_eager captures none; leave one of them out",
        )
        _check_choice("kernels", self.kernels, KERNELS)
        _check_choice("quantization", self.quantization, QUANTIZATIONS)
