"""The table of verdicts, what a cell rests on in words, and the page of the docs."""

from faults.conformance.cuts import CUTS, SAVE_EVERY
from faults.conformance.verdict import ALL_EPOCHS

KILLS = ("once", "twice", "three_times", "epoch_end", "second_epoch", "across_epochs", "in_a_save")
EXACT = ("exact", "rows exact", "not offered")

HEAD = """# Does a trainer really continue where it stopped?

This page is written by `python -m faults.conformance --page docs/conformance.md`. The program trains a tiny model on
{rows} rows that carry their number, {epochs} epochs of {per_epoch} steps with a checkpoint every {save_every}, with
dropout, AdamW and a schedule; it kills the trainer (SIGKILL to all its processes), starts the same command again, and
compares with a training that was not cut: the rows of each step, the loss of each step, the final weights, the number
of steps. A cut falls at a step, not at a time, so the same versions give the same table. Every trainer is driven as
its own documentation says. Tandem is one of the subjects. How many rows an epoch repeated or missed:
[conformance.json](conformance.json).

    python -m faults.conformance                           all subjects whose packages are installed
    python -m faults.conformance --install                 an environment for each, with the versions below
    python -m faults.conformance trainer_stream --cut second_epoch
    python -m faults.conformance my_trainer.py --json results.json     your own, see the end of this page
    python -m faults.conformance my_trainer.py --compare results.json  what a new version changes
"""

WORDS = """## How to read it

| word | meaning |
|---|---|
| exact | rows, losses and weights are those of the uncut training, to the last bit |
| rows exact | the rows are; bits are not compared: other processes, or two uncut trainings differ |
| rows +r -m | r rows were trained that are not due in this epoch, or once more; m rows were not trained |
| order | the rows of each epoch, at other steps |
| losses from step s | the rows are right; the loss differs: optimizer, schedule or random state are others |
| weights | only the final weights differ |
| steps +n, -n | more or fewer steps than the uncut training |
| restarted | training began anew although a checkpoint had been written |
| refused | the next start ended with a sentence |
| error | the next start ended with an exception |
| not offered | the trainer, or this adapter, has no loader workers or several processes |

A step that is made again because its checkpoint came before it is no repetition. An `error` costs time; a wrong row
costs nothing that anybody sees.
"""

ADAPTER = """## Your own trainer

An adapter is a file of about thirty lines: it trains in `main()`, continues by itself from what lies below
`given.folder`, and writes a journal. `faults/conformance/subject.py` needs the standard library only and may be
copied.

```python
\"\"\"My trainer, which saves every few steps and continues from the newest checkpoint.

packages: torch==2.13.0
offers: workers, ranks
\"\"\"

import my_trainer

from faults.conformance.subject import Journal, arguments, row_ids


def main() -> None:
    given = arguments()  # folder, rows, epochs, batch, save_every, workers, rank, ranks
    rows = [row_ids(number) for number in range(given.rows)]  # each begins with its number
    trainer = my_trainer.Trainer(rows, given.folder, batch_size=given.rank_batch, save_every=given.save_every)
    journal = Journal(given.folder)
    journal.start(trainer.step)  # 0, or the step of the checkpoint that was loaded
    for batch, loss in trainer.steps():
        # After the optimizer's step and before the checkpoint of this step: here the cut falls.
        journal.step(trainer.step, [row[0] for row in batch], loss)
        trainer.save_if_due()
    journal.end(trainer.step, trainer.model)


if __name__ == "__main__":
    main()
```

`python -m faults.conformance my_adapter.py` runs it; imports stand at the top of the file, as they are made once and
each start is a fork (`--cold` starts programs, which takes longer). In the head, `packages:` are those of
`--install`, `offers:` says whether it can have loader workers and several processes (`RANK`, `WORLD_SIZE` and so on
are set), `cold: yes` that an import of it cannot be forked, `notes:` what this page says about it. A program in
another language takes part by `--command`: it gets `--folder DIR --rows 64 --epochs 2 --batch 4 --save-every 5
--workers 0`, appends the lines `{{"start": 0}}`, `{{"step": 1, "rows": [3, 8, 5, 1], "loss": 4.2}}` and `{{"end": 32,
"weights": "a hash"}}` to `DIR/steps.RANK.jsonl`, and waits behind a step that is not below the one in `DIR/hold`.

Limits. The models are tiny, the machine is a CPU, and the rows are few: what is exact here can still fail elsewhere;
what repeats rows here does so anywhere. The process ends at half the size of the largest file in `in_a_save` (by a
limit of the kernel, so at the same byte each time); a trainer that renames a finished file or folder is not hit by
that.
"""


