"""What a simulated mesh runs on, in place of an operating system and a network.

Virtual time (`clock`), an event loop with processes (`loop`), threads that take turns (`threads`), a message bus
(`bus`), connections and a data plane (`connection`, `plane`), an engine's thread (`engine`). Bus and connections fail
as they are set to.
"""
