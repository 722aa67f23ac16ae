"""The training forward pass: log-probabilities of packed rows."""
