"""Recipe: two-round triage, with a custom agent loop, tool and reward as a user would write them."""
