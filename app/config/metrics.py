"""Metrics of held-out rows: their names, labels and formats on screen, pages, cards and leaderboards."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of an evaluation."""

    name: str  # in metrics.jsonl and result.json
    label: str
    format: str  # of Python's format()
    better: Literal["lower", "higher"]
    meaning: str
    logged: bool = True  # in each evaluation of a run; the others when a finished run is scored

    @property
    def is_share(self) -> bool:
        """Whether it lies between 0 and 1."""
        return self.format.endswith("%")

    def text(self, value: float) -> str:
        """The number for people."""
        return f"{value:{self.format}}"


_ALL = (
    Metric("eval_loss", "loss", ".4f", "lower", "mean over trained tokens, or over answers or pairs of them"),
    Metric("perplexity", "perplexity", ".4g", "lower", "exp of the loss", logged=False),
    Metric("token_accuracy", "token accuracy", ".2%", "higher", "share of the trained tokens", logged=False),
    Metric("exact_match", "exact match", ".2%", "higher", "share of the held-out answers"),
    Metric("accuracy", "accuracy", ".2%", "higher", "share of the held-out answers"),
    Metric("pair_accuracy", "pair accuracy", ".2%", "higher", "share of the pairs whose wanted answer is preferred"),
    Metric("reward_margin", "reward margin", ".3f", "higher", "reward of the wanted answer less that of the other"),
    Metric("chosen_reward", "reward of wanted answers", ".3f", "higher", "mean of the answers"),
    Metric("rejected_reward", "reward of unwanted answers", ".3f", "lower", "mean of the answers"),
    Metric("chosen_log_probability", "wanted answers", ".3f", "higher", "mean log-probability of a token"),
    Metric("rejected_log_probability", "unwanted answers", ".3f", "lower", "mean log-probability of a token"),
    Metric("macro_f1", "macro F1", ".2%", "higher", "mean of the labels"),
)
METRICS: dict[str, Metric] = {metric.name: metric for metric in _ALL}
LOGGED = tuple(metric.name for metric in _ALL if metric.logged)
SHARES = tuple(metric for metric in _ALL if metric.logged and metric.is_share)
