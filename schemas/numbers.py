"""How large the numbers of messages may be. What does not fit is no message: it is dropped and counted where it is
decoded, so that no sum or quotient of them can overflow.
"""

from typing import Annotated

from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=2**40)]
"""Blocks, tokens, requests: no machine has more."""
Amount = Annotated[float, Meta(ge=0, le=1e15)]
"""Milliseconds."""
Rate = Annotated[float, Meta(ge=0, le=1e15)]
"""Bytes or tokens per second; 0: not measured yet."""
Number = Annotated[int, Meta(ge=-(2**53), le=2**53)]
"""An integer that whoever is asked checks by itself, and refuses with a word where it makes no sense."""
Ms = Annotated[int, Meta(ge=0, le=2**53)]
Ns = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
BlockSize = Annotated[int, Meta(ge=1, le=2**20)]
"""Tokens of a block: never none, as much is divided by it."""
