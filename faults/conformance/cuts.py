"""The cuts: how often and where a training is killed, and on what it is started again."""

from dataclasses import dataclass

SAVE_EVERY = 5  # steps; of 32, of which 16 make an epoch


@dataclass(frozen=True)
class Start:
    """One start of the subject. kill_at: the step at which it is killed; in_save: the step whose checkpoint is cut."""

    kill_at: int | None = None
    in_save: int | None = None
    workers: int = 0
    ranks: int = 1


@dataclass(frozen=True)
class Cut:
    """A row of starts, and the uncut training that it is compared with."""

    name: str
    meaning: str
    starts: tuple[Start, ...]
    workers: int = 0  # of the uncut training
    ranks: int = 1
    save_every: int = SAVE_EVERY

    @property
    def needs(self) -> set[str]:
        """Return what a subject has to offer for this cut: several workers of its loader, several ranks."""
        needed = set()
        if any(start.workers for start in self.starts):
            needed.add("workers")
        if any(start.ranks > 1 for start in self.starts):
            needed.add("ranks")
        return needed


def killed(*steps: int, then: Start | None = None, **how: int) -> tuple[Start, ...]:
    """Return a start for each step at which one is killed, and the one that comes to the end."""
    return (*(Start(kill_at=step, **how) for step in steps), then or Start(**how))


CUTS = (
    Cut("once", "killed at step 8; the checkpoint is that of step 5", killed(8)),
    Cut("twice", "killed at steps 8 and 13, with a new checkpoint in between", killed(8, 13)),
    Cut("three_times", "killed at steps 8, 12 and 14; two starts are from one checkpoint", killed(8, 12, 14)),
    Cut(
        "epoch_end",
        "killed at step 18; the checkpoint is that of step 16, the end of epoch 1",
        killed(18),
        save_every=8,
    ),
    Cut("second_epoch", "killed at step 24, in epoch 2", killed(24)),
    Cut("across_epochs", "killed at step 8 in epoch 1 and at step 24 in epoch 2", killed(8, 24)),
    Cut("in_a_save", "killed in the midst of a file of the checkpoint of step 10", (Start(11, in_save=10), Start())),
    Cut("after_the_end", "not killed; the command of the finished training is given again", (Start(), Start())),
    Cut("workers", "two loader workers throughout, killed at step 8", killed(8, workers=2), workers=2),
    Cut(
        "workers_twice", "two loader workers throughout, killed at steps 8 and 24", killed(8, 24, workers=2), workers=2
    ),
    Cut(
        "other_workers",
        "killed at step 8, continued with two loader workers, not none",
        killed(8, then=Start(workers=2)),
    ),
    Cut("ranks", "two processes throughout, killed at steps 8 and 24", killed(8, 24, ranks=2), ranks=2),
    Cut(
        "other_ranks",
        "killed at step 8, continued by two processes with the same batch",
        killed(8, then=Start(ranks=2)),
    ),
)
BY_NAME = {cut.name: cut for cut in CUTS}
