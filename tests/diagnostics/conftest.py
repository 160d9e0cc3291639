"""What the tests of the diagnostics share."""

import pytest
import torch
from small_model import record_gpt


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def record():
    """A recorded step of our model in bfloat16."""
    return record_gpt(torch.bfloat16)
