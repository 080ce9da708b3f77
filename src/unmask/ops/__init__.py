"""Every tensor operation that has more than one implementation; the only door to them.

The plain-torch versions in `reference/` define what an operation means. They run anywhere, in any float dtype,
and a faster version must match them.
"""

from unmask.ops.reference.attend import Sight, attend, tracking_mass
from unmask.ops.reference.attention import attention
from unmask.ops.reference.logit_stats import LogitStats, Sampling, logit_stats
from unmask.ops.reference.mlp import swiglu
from unmask.ops.reference.norm import rms_norm
from unmask.ops.reference.project import project_and_store
from unmask.ops.reference.rope import rope

__all__ = [
    "LogitStats",
    "Sampling",
    "Sight",
    "attend",
    "attention",
    "logit_stats",
    "project_and_store",
    "rms_norm",
    "rope",
    "swiglu",
    "tracking_mass",
]
