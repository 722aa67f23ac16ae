"""The router: one engine over several servers, with session affinity, failover and health checks."""

from rally.engines.router.router import Router

__all__ = ["Router"]
