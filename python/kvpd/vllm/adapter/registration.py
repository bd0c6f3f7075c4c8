"""vLLM's register of connectors."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory


def register(connector: type) -> None:
    """Let vLLM find a connector by its class's name alone.

    MultiConnector looks up so, without the module path, who reads the statistics of its children.
    """
    if connector.__name__ not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            connector.__name__, connector.__module__, connector.__name__
        )
