"""Guarantees: nothing here trusts the program it runs. These files run inside the isolation, never in the trainer."""
