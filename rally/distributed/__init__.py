"""The same run over several processes, each with its part of the weights."""

from rally.distributed.launch import sft, train

__all__ = ["sft", "train"]
