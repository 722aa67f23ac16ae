"""Ten families of reasoning-gym in one run, with held-out seeds and families that are never trained."""
