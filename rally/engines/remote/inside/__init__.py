"""Code that runs inside a launched vLLM or SGLang server, whose Python need not have Rally."""
