"""Tool use in generated tasks: single, parallel and irrelevant calls, and dialogues over a small world. Evaluated on
BFCL, of which nothing is trained on."""
