"""These tests run Triton's kernels on the CPU, by its interpreter, which must be chosen before triton is imported:
tests/engine/test_interpreted.py runs them in a process of its own."""

import os

import pytest

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETS:
    collect_ignore_glob = ["test_*.py"]
else:
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    multiply = InterpreterBuilder.create_dot

    def create_dot(self, left, right, accumulator, *options):
        """The interpreter keeps bfloat16 as 16-bit integers, and multiplies those: give it the numbers."""
        if left.dtype == tl.bfloat16:
            left, right = (
                TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
                for handle in (left, right)
            )
        return multiply(self, left, right, accumulator, *options)

    InterpreterBuilder.create_dot = create_dot

    from services.engine import paged_ops

    # Interpreted programs run one after another, and each takes a millisecond however little it does.
    paged_ops.TARGET_PROGRAMS = 6


@pytest.fixture(scope="session", autouse=True)
def few_threads() -> None:
    import torch

    torch.set_num_threads(1)
