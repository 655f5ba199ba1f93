"""Services that are forked: whoever gives up an order disturbs no other."""

import asyncio
from pathlib import Path

from tests.mesh.forked import ForkingLoop


def test_an_order_that_is_given_up_is_nobody_else_s(forking: ForkingLoop, tmp_path: Path) -> None:
    zygote = forking.zygote

    async def order() -> tuple[bool, int]:
        with (tmp_path / "log").open("ab") as log:
            given_up = asyncio.create_task(zygote.spawn(["--help"], log.fileno()))
            await asyncio.sleep(0)
            given_up.cancel()
            process = await zygote.spawn(["no-such-command"], log.fileno())
            await asyncio.wait([given_up])
            return given_up.cancelled(), await process.wait()

    assert forking.run(order()) == (True, 2)
