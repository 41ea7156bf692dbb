"""What many tests share. One thread: with more, two torch processes on two cores wait for each other."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("untimed", deadline=None)  # a busy machine is no fault of the code
hypothesis.settings.load_profile("untimed")
TINY = "bundled:tiny_moe"


@pytest.fixture(scope="session")
def tokenizer():
    from steadyrl.models.load import load_tokenizer  # the tests of pure code do without transformers

    return load_tokenizer(TINY)


@pytest.fixture
def model():
    """The bundled model in float32; a fresh one for each test."""
    from steadyrl.models.load import load_model

    return load_model(TINY, torch.float32)
