"""`python -m rally` is the command `rally`."""

from rally.cli import main

main()
