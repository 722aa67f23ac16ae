"""Model code that rollout and training share: loading, attention, fused layers, LoRA, vision, kernels."""
