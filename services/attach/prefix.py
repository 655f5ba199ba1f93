"""`/v1/kv/prefix`: how much of a prompt a holder has, for routers that ask before they choose a server."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated
from urllib.parse import parse_qs

import msgspec

from schemas.attach import MAX_RUN, KVIdentity
from schemas.block import hash_blocks
from services.asgi import Refusal, RefusedError, body_of, reply
from services.attach.connector.identity import layout_of
from services.attach.connector.scheduler_half import hash_salt
from services.attach.core import AttachCore, Sharing
from services.attach.limits import MAX_PREFIX_BYTES, MAX_PREFIX_CONNECTIONS
from services.config import MeshConfig

if TYPE_CHECKING:
    from litestar.types import Receive, Scope, Send

PATH = "/v1/kv/prefix"
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class PrefixQuestion(msgspec.Struct, frozen=True):
    """A prompt's token ids, as the server's tokenizer and chat template make them."""

    tokens: Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    cache_salt: str = ""


class ServerPrefix(msgspec.Struct, frozen=True):
    """One attached server. `tokens`: what it can load of the prompt."""

    server: str
    url: str
    sharing: str
    tokens: int


class PrefixAnswer(msgspec.Struct, frozen=True):
    """`tokens`: what the holder has, from the prompt's first token on, in whole blocks."""

    block_size: int
    tokens: int
    servers: list[ServerPrefix]


class Prefixes:
    """Answers routers; until the first server is there nothing is held."""

    def __init__(self, tenant: str) -> None:
        self._tenant = tenant
        self._held: tuple[AttachCore, KVIdentity] | None = None

    def answer_of(self, core: AttachCore, identity: KVIdentity) -> None:
        """Answer what this core has from now on."""
        self._held = core, identity

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Serve one request (ASGI)."""
        try:
            question = await _question(scope, receive)
            status, answer = HTTPStatus.OK, await self.answer(question)
        except RefusedError as error:
            status, answer = error.status, Refusal(str(error))
        await reply(send, status, answer)

    async def answer(self, question: PrefixQuestion) -> PrefixAnswer:
        if self._held is None:
            return PrefixAnswer(0, 0, [])
        core, identity = self._held
        # A long prompt takes milliseconds: nobody else waits for them.
        hashes = await asyncio.to_thread(
            hash_blocks,
            question.tokens[: MAX_RUN * identity.block_size],
            identity.block_size,
            model_fingerprint=layout_of(identity).fingerprint,
            tenant=hash_salt(question.cache_salt),
        )
        num_held = core.num_leading(hashes, self._tenant) * identity.block_size
        servers = [
            ServerPrefix(name, server.hello.url, server.sharing, num_held if server.sharing is Sharing.ON else 0)
            for name, server in core.servers.items()
        ]
        return PrefixAnswer(identity.block_size, num_held, servers)


async def _question(scope: "Scope", receive: "Receive") -> PrefixQuestion:
    """Return what is asked, in the query or in a JSON body. Raises RefusedError."""
    if scope["type"] != "http" or scope["path"] != PATH:
        raise RefusedError(HTTPStatus.NOT_FOUND, f"there is {PATH} alone")
    method: str = scope["method"]
    try:
        match method:
            case "GET":
                query = parse_qs(scope["query_string"].decode("ascii"), keep_blank_values=True)
                tokens = ",".join(query.get("tokens", [])).split(",")
                return msgspec.convert(
                    {"tokens": tokens, "cache_salt": query.get("cache_salt", [""])[0]}, PrefixQuestion, strict=False
                )
            case "POST":
                return msgspec.json.decode(await body_of(receive, MAX_PREFIX_BYTES), type=PrefixQuestion)
            case _:
                raise RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, "ask with GET or POST")
    except (msgspec.DecodeError, ValueError) as error:
        raise RefusedError(HTTPStatus.BAD_REQUEST, f"tokens are a prompt's ids, as 1,2,3: {error}") from error


@contextlib.asynccontextmanager
async def served(prefixes: Prefixes, sock: socket.socket, config: MeshConfig) -> AsyncGenerator[None]:
    """Serve routers at this socket while the block runs."""
    # A holder that no router asks is spared the memory of an HTTP server.
    from services.gateway.api.guard import HostGuard  # noqa: PLC0415
    from services.gateway.server import Server, connections_for  # noqa: PLC0415

    times = config.times.gateway
    hosts: Sequence[str] = (config.attach.prefix_host, *config.gateway.hosts)
    app = HostGuard(prefixes, hosts, times.linger_s)
    async with asyncio.TaskGroup() as tasks:
        server = Server(app, connections_for(MAX_PREFIX_CONNECTIONS, times), None)
        tasks.create_task(server.serve([sock]), name="prefixes")
        await server.ready.wait()
        try:
            yield
        finally:
            server.stop()
