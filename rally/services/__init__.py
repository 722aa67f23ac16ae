"""HTTP servers, also usable on their own: the engine, retrieval and the sandbox."""
