"""Tells the servers of a broker what has been revoked, as a user of the broker's own account."""

import time
from pathlib import Path

import msgspec

from schemas.permissions import inbox_of
from schemas.subjects import Role
from services.bus.base import BusError, NoRespondersError
from services.bus.nats import NatsBus
from services.errors import UserError
from services.trust.certificates import ca_file
from services.trust.keys import BROKER_FILE, MESH_FILE, BusAccess, Identity, MeshKey, read_key
from services.trust.nats_jwt import CLAIMS_UPDATE, pair_of, system_credentials

PUSHER = "push"
PUSH_LIFE_S = 300
PUSH_TIMEOUT_S = 5.0


async def push_account(folder: Path, url: str) -> dict[str, str]:
    """Tell each server of a list what the mesh of these keys is now; return what became of it, "": it took it. Each is
    asked by itself: who answers of several cannot be chosen. Raises UserError for keys that cannot."""
    mesh = read_key(folder / MESH_FILE, MeshKey)
    if not mesh.system_seed:
        path = folder / BROKER_FILE
        raise UserError(f"the keys in {folder} were made before there was --push: have each server read {path} again")
    ends_s = int(time.time()) + PUSH_LIFE_S
    credentials = system_credentials(pair_of(mesh.system_seed), PUSHER, inbox_of(Role.OPERATOR, PUSHER), ends_s)
    access = BusAccess(url, Identity(role=Role.OPERATOR, name=PUSHER, credentials=credentials), ca_file(folder))
    token, found = mesh.account_token().encode(), dict[str, str]()
    for server in access.servers:
        try:
            bus = await NatsBus.connect(access._replace(url=server), PUSHER)
        except UserError as error:
            found[server] = str(error)
            continue
        try:
            reply = await bus.request(CLAIMS_UPDATE, token, {}, PUSH_TIMEOUT_S)
            error = msgspec.json.decode(reply.payload, type=_Taken).error
            found[server] = "" if error is None else error.description
        except NoRespondersError:
            found[server] = "keeps accounts in its configuration only: have it read that again"
        except (BusError, msgspec.DecodeError) as error:
            found[server] = str(error)
        finally:
            await bus.close()
    return found


class _Problem(msgspec.Struct):
    description: str = "refused"


class _Taken(msgspec.Struct):
    """What a server says of an account's next token (nats-server, `server/accounts.go`)."""

    error: _Problem | None = None
