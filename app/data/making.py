"""What a batch of rows becomes, by format, template and tokenizer. It counts and writes nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from app.config.schema import DatasetConfig
from app.data.encoding import Encoder, Sample
from app.data.formats import empty_parts, read_row
from app.data.rendering import Drafts, Renderer
from app.data.shapes import Broken, Draft, Located, Row, RowProblem
from app.data.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Made:
    """Of one row: its texts and their tokens, or why it is bad."""

    place: str
    drafts: Drafts
    samples: Sequence[Sample] = ()
    problem: str = ""


class Maker:
    """One dataset's settings and one tokenizer."""

    def __init__(self, config: DatasetConfig, tokenizer: Tokenizer) -> None:
        self._config = config
        self._encoder = Encoder(tokenizer)
        self._renderer = Renderer(tokenizer, config.train_on, config.on_unstable_template)

    def __call__(self, rows: Sequence[Located]) -> Iterator[Made]:
        """One for each row, in their order."""
        drafted = [self._drafted(place, row) for place, row in rows]
        texts = [draft for drafts in drafted if isinstance(drafts, Drafts) for draft in drafts.samples]
        samples = iter(self._encoder.encode(texts))
        for (place, _), drafts in zip(rows, drafted, strict=True):
            if isinstance(drafts, Drafts):
                own = [next(samples) for _ in drafts.samples]
                yield Made(place, drafts, own, _nothing_trained(drafts.samples, own))
            else:
                yield Made(place, Drafts([]), problem=drafts)

    def _drafted(self, place: str, row: Row | Broken) -> Drafts | str:
        """The texts of a row, or why it has none."""
        if isinstance(row, Broken):
            return row.reason
        try:
            content = read_row(row, self._config.format, self._config.columns)
            drafts = self._renderer.drafts(content, place)
            empty = empty_parts(row, content, self._config.format, self._config.columns)
            drafts = replace(drafts, empty=tuple(empty))
            for draft in drafts.samples:
                for text in (draft.text, draft.second or "", draft.label or ""):
                    text.encode()
        except RowProblem as problem:
            return str(problem)
        except UnicodeEncodeError as error:  # JSON can say "\\ud800", which no text has
            return f"holds half a character: {error.object[error.start]!r}"
        return drafts


def _nothing_trained(drafts: list[Draft], made: list[Sample]) -> str:
    """Why a row teaches nothing; empty if each of its samples does."""
    for draft, sample in zip(drafts, made, strict=True):
        if sample.label is not None:
            if not len(sample.ids):
                return "the tokenizer makes no token of it"
            continue
        trained = int(sample.trained.sum())
        if not trained:
            return "no token of it is trained"
        if draft.raw and sample.glued and trained == 1:
            return (
                "the completion is one token with the end of the prompt, so it cannot be trained; move white"
                " space from the end of the prompt to the beginning of the completion"
            )
    return ""
