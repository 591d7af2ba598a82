"""Program that reads a GGUF file with llama.cpp, in a process that imports nothing of this package.

python llama_cpp.py PLAN.json      write tokens, log-probabilities and most likely tokens as JSON
"""

import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

_FORCED = 1e9  # added to the logit of the next token; reported log-probabilities are without it


class Model:
    """GGUF file in a llama.cpp server of this process, on a local address."""

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
        answer = self.ask("/tokenize", {"content": text, "add_special": add_special, "parse_special": True})
        ids: list[int] = answer["tokens"]
        return ids

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the tokens of a conversation up to the start of the next answer."""
        return self.tokens(self.ask("/apply-template", {"messages": messages})["prompt"], add_special=True)

    def next_token(self, ids: list[int], target: int) -> tuple[float, int]:
        """Return the log-probability of a token after others, and the most likely token."""
        forced = self._forced(ids, target, 1) or self._forced(ids, self._plain, self._number)
        logprobs = {token["id"]: token["logprob"] for token in [forced, *forced["top_logprobs"]]}
        return logprobs[target], forced["top_logprobs"][0]["id"]

    def _forced(self, ids: list[int], token: int, likeliest: int) -> Any:
        """Return the log-probabilities of a forced token and the likeliest ones; None if it starts a character."""
        request = {"prompt": ids, "n_predict": 1, "n_probs": likeliest, "temperature": 0, "cache_prompt": True}
        answer = self._server.handle_completions({**request, "logit_bias": [[token, _FORCED]]})
        if "choices" not in answer:
            raise RuntimeError(json.dumps(answer))
        logprobs = answer["choices"][0]["logprobs"]
        return None if logprobs is None else logprobs["content"][0]


def main() -> None:
    """Read the plan of the only argument and write the results."""
    plan = json.loads(Path(sys.argv[1]).read_text())
    model = Model(plan)
    rows = []
    for row in plan["rows"]:
        tokens = [
            model.next_token(row["ids"][: at + 1], target) for at, target in zip(row["at"], row["targets"], strict=True)
        ]
        rows.append({"logprobs": [logprob for logprob, _ in tokens], "choices": [token for _, token in tokens]})
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
