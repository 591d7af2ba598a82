"""Reads a GGUF file by llama.cpp: run as a process of its own that imports nothing of this program.

python llama_cpp.py PLAN.json      writes tokens, log-probabilities and likeliest tokens as JSON
"""

import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

_FORCED = 1e9  # added to the logit of the token that is to come; log-probabilities are those before


class Model:
    """A file in a server of llama.cpp within this process, on an address of this machine."""

    def __init__(self, plan: dict[str, Any]) -> None:
        import xllamacpp

        settings: Any = xllamacpp.CommonParams()
        settings.model.path = plan["model"]
        settings.n_ctx = max([len(row["ids"]) for row in plan["rows"]], default=0) + 64
        settings.n_gpu_layers = 0
        settings.n_parallel = 1
        settings.cpuparams.n_threads = plan["threads"] or os.cpu_count() or 1
        settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        settings.warmup = False
        settings.use_jinja = True
        settings.verbosity = 0
        self._server: Any = xllamacpp.Server(settings)
        self._plain, self._number = plan["plain"], plan["number"]

    def ask(self, path: str, content: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self._server.listening_address + path, json.dumps(content).encode(), {"Content-Type": "application/json"}
        )
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(request) as answer:
            return json.load(answer)

    def tokens(self, text: str, *, add_special: bool) -> list[int]:
        found: list[int] = self.ask("/tokenize", {"content": text, "add_special": add_special, "parse_special": True})[
            "tokens"
        ]
        return found

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """The tokens of a conversation that an answer is to follow."""
        return self.tokens(self.ask("/apply-template", {"messages": messages})["prompt"], add_special=True)

    def next_token(self, ids: list[int], target: int) -> tuple[float, int]:
        """The log-probability of a token after others, and the likeliest one."""
        found = self._forced(ids, target, 1) or self._forced(ids, self._plain, self._number)
        known = {each["id"]: each["logprob"] for each in [found, *found["top_logprobs"]]}
        return known[target], found["top_logprobs"][0]["id"]

    def _forced(self, ids: list[int], token: int, likeliest: int) -> Any:
        """What is told of a token that must come, and of the likeliest; None for one that begins a character."""
        asked = {"prompt": ids, "n_predict": 1, "n_probs": likeliest, "temperature": 0, "cache_prompt": True}
        answer = self._server.handle_completions({**asked, "logit_bias": [[token, _FORCED]]})
        if "choices" not in answer:
            raise RuntimeError(json.dumps(answer))
        told = answer["choices"][0]["logprobs"]
        return None if told is None else told["content"][0]


def main() -> None:
    """Read the plan that the only argument names, and write what was found."""
    plan = json.loads(Path(sys.argv[1]).read_text())
    model = Model(plan)
    rows = []
    for row in plan["rows"]:
        found = [
            model.next_token(row["ids"][: at + 1], target) for at, target in zip(row["at"], row["targets"], strict=True)
        ]
        rows.append({"logprobs": [each for each, _ in found], "choices": [token for _, token in found]})
    result = {
        "texts": [model.tokens(text, add_special=False) for text in plan["texts"]],
        "chats": [model.prompt(messages) for messages in plan["chats"]],
        "rows": rows,
    }
    Path(plan["out"]).write_text(json.dumps(result))
    ours = [name for name in sys.modules if name.split(".")[0] == "app"]
    assert not ours, f"not a fresh process: {ours}"


if __name__ == "__main__":
    main()
