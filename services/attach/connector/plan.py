"""What the scheduler half has the worker half do in one step of vLLM's. Pickled from one process to the other."""

from dataclasses import dataclass, field
from typing import NamedTuple

from schemas.ids import BlockHash


@dataclass(frozen=True, slots=True)
class Load:
    """Copy these slots of the arena into these pages, after the step; `digests`: what must be in the pages then."""

    request: str
    number: int
    slots: tuple[int, ...]
    pages: tuple[int, ...]
    digests: tuple[bytes, ...]
    hashes: tuple[BlockHash, ...]


class Save(NamedTuple):
    """Copy this page, which the step fills, into an empty slot."""

    page: int
    slot: int
    block_hash: BlockHash


class Compare(NamedTuple):
    """This page, which the step fills, is to hold what lies in this slot."""

    page: int
    slot: int
    block_hash: BlockHash
    digest: bytes


@dataclass(slots=True)
class StepPlan:
    """`attachment`: that the slots are of."""

    attachment: str = ""
    loads: list[Load] = field(default_factory=list[Load])
    saves: list[Save] = field(default_factory=list[Save])
    compares: list[Compare] = field(default_factory=list[Compare])
