"""A front end's app, linked to a server in the same process through the messages that they would exchange."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.types import ASGIApp

from serve_llm.common.options.sources import make_options
from serve_llm.server.adapters.registry import AdapterRegistry
from serve_llm.server.app import create_front_end_app
from serve_llm.server.engines.replicas import Replicas
from serve_llm.server.front_ends import messages
from serve_llm.server.front_ends.dispatcher import RemoteDispatcher
from serve_llm.server.front_ends.relay import Relay
from serve_llm.server.generate.dispatcher import LocalDispatcher
from serve_llm.server.metrics.meter import Clock, ServerCounts
from serve_llm.server.prompt.pool import PromptPool
from serve_llm.server.tracing.tracing import Tracing
from support.serving import Served


@dataclass
class LinkedFrontEnd:
    app: ASGIApp
    dispatcher: RemoteDispatcher
    relay: Relay
    counts: ServerCounts
    prompts: PromptPool

    def update(self, served: Served) -> None:
        """Tell the front end the state of the engines, as the server does when it changes."""
        replicas = find_replicas(served)
        self.dispatcher.update(messages.EngineState(served.admission.obstacle, replicas.outage, served.admission.pace))


def find_replicas(served: Served) -> Replicas:
    return served.admission._replicas


def link(
    served: Served, number: int = 1, options: dict[str, object] | None = None, tracing: Tracing | None = None
) -> LinkedFrontEnd:
    """Link a front end to `served`. number: of the front end. options: those that `served` has."""
    replicas = find_replicas(served)

    def send_to_relay(message: messages.FromFrontEnd) -> None:
        decoded = messages.decode_from_front_end(messages.encode(message))
        asyncio.get_running_loop().call_soon(receive_from_front_end, decoded)

    def receive_from_front_end(message: messages.FromFrontEnd) -> None:
        if isinstance(message, messages.Open):
            relay.open(message)
        elif isinstance(message, messages.AbortRequests):
            relay.abort(message)
        else:
            assert isinstance(message, messages.Close)
            relay.close_generation(message)

    def send_to_front_end(message: messages.ToFrontEnd) -> None:
        decoded = messages.decode_to_front_end(messages.encode(message))
        asyncio.get_running_loop().call_soon(receive_from_relay, decoded)

    def receive_from_relay(message: messages.ToFrontEnd) -> None:
        if isinstance(message, messages.RelayedOutputs):
            dispatcher.deliver(message)
        elif isinstance(message, messages.Replays):
            dispatcher.note_replays(message)
        else:
            assert isinstance(message, messages.Rejected)
            dispatcher.reject(message)

    relay = Relay(LocalDispatcher(replicas, served.admission), len(replicas.engines), send_to_front_end)
    dispatcher = RemoteDispatcher(replicas.model_info, len(replicas.engines), number, send_to_relay, Clock())
    adapters = AdapterRegistry(replicas.model_info, 16, served.model.names)
    built = create_front_end_app(
        dispatcher, served.model, make_options("demo", **(options or {})), adapters, dispatcher.refused, tracing, 0
    )
    return LinkedFrontEnd(built.app, dispatcher, relay, built.counts, built.prompts)
