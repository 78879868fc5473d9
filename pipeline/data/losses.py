"""What packing pads, crops, cuts or leaves out, as shares."""


def shares_lost(totals: dict[str, int], *, chat: bool) -> dict[str, float]:
    """Shares by name from the sums of a sequence's shards (sequence.totals); without what nothing was read of.

    padded: of the positions. Text: cropped of the tokens, split of the documents. Chat: cut, too long and no target of
    the conversations.
    """
    if chat:
        lost = {
            name: (totals.get(name.replace(" ", "_"), 0), "conversations") for name in ("cut", "too long", "no target")
        }
    else:
        lost = {
            "cropped": (totals.get("cropped_tokens", 0), "text_tokens"),
            "split": (totals.get("split_documents", 0), "documents"),
        }
    shares = {"padded": totals["padded"] / totals["positions"]} if totals["positions"] else {}  # which hold the padding
    return shares | {name: part / totals[whole] for name, (part, whole) in lost.items() if totals.get(whole)}
