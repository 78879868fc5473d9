"""Bits per byte as an `evaluate` metric, for programs that use that library; nothing is downloaded."""

import math

import datasets
import evaluate


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
