"""Two-round triage: a loop, a tool and a reward of one's own, as a user would write them."""
