"""Loads and validates the configuration of a run.

One typed, frozen object describes the whole run. Unknown keys and keys without effect are errors.
"""

from rally.config.errors import ConfigError
from rally.config.load import load_config, load_sft_config, read_config
from rally.config.schema import Config
from rally.config.sft import SftConfig

__all__ = ["Config", "ConfigError", "SftConfig", "load_config", "load_sft_config", "read_config"]
