"""mini-swe-agent on small generated repositories; hidden tests give the reward."""
