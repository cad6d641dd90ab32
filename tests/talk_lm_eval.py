"""What lm-evaluation-harness asks of a server: `python talk_lm_eval.py TOKENIZER_FOLDER BASE_URL`. Prints one JSON
object of what it heard with requests of one prompt each, and of four.

Stands alone, for an interpreter that has lm-eval; the project needs none.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

SCORED = [
    ("", "a"),
    ("2 + 2 =", " 4"),
    ("The capital of France is", " Paris"),
    ("b", "cd efg"),
    ("x y", " z"),
    ("q", ""),
]
ASKED = ["one", "two words", "three words here", "a b c d", "five"]


def talk(folder: str, base_url: str) -> dict[str, Any]:
    client: Any = importlib.import_module("lm_eval.models.openai_completions")
    instance: Any = importlib.import_module("lm_eval.api.instance").Instance
    scored = [instance("loglikelihood", {}, pair, place) for place, pair in enumerate(SCORED)]
    until = {"until": [".", "\n"], "max_gen_toks": 24, "temperature": 0}
    asked = [instance("generate_until", {}, (prompt, until), place) for place, prompt in enumerate(ASKED)]
    heard: dict[str, Any] = {}
    for batch_size in (1, 4):
        made = client.LocalCompletionsAPI(
            model="tiny", base_url=f"{base_url}/completions", tokenizer=folder, tokenizer_backend="huggingface",
            batch_size=batch_size, num_concurrent=1, max_retries=1, max_length=2048,
        )  # fmt: skip
        likelihoods = [list(each) for each in made.loglikelihood(scored)]
        heard[str(batch_size)] = {"likelihoods": likelihoods, "answers": made.generate_until(asked)}
    return heard


if __name__ == "__main__":
    sys.stdout.write(json.dumps(talk(sys.argv[1], sys.argv[2])) + "\n")
