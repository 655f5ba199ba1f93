"""Members of a mesh whose broker is one's own: each has a key of one name, which ends, and can be revoked before.

The keys from which they are made stay where `kvmesh bus-config` has written them.
"""

import contextlib
import re
import time
from collections.abc import Generator
from pathlib import Path

import msgspec

from schemas.ids import is_subject_token
from schemas.permissions import GUESTS, SERVICE_NAMES
from schemas.subjects import Role
from services.errors import UserError
from services.files import private_folder, replace_private
from services.trust import nats_jwt
from services.trust.certificates import CA_FILE
from services.trust.keys import (
    BROKER_FILE,
    MESH_FILE,
    Made,
    MeshKey,
    RoleKey,
    credentials_file,
    key_file,
    load_role_key,
    read_key,
)


def add_member(folder: Path, name: str, life_s: int) -> Path:
    """Write the key of a member, for so long and in place of the one before, and return the folder that it needs. That
    has the broker's CA too, where there is one. Guests' own, `observer`, `operator` and `indexer`, lie in `folder`
    itself. Raises UserError."""
    role = role_of_member(name)
    mesh = read_key(folder / MESH_FILE, MeshKey)
    if role in GUESTS and role not in mesh.people:
        raise UserError(
            f"the keys in {folder} were made before there was an {role}: `kvmesh bus-config` makes new ones"
        )
    # Find the key that signs: guests' seeds are in the mesh's file alone, a service's role has a key file.
    if role in GUESTS:
        signing = RoleKey(role=role, account=mesh.account, seed=mesh.people[role])
    else:
        signing = load_role_key(key_file(folder, role))
    credentials = signing.identity(name, life_s).credentials
    user = nats_jwt.user_of(credentials)
    # The record comes first: what is not in it cannot be revoked.
    living = tuple(made for made in mesh.members.get(name, ()) if made.ends_s > time.time())
    made = Made(public=user.sub, ends_s=user.iat + life_s)
    own = folder if role in GUESTS and name == role else folder / name
    with _written(folder):
        members = {**mesh.members, name: (*living, made)}
        replace_private(folder / MESH_FILE, msgspec.json.encode(msgspec.structs.replace(mesh, members=members)))
        private_folder(own)
        # Write what the member gets, without the role's seed: with that it could be any member of the role.
        if role in GUESTS:
            replace_private(credentials_file(own, role), credentials.encode())
        else:
            key = msgspec.structs.replace(signing, seed="", name=name, credentials=credentials)
            replace_private(key_file(own, role), msgspec.json.encode(key))
        if own != folder and (folder / CA_FILE).exists():
            replace_private(own / CA_FILE, (folder / CA_FILE).read_bytes())
    return own


def revoke_member(folder: Path, name: str) -> None:
    """Have the broker take no key any more that this member has been given: it does once it has read its configuration
    again. Raises UserError where it has none."""
    mesh = read_key(folder / MESH_FILE, MeshKey)
    now_s = int(time.time())
    living = [made for made in mesh.members.get(name, ()) if made.ends_s > now_s and not made.revoked_s]
    if not living:
        raise UserError(
            f"{name!r} has no key of its own that still is of use: `kvmesh bus-config {folder} --member {name}` makes "
            "one; whoever has its role's whole key can only be locked out with new keys for all"
        )
    # Revoked is what was made until a moment. Clocks are set back: no key is made after its own end.
    users = tuple(msgspec.structs.replace(made, revoked_s=made.ends_s) for made in living)
    mesh = msgspec.structs.replace(mesh, members={**mesh.members, name: users})
    path = folder / BROKER_FILE
    with _written(folder):
        config = path.read_text("utf-8")
        replaced, num_replaced = re.subn(rf"(?m)^(\s*{mesh.account}:\s*)\S+", rf"\g<1>{mesh.account_token()}", config)
        if num_replaced != 1:
            raise UserError(f"{path} does not name this mesh: put back what `kvmesh bus-config` has written")
        replace_private(path, replaced.encode())
        replace_private(folder / MESH_FILE, msgspec.json.encode(mesh))


def role_of_member(name: str) -> Role:
    """Return the role that a member's name gives. Raises UserError."""
    kinds = {kind: role for role, kinds in SERVICE_NAMES.items() for kind in kinds} | {role: role for role in GUESTS}
    kind = name.partition("-")[0]
    if kind not in kinds or not is_subject_token(name):
        raise UserError(f"--member {name!r} must begin with what it is, as decode-0 does: {', '.join(kinds)}")
    return kinds[kind]


@contextlib.contextmanager
def _written(folder: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"the keys in {folder} cannot be written: {error.strerror}") from error
