"""A reader in a process of its own: `python -m tests.plane.reader_process PARAM ENDPOINT TICKET`, the endpoint in JSON.

Prints "started" at the first frame, and in the end "landed" or why not.
"""

import sys

import msgspec

from dataplane.protocol.stream import TransferFailedError
from schemas.handoff import Endpoint
from tests.plane.harness import Target, name_of, use_ends
from tests.plane.holder_process import say


def main() -> None:
    param, endpoint, ticket = sys.argv[1:]
    use_ends(param)
    target = Target()
    request = target.request(msgspec.json.decode(endpoint, type=Endpoint), ticket, name_of(param), 300)
    try:
        target.reader.read_blocking(request, on_started=lambda _: say("started"))
        say("landed")
    except TransferFailedError as error:
        say(str(error))
    target.close()


if __name__ == "__main__":
    main()
