"""Another process of the same host opens memory of a card, and prints its digest: `card_process fake|gpu NAME SIZE`."""

import sys

from dataplane.cards.card import wait_until
from dataplane.memory.checksum import sum64
from tests.gpu import card
from tests.plane.fake_card import FakeCard
from tests.plane.harness import DEADLINE_S


def main() -> None:
    kind, name, num_bytes = sys.argv[1:]
    one = FakeCard() if kind == "fake" else card()
    memory, stream, host = one.map_memory(bytes.fromhex(name), int(num_bytes)), one.stream(), one.pinned(int(num_bytes))
    stream.download(memory, host)
    assert wait_until(stream.is_done, lambda: False, DEADLINE_S)
    print(sum64(host))
    stream.close()
    memory.close()


if __name__ == "__main__":
    main()
