"""The kernels of the GPU forward: each rounds exactly where the Hugging Face module it stands for rounds."""
