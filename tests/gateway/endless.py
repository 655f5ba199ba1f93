"""Requests of which some part never ends, byte for byte as they come over the wire."""

GENERATE = "/v1/completions"


def head(path: str = GENERATE, **headers: str) -> bytes:
    named = {"host": "localhost", "content_type": "application/json", **headers}
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in named.items())
    return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode()


def chunked(*parts: bytes, **headers: str) -> bytes:
    return head(transfer_encoding="chunked", **headers) + b"".join(parts)


def prompt_of(num_bytes: int) -> bytes:
    return b'{"model": "demo_model", "max_tokens": 1, "prompt": "' + b"x" * num_bytes + b'"}'


def endless(**headers: str) -> dict[str, tuple[bytes, bytes]]:
    """Return how each begins, and what is sent behind it again and again. `headers`: of those that have a head."""
    in_a_chunk = b"%x\r\n%b\r\n" % (len(prompt_of(4)), prompt_of(4))
    return {
        "headers": (b"GET /health HTTP/1.1\r\nhost: localhost\r\n", b"x: y\r\n"),
        "a header": (b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-long: ", b"x" * 6),
        "a first line": (b"GET /health?", b"x" * 6),
        "trailers": (chunked(in_a_chunk, b"0\r\n", **headers), b"x: y\r\n"),
        "one trailer": (chunked(in_a_chunk, b"0\r\nx: ", **headers), b"x" * 6),
        "extensions of a chunk": (chunked(b"1", **headers), b";a=b;c=d"),
        "an extension of each chunk": (chunked(**headers), b"1;a=b;c=d\r\nx\r\n"),
        "the size of a chunk": (chunked(**headers), b"0" * 6),
        "chunks of one byte": (chunked(**headers), b"1\r\nx\r\n"),
    }