def table(results: dict[str, dict], cuts: list[str]) -> str:
    """Return a Markdown table, a line for each subject."""
    lines = ["| subject | " + " | ".join(cuts) + " |", "|---" * (len(cuts) + 1) + "|"]
    for name, result in results.items():
        words = []
        for cut in cuts:
            cell = result["cells"].get(cut)
            if cell is not None:
                words.append(cell["word"])
            elif result.get("not_installed"):
                words.append("not installed")
            else:
                words.append("-")
        lines.append(f"| {name} | " + " | ".join(words) + " |")
    return "\n".join(lines)


def sentence(cell: dict) -> str:
    """Return the details of a cell in words."""
    parts = []
    if cell.get("message"):
        parts.append(cell["message"])
    for epoch, (repeated, missing) in cell.get("by_epoch", {}).items():
        parts.append(f"{_place(epoch)}: {repeated} repeated, {missing} missing")
    if cell.get("first_other_order"):
        parts.append(f"other rows from step {cell['first_other_order']}")
    if cell.get("loss_difference"):
        parts.append(f"losses differ by up to {cell['loss_difference']:g} from step {cell['first_other_loss']}")
    if cell.get("uncut_differs"):
        parts.append(f"a second uncut training differs as well: {cell['uncut_differs']}")
    if cell.get("cut_file"):
        parts.append(f"killed in {cell['cut_file']}")
    if cell.get("starts"):
        steps = ["none" if step is None else str(step) for step in cell["starts"]]
        parts.append(f"started from steps {', '.join(steps)}")
    return "; ".join(parts)


def _place(epoch: int | str) -> str:
    """Return the words for an epoch; results that were read from a file have numbers as text."""
    return "the whole training" if int(epoch) == ALL_EPOCHS else f"epoch {epoch}"


def differences(results: dict[str, dict], before: dict[str, dict]) -> list[str]:
    """Return a line for each cell that both have and that is not the same."""
    lines = []
    for name in sorted({*results} & {*before}):
        new, old = results[name]["cells"], before[name]["cells"]
        for cut in [cut.name for cut in CUTS if cut.name in new and cut.name in old]:
            if new[cut] != old[cut]:
                was, now = (f"{cell['word']} ({sentence(cell)})" for cell in (old[cut], new[cut]))
                lines.append(f"{name} {cut}: was {was}; is {now}")
    return lines


def page(results: dict[str, dict], *, rows: int, epochs: int, batch: int) -> str:
    """Return the page of the docs for these results."""
    tested = {name: results[name] for name in sorted(results) if results[name]["cells"]}
    others = [cut.name for cut in CUTS if cut.name not in KILLS]
    parts = [HEAD.format(rows=rows, epochs=epochs, per_epoch=rows // batch, save_every=SAVE_EVERY)]
    parts.append("## The table\n\n" + table(tested, list(KILLS)) + "\n\n" + table(tested, others) + "\n")
    meanings = "\n".join(f"| {cut.name} | {cut.meaning} |" for cut in CUTS)
    parts.append(f"| cut | meaning |\n|---|---|\n{meanings}\n")
    parts.append(WORDS)
    parts.append("## Each subject\n\n" + "\n".join(_paragraph(name, result) for name, result in tested.items()))
    parts.append(ADAPTER.format())
    return "\n".join(parts)


def _paragraph(name: str, result: dict) -> str:
    links = ", ".join(f"<{link}>" for link in result["docs"])
    versions = f"{', '.join(result['versions'])}, {result['date']}."
    if links:
        versions = f"Driven as in {links}. {versions}"
    lines = [f"### {name}", "", result["what"], "", versions]
    groups: dict[str, list[str]] = {}
    for cut in CUTS:
        cell = result["cells"].get(cut.name)
        if cell is not None and cell["word"] not in EXACT and _brief(cell):
            groups.setdefault(_brief(cell), []).append(cut.name)
    if groups:
        lines += ["", *(f"- {', '.join(cuts)}: {text}" for text, cuts in groups.items())]
    if result["notes"]:
        lines += ["", result["notes"]]
    return "\n".join([*lines, ""])


def _brief(cell: dict) -> str:
    """Return the error of a cell or the size of its difference; all details are in the file of --json."""
    parts = []
    if cell.get("message"):
        sentence = cell["message"].split(". ")[0]
        parts.append(f"`{sentence.replace('`', '')}`")
    elif cell.get("loss_difference") and not cell.get("by_epoch"):
        parts.append(f"losses differ by up to {cell['loss_difference']:.1g}")
    if cell.get("uncut_differs"):
        parts.append(f"a second uncut training differs as well ({cell['uncut_differs']})")
    return "; ".join(parts)
