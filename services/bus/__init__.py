"""The message bus: one small protocol, NATS and memory behind it, and the typed bus that services use."""
