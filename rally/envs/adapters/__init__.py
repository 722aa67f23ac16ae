"""Adapters for environments of other packages. `rally.envs.registry` imports them by name."""
