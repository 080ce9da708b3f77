"""Parts of `scripts/docs`."""
