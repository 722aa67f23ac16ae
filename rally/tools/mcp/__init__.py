"""Tools of MCP servers: settings, connections, and the tools themselves."""
