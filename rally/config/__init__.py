"""A run is fully described by one typed, validated object; unknown or ineffective keys are errors."""

from rally.config.errors import ConfigError
from rally.config.load import load_config, load_sft_config, read_config
from rally.config.schema import Config
from rally.config.sft import SftConfig

__all__ = ["Config", "ConfigError", "SftConfig", "load_config", "load_sft_config", "read_config"]
