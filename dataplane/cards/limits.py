"""Times and limits of KV on cards. Seconds, bytes, counts."""

CARD_S = 30.0
"""A card that has not done by then what was put on a stream is taken for broken."""
MAX_MARKS = 128
"""Marks that are remembered, more than a model has layers: who asks for an earlier one asks for the oldest of these."""
MAX_OPENED = 64
"""Holders whose memory a reader has open at once."""

CUDA_FRAME_BYTES = 128 << 20
"""Payload of a frame between cards that see each other's memory: nothing is staged."""
NCCL_FRAME_BYTES = 16 << 20
"""Payload of a frame over NCCL, and of the buffer on either card through which it goes."""

JOIN_S = 20.0
"""A communicator is made by then, or its pair is broken."""
MAX_PAIRS = 16
"""Communicators that either end keeps; the one that was used first is aborted for one more."""
MAX_LOST_CALLS = 4
"""Calls of NCCL that do not come back: with so many of them this process makes no more communicators."""
LAST_FRAME_S = 0.2
"""A frame that was on its way as its holder ended has come by then, or never does."""
