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
    told: bool = False  # at the end of a run; all shares are

    @property
    def is_share(self) -> bool:
        """Whether it lies between 0 and 1."""
        return self.format.endswith("%")

    @property
    def may_lack(self) -> bool:
        """Whether there may be nothing to take it of: no answers, or numbers that are all alike."""
        return self.is_share or self.told

    def cost(self, value: float) -> float:
        """The value as a number of which less is better; the cost of a cost is the value."""
        return value if self.better == "lower" else -value

    def text(self, value: float) -> str:
        """The number for people."""
        return f"{value:{self.format}}"


_ALL = (
    Metric("eval_loss", "loss", ".4f", "lower", "mean over trained tokens, or over answers or pairs of them"),
    Metric("perplexity", "perplexity", ".4g", "lower", "exp of the loss", logged=False),
    Metric("token_accuracy", "token accuracy", ".2%", "higher", "share of the trained tokens", logged=False),
    Metric("exact_match", "exact match", ".2%", "higher", "share of the held-out answers"),
    Metric("accuracy", "accuracy", ".2%", "higher", "share of the held-out answers, or of their words"),
    Metric("pair_accuracy", "pair accuracy", ".2%", "higher", "share of the pairs whose wanted answer is preferred"),
    Metric("reward_margin", "reward margin", ".3f", "higher", "reward of the wanted answer less that of the other"),
    Metric("chosen_reward", "reward of wanted answers", ".3f", "higher", "mean of the answers"),
    Metric("rejected_reward", "reward of unwanted answers", ".3f", "lower", "mean of the answers"),
    Metric("chosen_log_probability", "wanted answers", ".3f", "higher", "mean log-probability of a token"),
    Metric("rejected_log_probability", "unwanted answers", ".3f", "lower", "mean log-probability of a token"),
    Metric("macro_f1", "macro F1", ".2%", "higher", "mean of the labels"),
    Metric("micro_f1", "micro F1", ".2%", "higher", "of all labels of all rows together"),
    Metric("entity_f1", "entity F1", ".2%", "higher", "of all entities of tagged words, by seqeval's rule"),
    Metric("mae", "mean absolute error", ".4g", "lower", "mean over the numbers of the held-out rows", told=True),
    Metric("pearson", "Pearson", ".4f", "higher", "correlation of true and predicted numbers", told=True),
    Metric("spearman", "Spearman", ".4f", "higher", "correlation of their ranks", told=True),
)


def cost_of(objective: float, name: str | None) -> float:
    """An objective as a number of which less is better; without a name it is a loss."""
    return objective if name is None else METRICS[name].cost(objective)


METRICS: dict[str, Metric] = {metric.name: metric for metric in _ALL}
LOGGED = tuple(metric.name for metric in _ALL if metric.logged)
TOLD = tuple(metric for metric in _ALL if metric.logged and metric.may_lack)
