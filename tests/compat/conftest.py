"""Codecs over real tokenizers and the tiny one, made once."""

from loop_codecs import codecs, tiny

__all__ = ["codecs", "tiny"]
