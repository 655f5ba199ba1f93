"""A plain KV connector for vLLM's own prefill and decode servers: the prompt's blocks are pulled over TCP once it is
computed. vLLM loads it by name (`vllm_peers.py`); nothing of the mesh is in it.

The decode server's worker asks for blocks with one line of JSON and gets their bytes, a layer at a time;
with the last byte the prefill server may free them. Reads run on threads beside vLLM's steps.
"""

import json
import queue
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus

HOST = "127.0.0.1"
KEPT_S = 30.0
"""How long a prompt's blocks wait for their reader."""
CONNECT_TIMEOUT_S = 5.0


@dataclass
class Address(KVConnectorHandshakeMetadata):
    """Where a worker serves its blocks."""

    port: int


@dataclass
class Reads(KVConnectorMetadata):
    """What the scheduler's half tells the worker's. `read`: by request, its blocks here and where they come from;
    nothing is to be read where the list is empty. `keep`: requests whose blocks wait for a reader."""

    read: dict[str, tuple[list[int], dict[str, Any]]] = field(default_factory=dict)
    keep: list[str] = field(default_factory=list)


class TcpConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._next = Reads()
        self._port = 0
        self._layers: list[torch.Tensor] = []
        self._kept: dict[str, float] = {}
        self._was_read: set[str] = set()
        self._sent: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._received: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()
        if role == KVConnectorRole.WORKER:
            self._listening = socket.create_server((HOST, 0))
            threading.Thread(target=self._accept, daemon=True).start()

    # The scheduler's half.

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self._port = metadata[0].port

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if not (request.kv_transfer_params or {}).get("do_remote_prefill"):
            return 0, False
        num_tokens = len(request.prompt_token_ids) - num_computed_tokens
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        params = request.kv_transfer_params or {}
        if params.pop("do_remote_prefill", False):
            wanted = blocks.get_unhashed_block_ids_all_groups()[0] if num_external_tokens else []
            self._next.read[request.request_id] = (list(wanted), dict(params))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        made, self._next = self._next, Reads()
        return made

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_decode") or request.status != RequestStatus.FINISHED_LENGTH_CAPPED:
            return False, None
        self._next.keep.append(request.request_id)
        return True, {
            "do_remote_prefill": True,
            "remote_request_id": request.request_id,
            "remote_block_ids": list(block_ids[0]),
            "remote_port": self._port,
        }

    # The worker's half.

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata:
        return Address(self._listening.getsockname()[1])

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._layers = [
            cache.view(cache.shape[0], -1).view(torch.uint8) for _, cache in sorted(kv_caches.items())
        ]  # in one order at both ends

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        told = self._get_connector_metadata()
        assert isinstance(told, Reads)
        self._kept |= dict.fromkeys(told.keep, time.monotonic() + KEPT_S)
        for name, (blocks, params) in told.read.items():
            threading.Thread(target=self._read, args=(name, blocks, params), daemon=True).start()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """vLLM begins a request once all of it is loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are read where they lie."""

    def wait_for_save(self) -> None:
        """As above."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results, now = KVConnectorTransferResults(), time.monotonic()
        self._was_read.update(_drained(self._sent))  # a reader may be quicker than the word that it is waited for
        results.finished_sending = {n for n, until in self._kept.items() if n in self._was_read or until < now}
        self._was_read -= results.finished_sending
        for name in results.finished_sending:
            del self._kept[name]
        for name, is_whole in _drained(self._received):
            results.finished_recving.add(name)
            if not is_whole:
                results.failed_recving.add(name)
        return results

    def _read(self, name: str, blocks: list[int], params: dict[str, Any]) -> None:
        remote = params["remote_block_ids"][-len(blocks) :] if blocks else []
        is_whole = True
        try:
            with socket.create_connection((HOST, params["remote_port"]), timeout=CONNECT_TIMEOUT_S) as sock:
                asked = {"request": params["remote_request_id"], "blocks": remote}
                sock.sendall(json.dumps(asked).encode() + b"\n")
                at = torch.tensor(blocks)
                for layer in self._layers if blocks else ():
                    landed = torch.empty(len(blocks), layer.shape[1], dtype=torch.uint8)
                    _receive(sock, memoryview(landed.numpy()).cast("B"))
                    layer[at] = landed
        except OSError:
            is_whole = False
        if blocks:
            self._received.put((name, is_whole))

    def _accept(self) -> None:
        while True:
            sock, _ = self._listening.accept()
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, sock.makefile("rb") as lines:
            asked = json.loads(lines.readline())
            at = torch.tensor(asked["blocks"], dtype=torch.long)
            for layer in self._layers if asked["blocks"] else ():
                sock.sendall(memoryview(layer[at].numpy()).cast("B"))
            self._sent.put(asked["request"])


def _receive(sock: socket.socket, into: memoryview) -> None:
    """Fill the memory. Raises ConnectionError where the other end leaves before."""
    while into:
        count = sock.recv_into(into)
        if not count:
            raise ConnectionError("the prefill server has left")
        into = into[count:]


def _drained(filled: "queue.SimpleQueue[Any]") -> list[Any]:
    return [filled.get_nowait() for _ in range(filled.qsize())]
