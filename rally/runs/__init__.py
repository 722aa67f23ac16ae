"""The runs behind the commands: train, evaluate, supervised fine-tuning and dry run."""
