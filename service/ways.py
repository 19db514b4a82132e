"""1 edge, what serves each kind of proxied route: through the queue, or straight to a worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from service.central_queue import CentralQueue
from service.exchange import Handler
from service.forwarder import Forwarder
from service.light import LightConfig, LightPath
from service.light_route import LightRoute
from service.owners import Owners
from service.queued_route import QueuedRoute, ReadingConfig
from service.surface import Way


@dataclass(frozen=True, slots=True, kw_only=True)
class Doors:
    """What proxied requests go through.

    Attributes:
        queue: for those that generate.
        light: for the others.
        forwarder: to the workers.
        context_tokens: longest context of a model, if known.
    """

    queue: CentralQueue
    light: LightPath
    forwarder: Forwarder
    context_tokens: Callable[[str], int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """How each kind of proxied route is served."""

    queued: QueuedRoute
    light: LightRoute

    def find(self, way: Way) -> Handler:
        """Who serves a way."""
        return self.queued if way is Way.QUEUED else self.light

    def reconfigure(self, config: ReadingConfig) -> None:
        """Read bodies otherwise, from the next request on."""
        self.queued.config = self.light.config = config


def make_ways(doors: Doors, config: ReadingConfig, light: LightConfig) -> Ways:
    """Build how each kind of proxied route is served."""
    owners = Owners(entries_max=light.responses_max, ttl_s=light.responses_ttl_s)
    queued = QueuedRoute(
        queue=doors.queue,
        forwarder=doors.forwarder,
        owners=owners,
        context_tokens=doors.context_tokens,
        config=config,
    )
    straight = LightRoute(
        light=doors.light, forwarder=doors.forwarder, owners=owners, config=config
    )
    return Ways(queued=queued, light=straight)
