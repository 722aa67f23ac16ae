"""HTTP servers that users can also run alone."""
