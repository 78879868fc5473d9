"""The table of verdicts, and the page of the docs around it."""


def table(results: dict[str, dict], cuts: list[str]) -> str:
    """Return a Markdown table, a line for each subject."""
    lines = ["| subject | " + " | ".join(cuts) + " |", "|---" * (len(cuts) + 1) + "|"]
    for name, result in results.items():
        words = []
        for cut in cuts:
            words.append(
                result["cells"].get(cut, {}).get("word", "not installed" if result.get("not_installed") else "-")
            )
        lines.append(f"| {name} | " + " | ".join(words) + " |")
    return "\n".join(lines)


def sentence(cell: dict) -> str:
    """Return the details of a cell in words; empty where its word says all."""
    parts = []
    if cell.get("message"):
        parts.append(cell["message"])
    for epoch, (repeated, missing) in cell.get("by_epoch", {}).items():
        parts.append(f"epoch {epoch}: {repeated} repeated, {missing} missing")
    if cell.get("first_other_order"):
        parts.append(f"other rows from step {cell['first_other_order']}")
    if cell.get("loss_difference"):
        parts.append(f"losses differ by up to {cell['loss_difference']:g} from step {cell['first_other_loss']}")
    if cell.get("uncut_differs"):
        parts.append(f"a second uncut training differs as well: {cell['uncut_differs']}")
    if cell.get("cut_file"):
        parts.append(f"killed in {cell['cut_file']}")
    if cell.get("starts"):
        parts.append(
            "started from steps " + ", ".join("none" if step is None else str(step) for step in cell["starts"])
        )
    return "; ".join(parts)


def page(results: dict[str, dict]) -> str:
    raise NotImplementedError
