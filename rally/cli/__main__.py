"""`python -m rally.cli` is the command `rally`."""

from rally.cli.main import main

main()
