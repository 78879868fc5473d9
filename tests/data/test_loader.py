"""Micro-batches on the device: nothing is copied on a CPU, and nothing twice elsewhere."""

import torch

from pipeline.data.loader import StepLoader, on_device


class Rows:
    """As a run's rows: labels and shift_labels are one tensor."""

    def __init__(self):
        self.made = []

    def micro_rows(self, step, rows):
        return rows if step > 5 else 1

    def micro_batch(self, step, micro_step, *, rank, world_size, rows):
        labels = torch.full((rows, 4), 10 * step + micro_step)
        self.made.append({"input_ids": labels + 1, "labels": labels, "shift_labels": labels})
        return self.made[-1]


def test_on_a_cpu_the_loader_yields_its_rows_unchanged_from_its_step():
    rows = Rows()
    shape = {"micro_steps": 2, "micro_batch": 3, "rank": 0, "world_size": 1}
    loader = StepLoader(rows, start_step=5, max_steps=7, device=torch.device("cpu"), **shape)
    batches = list(loader)
    assert [int(batch["labels"][0, 0]) for batch in batches] == [50, 51, 60, 61]
    assert [len(batch["labels"]) for batch in batches] == [1, 1, 3, 3]
    assert all(batch is made for batch, made in zip(batches, rows.made, strict=True))


def test_labels_and_shift_labels_are_one_tensor_on_the_device_too():
    batch = Rows().micro_batch(0, 0, rank=0, world_size=1, rows=2)
    moved = on_device(batch, torch.device("meta"))  # a device that copies as any other does
    assert {tensor.device.type for tensor in moved.values()} == {"meta"}
    assert moved["labels"] is moved["shift_labels"]
    assert moved["input_ids"] is not moved["labels"]
