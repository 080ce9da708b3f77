"""The golden data: tiny checkpoints and the outputs that public reference implementations gave on them."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from unmask.config import SamplingParams
from unmask.models.config import ModelConfig
from unmask.models.families import FAMILIES
from unmask.models.transformer import Transformer

ROOT = Path(__file__).parents[1] / "data" / "golden"


@functools.cache
def tiny_model(name: str, eos_ids: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float32) -> Transformer:
    """A golden checkpoint, filled here without the loader; `eos_ids` replaces its end-of-text ids."""
    directory = ROOT / "models" / name
    config = ModelConfig.from_pretrained(directory)
    model = Transformer(config if eos_ids is None else dataclasses.replace(config, eos_token_ids=eos_ids), dtype=dtype)
    tensors, parameters = load_file(directory / "model.safetensors"), dict(model.named_parameters())
    with torch.no_grad():
        for piece in FAMILIES[config.family].pieces(config):
            stop = piece.start + piece.shape[0]
            parameters[piece.parameter][piece.start : stop].copy_(tensors.pop(piece.name))
    assert not tensors, f"tensors without a place: {sorted(tensors)}"
    return model.eval()


@dataclasses.dataclass(frozen=True)
class Case:
    """One prompt of one reference run."""

    id: str
    model: str
    prompt: tuple[int, ...]
    params: SamplingParams
    curve: bool
    """Whether the schedule is Dream's."""
    eos_ids: tuple[int, ...] | None
    """Replaces the model's own; None keeps them."""
    output: tuple[int, ...]
    num_passes: int
    """The reference's forwards without the scheduled ones that can commit nothing."""
    steps: tuple[tuple[tuple[int, int], ...], ...] | None
    """(answer position, token) committed in each of these passes."""


def _file(family: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((ROOT / f"{family}.json").read_text())["cases"]
    return cases


def _commits(steps: list[dict[str, Any]] | None) -> tuple[tuple[tuple[int, int], ...], ...] | None:
    if steps is None:
        return None
    return tuple(tuple(sorted(zip(step["pos"], step["tok"]))) for step in steps if step["pos"])


def llada_cases() -> list[Case]:
    """llada_vanilla, llada_threshold and llada_factor."""
    out = []
    for case in [*_file("llada_vanilla"), *_file("llada_threshold"), *_file("llada_factor")]:
        said = case["settings"]
        kept = {name: said[name] for name in ("block_length", "temperature", "remasking")}
        adaptive = {name: said[name] for name in ("threshold", "factor") if said.get(name) is not None}
        kept |= adaptive or {"steps": said["steps"]}
        eos_ids: tuple[int, ...] | None = None
        if said.get("logits_eos_inf"):
            kept["suppress_eos"], eos_ids = True, (said["eos_id"],)
        elif said.get("confidence_eos_eot_inf"):
            kept |= {"eos_confidence_last": True, "ignore_eos": True}
            eos_ids = (said["eos_id"], said["eot_id"])
        else:
            kept["ignore_eos"] = True
        params = SamplingParams(
            max_tokens=said["gen_length"], cfg_scale=said.get("cfg_scale", 0.0), trajectory=True, **kept
        )
        prompt, output = tuple(case["prompt_ids"]), tuple(case["output_ids"])
        steps = _commits(case.get("steps"))
        out.append(Case(case["id"], case["model"], prompt, params, False, eos_ids, output, case["nfe"], steps))
    return out


def dream_cases() -> list[Case]:
    """dream_generate and dream_threshold, one case a row."""
    out = []
    for case in [*_file("dream_generate"), *_file("dream_threshold")]:
        said = case["settings"]
        kept = {name: said[name] for name in ("top_k", "top_p", "threshold", "eps") if said.get(name) is not None}
        alg = "confidence_threshold_budget" if said["alg"] == "confidence_threshold" else said["alg"]
        for row, (prompt, output) in enumerate(zip(case["prompt_ids"], case["output_ids"])):
            params = SamplingParams(
                max_tokens=said["max_new_tokens"],
                steps=said["steps"],
                alg=alg,
                temperature=said["temperature"],
                ignore_eos=True,
                trajectory=True,
                **kept,
            )
            recorded = case["steps"][row] if "steps" in case else None
            idle = sum(not step["pos"] for step in recorded) if recorded else int(said["steps"] == len(output))
            name = f"{case['id']}-row{row}" if len(case["prompt_ids"]) > 1 else case["id"]
            out.append(
                Case(
                    name,
                    case["model"],
                    tuple(prompt),
                    params,
                    True,
                    None,
                    tuple(output),
                    case["nfe"] - idle,
                    _commits(recorded),
                )
            )
    return out


NAMED_REFERENCE_BUG = "factor-10"
"""The reference accepts the last candidate although it fails the rule; we do not."""
