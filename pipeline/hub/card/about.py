"""What the model is, what it is not, and under which terms."""

from pipeline.hub.card.lineage import HUB, descendants_link, link
from pipeline.hub.card.published import Published
from pipeline.report.tables import cell, number

SIZES = {"n_layer": "{} layers", "n_embd": "width {}", "n_head": "{} heads", "n_positions": "{} positions", "vocab_size": "{} token ids"}  # fmt: skip


def about_text(card: Published) -> str:
    """Kind and size, what it began as, and whether it is the run's last; then the publisher's note."""
    told = [words.format(number(size)) for name, words in SIZES.items() if (size := card.size(name))]
    of = f" of {number(card.parameters)} parameters" if card.parameters else ""
    kind = "chat model" if card.is_chat else "base language model"
    lines = [f"A {kind}{of} ({', '.join([cell(card.config.get('model_type')), *told])}).", _origin(card)]
    if card.is_chat:
        lines.append("It answers in turns, by the chat template that comes with it.")
    else:
        lines.append("It continues a text; it was not taught to answer.")
        lines.append(f"Published models made from it: {descendants_link(card.repo_id)}.")
    if not card.finished:
        steps = card.data.max_steps()
        of_all = f" of {number(steps)}" if steps else ""
        lines.append(f"This is the model after step {number(card.step)}{of_all}: the run had not finished.")
    note = card.data.manifest.get("note") or card.recipe("run").get("note")
    # Two dollar signs would begin a formula on the Hub.
    return " ".join(lines) + "\n" + (f"\nNote: {cell(note).replace('$', '&#36;')}\n" if note else "")


def _origin(card: Published) -> str:
    parent, on = card.parent, " on conversations" if card.is_chat else ""
    if parent is None:
        return f"It was trained from scratch{on} with Tandem."
    name = link(parent.repo_id) if parent.repo_id else f"the model of run {cell(parent.name)}, which is not published"
    return f"It began as {name}, and was trained further{on} with Tandem."


def limits_text(card: Published) -> str:
    lines = [
        "It states falsehoods as readily as facts, and repeats the biases of the text it was trained on. Nothing here tests "
        "whether it is safe: do not use it where what it says has consequences for people."
    ]
    if positions := card.size("n_positions"):
        lines.append(f"It sees at most {number(positions)} tokens, its own among them.")
    return " ".join(lines) + "\n"


def license_text(card: Published) -> str:
    """What the publisher says. Nothing is concluded from the terms of the data."""
    stated = card.recipe("hub").get("license")
    lines = [
        f"Stated by the publisher: {cell(stated)}." if stated else "The publisher states none: ask before you use it."
    ]
    others = [f"[{cell(name)}]({HUB}/datasets/{name})" for name in card.datasets]
    others += [link(card.parent.repo_id)] if card.parent and card.parent.repo_id else []
    if others:
        lines.append(f"What it was made from has terms of its own: {', '.join(others)}.")
    return " ".join(lines) + "\n"
