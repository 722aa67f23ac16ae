"""Recipe: solve mathematics problems by running code."""
