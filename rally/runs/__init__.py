"""What the commands do: train, evaluate, fine-tune, dry-run."""
