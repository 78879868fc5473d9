"""The measures of this room as `evaluate` metrics, for programs that use that library; nothing is downloaded."""

import math

import datasets
import evaluate
import numpy as np

from pipeline.evals.intervals import share_interval


class BitsPerByte(evaluate.Metric):
    """Sums nats and bytes over everything added, and divides once.

    predictions: nats of each target; references: the bytes of text under it, -1 for a special one, which is in neither
    sum. `BitsPerByte().compute(predictions=..., references=...)` or add_batch as often as needed, then compute().
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Cross-entropy in bits per byte of text.",
            citation="",
            inputs_description="predictions: nats per target; references: bytes of text per target, -1 if special.",
            features=datasets.Features(
                {"predictions": datasets.Value("float64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions, references) -> dict[str, float]:
        text = [(nats, count) for nats, count in zip(predictions, references, strict=True) if count >= 0]
        nats, num_bytes = math.fsum(n for n, _ in text), sum(count for _, count in text)
        if num_bytes == 0:
            raise ValueError("no byte of text was scored: every target is special")
        return {"bits_per_byte": nats / (math.log(2) * num_bytes), "nats": nats, "bytes": num_bytes}


class CentredAccuracy(evaluate.Metric):
    """Share of right answers above guessing, with its 95 % interval: what CORE and ChatCORE average.

    predictions, references: the option chosen and the right one, or 1 and 0 for right and wrong beside references of
    1. `CentredAccuracy().compute(predictions=..., references=..., baseline=0.25)`.
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Accuracy, and (accuracy - baseline) / (1 - baseline).",
            citation="",
            inputs_description="predictions, references: numbers of options; baseline: the share guessing gets right.",
            features=datasets.Features(
                {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions, references, baseline: float = 0.0) -> dict[str, float]:
        correct = np.asarray(predictions) == np.asarray(references)
        if not len(correct):
            raise ValueError("no answer was scored")
        low, high = share_interval(int(correct.sum()), len(correct))
        accuracy = float(correct.mean())
        centred = (accuracy - baseline) / (1 - baseline)
        return {"accuracy": accuracy, "centred_accuracy": centred, "low": low, "high": high}
