"""`rally replay`: re-renders, re-scores and re-samples recorded episodes."""
