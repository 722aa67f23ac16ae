"""Training: batches, packing, the policy update, the critic, the trainer loop, rollouts and checkpoints."""
