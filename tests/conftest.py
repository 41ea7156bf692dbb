"""What many tests share. One thread: with more, two torch processes on two cores wait for each other."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from steadyrl.models.load import load_model, load_tokenizer

torch.set_num_threads(1)
TINY = "bundled:tiny_moe"


@pytest.fixture(scope="session")
def tokenizer():
    return load_tokenizer(TINY)


@pytest.fixture
def model():
    """The bundled model in float32; a fresh one for each test."""
    return load_model(TINY, torch.float32)
