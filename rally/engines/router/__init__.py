"""One engine over several servers: routing, failover, and what is known of each server."""

from rally.engines.router.router import Router

__all__ = ["Router"]
