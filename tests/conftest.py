"""What every test runs under: one thread for torch."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tiny matrices run fastest on one thread, and the machine may be shared."""
    torch.set_num_threads(1)
