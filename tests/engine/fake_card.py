"""torch's fake tensors as a card: they have a device and shapes, and no numbers.

What mixes devices raises, what would wait for a number raises; what copies between devices is noted. Without CUDA in
this build, some of torch's methods ask for its driver before they come to fake tensors: those go another way.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_OTHER_WAY = {
    Tensor.__invert__: aten.bitwise_not,
    Tensor.contiguous: aten.contiguous,
    torch.nonzero: aten.nonzero,
}
CARD = torch.device("cuda", 0)


class Copy(NamedTuple):
    """A copy between devices: what was called, from where, how many bytes."""

    name: str
    source: str
    num_bytes: int


class _Calls(TorchFunctionMode):
    def __init__(self, copies: list[Copy]) -> None:
        super().__init__()
        self.copies = copies

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.__getitem__:
            return _index(*args)
        if function is Tensor.__setitem__:  # there are no numbers to be put there
            there = _index(*args[:2])
            assert (there.shape, there.device, there.dtype) == (args[2].shape, args[2].device, args[2].dtype)
            return None
        if function in _OTHER_WAY:
            return _OTHER_WAY[function](*args)
        if function is Tensor.copy_ and args[0].device != args[1].device:
            self.copies.append(Copy("copy_", args[1].device.type, args[1].nbytes))
            return args[0]
        if function in (Tensor.to, Tensor.cpu, Tensor.cuda):
            target = _device_of(function, args[1:], kwargs or {})
            if target is not None and target.type != args[0].device.type:
                self.copies.append(Copy(function.__name__, args[0].device.type, args[0].nbytes))
                return torch.empty(args[0].shape, dtype=args[0].dtype, device=target)
        return function(*args, **(kwargs or {}))


def _device_of(function: Any, args: Any, kwargs: dict[str, Any]) -> torch.device | None:
    """Return the device that `to`, `cpu` or `cuda` is asked for."""
    if function is Tensor.to:
        asked = [kwargs.get("device"), *args]
        return next((torch.device(a) for a in asked if isinstance(a, (str, torch.device))), None)
    return torch.device("cpu") if function is Tensor.cpu else CARD


class _Operators(TorchDispatchMode):
    """Notes operators whose result is on another device than what they were given."""

    def __init__(self, copies: list[Copy]) -> None:
        super().__init__()
        self.copies = copies

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = [arg for arg in args if isinstance(arg, Tensor)]
        if isinstance(result, Tensor) and given and given[0].device != result.device:
            self.copies.append(Copy(str(function), given[0].device.type, given[0].nbytes))
        return result


def _index(tensor: Tensor, key: Any) -> Tensor:
    """As `tensor[key]` for slices, ints, None, ... and tensors of ids."""
    keys = key if isinstance(key, tuple) else (key,)
    at = next((n for n, k in enumerate(keys) if k is Ellipsis), None)
    if at is not None:
        named = sum(k is not None and k is not Ellipsis for k in keys)
        keys = (*keys[:at], *(slice(None),) * (tensor.dim() - named), *keys[at + 1 :])
    dim = 0
    for k in keys:
        if k is None:
            tensor, dim = aten.unsqueeze(tensor, dim), dim + 1
        elif isinstance(k, slice):
            tensor, dim = aten.slice(tensor, dim, k.start, k.stop, k.step or 1), dim + 1
        elif isinstance(k, int):
            tensor = aten.select(tensor, dim, k)
        else:
            tensor, dim = aten.index(tensor, [None] * dim + [k]), dim + k.dim()
    return tensor


class FakeCard:
    """`CardStream` of an engine; `copies` are those between devices."""

    device = CARD

    def __init__(self) -> None:
        self.mode = FakeTensorMode()
        self.copies: list[Copy] = []
        self.num_marks = 0
        self.num_waits = 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        with self.mode, _Operators(self.copies), _Calls(self.copies):
            yield

    def active(self) -> AbstractContextManager[object]:
        return nullcontext()

    def mark(self) -> int:
        self.num_marks += 1
        return self.num_marks

    def wait(self) -> None:
        self.num_waits += 1

    def move(self, model: nn.Module) -> None:
        """Move what the model has to the card."""
        for module in model.modules():
            for name, value in list(module._parameters.items()):
                if value is not None:
                    module._parameters[name] = nn.Parameter(self._moved(value), requires_grad=False)
            for name, value in list(module._buffers.items()):
                if value is not None:
                    module._buffers[name] = self._moved(value)

    def _moved(self, tensor: Tensor) -> Tensor:
        with unset_fake_temporarily():
            shape = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return FakeTensor(self.mode, shape, CARD)
