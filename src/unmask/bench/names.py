"""What `unmask bench` takes by name, for its help as well, which must not wait for torch."""

OPS = (
    "attend",
    "project_and_store",
    "logit_stats",
    "add_rms_norm",
    "rms_norm",
    "swiglu",
    "linear",
    "linear_swiglu",
    "drift",
    "furthest",
)
"""Of `bench kernels --op`."""
PARTS = ("targets", "grid", "memory")
"""Of `bench step --part`."""
