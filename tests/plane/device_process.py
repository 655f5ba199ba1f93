"""Another process of the same host: it has memory and an event of its own on a card, or opens those of the test.

python -m tests.plane.device_process fake|cuda exporting     writes handles, then records and writes as it is told
python -m tests.plane.device_process fake|cuda opening       reads handles, and answers what it sees there
"""

import sys
from typing import Any

import numpy as np

from dataplane.cards.cuda.cuda_driver import find_device
from dataplane.cards.device import Device
from dataplane.cards.fakes.fake_device import FakeDevice

NUM_BYTES = 4096
DEADLINE_S = 60.0


def open_device(kind: str) -> Device:
    return FakeDevice() if kind == "fake" else find_device()


def say(text: str) -> None:
    print(text, flush=True)


def exporting(device: Device) -> None:
    """Lines in: `write BYTE`, `record`, `quit`."""
    memory, event = device.allocate(NUM_BYTES), device.new_event(shared=True)
    stream, host = device.new_stream(), np.empty(NUM_BYTES, np.uint8)
    device.pin(host)
    say(device.export_memory(memory).hex())
    say(device.export_event(event).hex())
    for line in sys.stdin:
        match line.split():
            case ["write", number]:
                host[:] = int(number)
                device.upload(stream, host, memory, 0)
            case ["record"]:
                event.record(stream)
                assert event.wait(DEADLINE_S)
            case _:
                break
        say("done")
    device.unpin(host)
    closed: list[Any] = [event, memory, stream, device]
    for what in closed:
        what.close()


def opening(device: Device) -> None:
    """Lines in: the memory's handle, the event's. Says whether the event is done, and then the memory's first bytes."""
    memory = device.open_memory(bytes.fromhex(sys.stdin.readline()), NUM_BYTES)
    event = device.open_event(bytes.fromhex(sys.stdin.readline()))
    stream, done, host = device.new_stream(), device.new_event(), np.empty(8, np.uint8)
    device.pin(host)
    say(str(event.wait(DEADLINE_S)))
    device.download(stream, memory, 0, host)
    done.record(stream)
    assert done.wait(DEADLINE_S)
    say(host.tobytes().hex())
    device.unpin(host)
    closed: list[Any] = [event, memory, done, stream, device]
    for what in closed:
        what.close()


if __name__ == "__main__":
    {"exporting": exporting, "opening": opening}[sys.argv[2]](open_device(sys.argv[1]))
