"""Which device a worker runs on: the CPU, or one of the machine's graphics cards.

`python -m services.engine.devices` prints what there is, for whoever does not want PyTorch in its own process.
"""

import asyncio
import ctypes
import importlib.util
import logging
import sys
from collections.abc import Collection, Sequence

import msgspec

from services.config import Carrier, child_environment, is_card
from services.engine import limits
from services.errors import UserError

log = logging.getLogger(__name__)

DRIVER = "libcuda.so.1"
CPU = "cpu"


class Cards(msgspec.Struct, frozen=True):
    """The cards that a worker could run on. `reason`: why there are none, though the machine has a driver for them."""

    num_cards: int = 0
    reason: str = ""


def has_driver() -> bool:
    """Return whether the machine could have a card. Quick, and imports nothing."""
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return False
    return True


def usable_cards() -> Cards:
    """Return the cards that PyTorch sees, if all that the data plane needs is installed. Imports PyTorch."""
    import torch  # noqa: PLC0415 - seconds

    if not torch.cuda.is_available():
        return Cards(reason="PyTorch sees none: it is built without CUDA, or the driver is too old")
    if importlib.util.find_spec("cupy") is None:
        return Cards(reason="CuPy is not installed: pip install 'kvmesh[gpu]'")
    return Cards(torch.cuda.device_count())


async def probe_cards() -> Cards:
    """Return the same, found out by a process of its own where the machine has a driver at all."""
    if not has_driver():
        return Cards()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "services.engine.devices"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=child_environment(),
    )
    try:
        async with asyncio.timeout(limits.PROBE_TIMEOUT_S):
            found, _ = await process.communicate()
        return msgspec.json.decode(found, type=Cards)
    except TimeoutError:
        process.kill()
        await process.wait()
        return Cards(reason=f"PyTorch did not say within {limits.PROBE_TIMEOUT_S:.0f} s")
    except msgspec.DecodeError:
        return Cards(reason=f"looking for them ended with code {process.returncode}")


def plan_devices(asked: Sequence[str], cards: Cards, num_workers: int) -> list[str]:
    """Return a device for each worker, "cpu" or "cuda:N", out of what was asked for: a list is dealt out in turn.

    `cuda` takes the cards one after another, as many as there are; `auto` is that, or the CPU where there is none. A
    card that is named and not there is the worker's to complain of: it knows why.
    """
    num_cards = max(1, cards.num_cards)
    planned: list[str] = []
    for number in range(num_workers):
        device = asked[number % len(asked)]
        if device == "auto":
            device = "cuda" if cards.num_cards else CPU
        planned.append(f"cuda:{number % num_cards}" if device == "cuda" else device)
    return planned


def check_driver(devices: Collection[str]) -> None:
    """Raise UserError where a worker is to run on a card and the machine cannot have one."""
    if any(is_card(device) for device in devices) and not has_driver():
        raise UserError(f"this machine has no driver for NVIDIA cards ({DRIVER}): install it, or take --device cpu")


def check_carrier(carrier: Carrier, devices: Collection[str]) -> None:
    """Raise UserError where no two of a mesh's workers could hand KV over by the carrier that is asked for."""
    cards = {device for device in devices if is_card(device)}
    if carrier == "shm" and cards:
        raise UserError("--carrier shm leads from host memory to host memory, not from a card: take auto or tcp")
    if carrier == "cuda" and not cards:
        raise UserError("--carrier cuda leads from card to card: put the workers on one with --device cuda")
    if carrier == "nccl" and len(cards) < 2:
        raise UserError(
            "--carrier nccl leads from one card to another: give the workers two, as in --device cuda:0,cuda:1"
        )


def card_of(device: str) -> int | None:
    """Return the number of the card that a worker runs on, None: it runs on the CPU. "auto" looks for itself."""
    if device == "auto":
        cards = usable_cards() if has_driver() else Cards()
        if cards.reason:
            log.warning("no graphics card is used: %s", cards.reason)
        return 0 if cards.num_cards else None
    return int(device.partition(":")[2] or 0) if is_card(device) else None


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(usable_cards()))
