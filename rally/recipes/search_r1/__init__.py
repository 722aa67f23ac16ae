"""Recipe: answer multi-hop questions with a search tool."""
