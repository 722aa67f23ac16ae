"""Training: policy, packing, update, the fit loop, validation, checkpoints, supervised fine-tuning."""
