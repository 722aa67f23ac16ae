"""Codecs over real tokenizers and the tiny one, built once per session."""

from loop_codecs import codecs, tiny

__all__ = ["codecs", "tiny"]
