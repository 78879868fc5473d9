"""What the journals say: rows that repeat or are missing, their order, losses, weights, steps."""

import json
from collections import Counter
from dataclasses import asdict, dataclass, field


@dataclass
class Attempt:
    """One start of a subject: the lines of each rank's journal, and how it ended."""

    records: list[list[dict]]
    killed: bool = False
    cut_file: str = ""  # the file in which it was ended
    message: str = ""  # of an end that was neither the cut nor the regular one
    refused: bool = False  # the message is a sentence to the user, not a traceback

    @property
    def start(self) -> int | None:
        """Return the step that it resumed from; None when it did not come so far."""
        return next((record["start"] for record in self.records[0] if "start" in record), None)

    @property
    def weights(self) -> str | None:
        return next((record["weights"] for record in self.records[0] if "end" in record), None)

    def steps(self) -> dict[int, "Step"]:
        """Return the steps with the rows and losses of all ranks together."""
        steps: dict[int, Step] = {}
        for records in self.records:
            for record in records:
                if "step" in record:
                    step = steps.setdefault(record["step"], Step())
                    step.rows += record["rows"]
                    step.losses.append(record["loss"])
        return steps


@dataclass
class Step:
    rows: list = field(default_factory=list)
    losses: list = field(default_factory=list)


@dataclass
class Verdict:
    """A cell of the table: the word, and what it rests on."""

    word: str
    starts: list[int | None] = field(default_factory=list)  # the step that each start resumed from
    repeated: int = 0
    missing: int = 0
    rows_repeated: list = field(default_factory=list)  # some of them
    rows_missing: list = field(default_factory=list)
    by_epoch: dict[int, tuple[int, int]] = field(default_factory=dict)  # epoch -> (repeated, missing)
    first_other_order: int | None = None  # the first step with other rows than the uncut training
    first_other_loss: int | None = None
    loss_difference: float | None = None  # the largest one
    same_weights: bool | None = None
    steps: int = 0  # more (or fewer) than the uncut training
    restarted: bool = False  # began with step 1 though it had come behind a save
    only_rows: bool = False  # losses and weights are not compared
    uncut_differs: str = ""  # the verdict on a second uncut training, where it is not the same
    cut_file: str = ""
    message: str = ""

    def as_json(self) -> dict:
        return {key: value for key, value in asdict(self).items() if value not in ("", [], {}, None, False)}


SHOWN = 12  # rows that the details name
ALL_EPOCHS = 0  # stands for the whole training in by_epoch


def effective_steps(attempts: list[Attempt]) -> dict[int, Step]:
    """Return the steps that count: one that resumes from step k throws away those behind it."""
    steps: dict[int, Step] = {}
    for attempt in attempts:
        if attempt.start is not None:
            steps = {number: step for number, step in steps.items() if number <= attempt.start}
        steps.update(attempt.steps())
    return steps


def compare(attempts: list[Attempt], uncut: Attempt, *, rows: int, order: bool = True, bits: bool = True) -> Verdict:
    """Judge a training that was cut by the uncut one.

    rows: of an epoch. order and bits say what is compared as well as the rows of each epoch: their order, losses and
    weights.
    """
    verdict = Verdict("", starts=[attempt.start for attempt in attempts], only_rows=not bits)
    verdict.cut_file = next((attempt.cut_file for attempt in attempts if attempt.cut_file), "")
    failed = next((attempt for attempt in attempts if attempt.message), None)
    if failed is not None:
        verdict.message = failed.message
        verdict.word = "refused" if failed.refused else "error"
        return verdict
    trained = effective_steps(attempts)
    expected = uncut.steps()
    verdict.restarted = 0 in verdict.starts[1:]
    verdict.steps = len(trained) - len(expected)
    _compare_rows(verdict, trained, expected, rows)
    if not order:
        verdict.first_other_order = None
    if bits:
        _compare_bits(verdict, trained, expected)
        last = [attempt.weights for attempt in attempts if attempt.weights]
        verdict.same_weights = bool(last) and last[-1] == uncut.weights
    verdict.word = word_of(verdict)
    return verdict


def _compare_rows(verdict: Verdict, trained: dict[int, Step], expected: dict[int, Step], rows: int) -> None:
    """Count the rows per epoch of the uncut training. Steps behind its end are of no epoch, and counted as steps."""
    epochs: dict[int, int] = {}  # step -> epoch
    num_read = 0
    for number in sorted(expected):
        epochs[number] = 1 + num_read // rows
        num_read += len(expected[number].rows)
        if number in trained and Counter(map(_key, trained[number].rows)) != Counter(map(_key, expected[number].rows)):
            verdict.first_other_order = min(verdict.first_other_order or number, number)
    if verdict.steps < 0 or (verdict.steps > 0 and verdict.first_other_order is not None):
        epochs = dict.fromkeys({*trained, *expected}, ALL_EPOCHS)  # where they begin and end is not the same
    for epoch in sorted(set(epochs.values())):
        wanted: Counter = Counter()
        got: Counter = Counter()
        for number in (number for number, other in epochs.items() if other == epoch):
            wanted.update(map(_key, expected.get(number, Step()).rows))
            got.update(map(_key, trained.get(number, Step()).rows))
        repeated = list((got - wanted).elements())
        missing = list((wanted - got).elements())
        if repeated or missing:
            verdict.by_epoch[epoch] = (len(repeated), len(missing))
        verdict.repeated += len(repeated)
        verdict.missing += len(missing)
        verdict.rows_repeated = [*verdict.rows_repeated, *sorted(repeated)][:SHOWN]
        verdict.rows_missing = [*verdict.rows_missing, *sorted(missing)][:SHOWN]


def _compare_bits(verdict: Verdict, trained: dict[int, Step], expected: dict[int, Step]) -> None:
    differences = []
    for number in sorted({*trained} & {*expected}):
        one, other = trained[number].losses, expected[number].losses
        if json.dumps(one) != json.dumps(other):
            verdict.first_other_loss = verdict.first_other_loss or number
            differences += [abs(a - b) for a, b in zip(one, other, strict=False) if a is not None and b is not None]
    if differences:
        verdict.loss_difference = float(f"{max(differences):.2e}")


def word_of(verdict: Verdict) -> str:
    """Return the cell: rows before order before losses before weights, as each brings those behind it along."""
    words = []
    if verdict.restarted:
        words.append("restarted")
    if verdict.repeated or verdict.missing:
        words.append(f"rows +{verdict.repeated} -{verdict.missing}")
    elif verdict.first_other_order is not None:
        words.append("order")
    elif verdict.first_other_loss is not None:
        words.append(f"losses from step {verdict.first_other_loss}")
    if verdict.steps:
        words.append(f"steps {verdict.steps:+d}")
    if not words and verdict.same_weights is False:
        words.append("weights")
    if words:
        return ", ".join(words)
    return "rows exact" if verdict.only_rows else "exact"


def _key(row) -> str | int:
    return row if isinstance(row, int) else str(row)
