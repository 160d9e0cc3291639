"""What the tests of the diagnostics share."""

import pytest
import torch
from small_model import record_gpt


@pytest.fixture(scope="session")
def record():
    """A recorded step of our model in bfloat16."""
    return record_gpt(torch.bfloat16)
