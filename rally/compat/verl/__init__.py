"""What code and configurations written for verl need."""
