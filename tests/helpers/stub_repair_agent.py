"""An agent in the place of mini-swe-agent: two requests to the policy, no change, and the hidden tests."""

import json
from typing import Any

from rally.recipes.repair.hidden_tests import passes_hidden_tests, patch_of


def run(row: dict[str, Any], client: Any) -> dict[str, Any]:
    files = json.loads(row["extra_info"]["files"])
    messages = list(row["prompt"])
    for _ in range(2):  # the second request exceeds the length of the small response, which ends the episode
        reply = client.sync_openai(max_retries=0).chat.completions.create(model=client.model, messages=messages)
        messages += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "And?"}]
    passed = passes_hidden_tests(files, row["extra_info"]["test"])
    return {"reward": float(passed), "exit_status": "Submitted", "steps": 1, "patch": patch_of(files, files)}
