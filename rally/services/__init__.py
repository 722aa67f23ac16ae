"""Guarantees: HTTP servers that users can also run alone, closed to strangers."""
