"""Benchmarks. Each speed claimed in the documentation is measured against an alternative in the same run."""
