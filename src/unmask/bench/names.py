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
    "picked",
    "linear_fp8",
    "quantize_rows",
    "rms_norm_fp8",
    "add_rms_norm_fp8",
    "swiglu_fp8",
)
"""Of `bench kernels --op`. Those in 8 bits run where the GPU multiplies such floats."""
PARTS = ("targets", "grid", "memory")
"""Of `bench step --part`."""
