"""The part of the sandbox that runs inside the isolation, never in the trainer. It does not trust the program."""
