"""Data of the demo: sums that are easy with a calculator."""
