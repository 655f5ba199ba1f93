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
    from triton.runtime import interpreter
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

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_with_index(tensor, scope):
        """Triton 3.6 takes arrays of one number for numbers, which numpy 2.4 does not."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    InterpreterBuilder.create_dot = create_dot
    interpreter._patch_lang_tensor = patch_tensor_with_index

    from services.engine.cuda import paged_ops

    paged_ops.TARGET_PROGRAMS = 6


@pytest.fixture(scope="session", autouse=True)
def few_threads() -> None:
    import torch

    torch.set_num_threads(1)
