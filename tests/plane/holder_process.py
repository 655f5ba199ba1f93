"""A holder in a process of its own: `python -m tests.plane.holder_process PARAM`, a carrier with its ends as the
harness has it. It does what its input says.

Prints its endpoint and a ticket, then a line per command: `compute START END`, `finish TEXT`, `outcome`, `exit`.
"""

import sys

import msgspec

from tests.plane.harness import Holder, name_of, use_ends


def main() -> None:
    use_ends(sys.argv[1])
    holder = Holder((name_of(sys.argv[1]),))
    say(msgspec.json.encode(holder.endpoint).decode())
    say(holder.ticket())
    for line in sys.stdin:
        command, *arguments = line.split()
        match command:
            case "compute":
                holder.compute(64, int(arguments[0]), int(arguments[1]))
                say("computed")
            case "finish":
                holder.progress.complete(arguments[0].encode())
                say("finished")
            case "outcome":
                say(holder.gate.wait_outcome()[1] or "served")
            case _:
                break
    holder.close()


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
