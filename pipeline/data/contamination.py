"""Which evaluation items stand in the text that a run trains on, and the score without them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.data.lookout import read_seen
from pipeline.data.plan import open_stream
from pipeline.data.watchlist import NumberSet, item_ngrams, items_digest, sorted_once


@dataclass(frozen=True)
class Seen:
    """What the training text of a run held of a watch-list. ngrams: sorted hashes. unchecked: shards of `shards` at which
    nobody looked with this list, as they were sealed before."""

    watchlist: str
    ngrams: np.ndarray
    shards: int
    unchecked: int

    @classmethod
    def by_run(cls, plan: dict, watchlist_id: str) -> "Seen":
        """Of all shards that the run reads, as far as they are sealed."""
        stream = open_stream(plan, "train")
        assert stream is not None
        shards = [
            read_seen(sequence.folder, number, watchlist_id)
            for source, sequence in enumerate(stream.sequences)
            for number in range(stream.shards_needed(source))
        ]
        looked_at = [ngrams for ngrams in shards if ngrams is not None]
        return cls(watchlist_id, sorted_once(looked_at), len(shards), len(shards) - len(looked_at))

    def contaminated(self, texts: list[str]) -> list[bool | None]:
        """For each item of a whole task: whether an n-gram of it was trained on; None for one that cannot be judged."""
        ngrams, items = item_ngrams(texts)
        flags: list[bool | None] = [None] * len(texts)
        found = np.zeros(len(texts), bool)
        found[items[NumberSet(self.ngrams).places_in(ngrams)]] = True
        for item in np.flatnonzero(np.bincount(items, minlength=len(texts))).tolist():
            flags[item] = bool(found[item])
        return flags

    @classmethod
    def together(cls, parts: list["Seen"]) -> "Seen":
        """Of several runs' text, looked through for the same watch-list."""
        ngrams = sorted_once([seen.ngrams for seen in parts])
        return cls(parts[0].watchlist, ngrams, sum(s.shards for s in parts), sum(s.unchecked for s in parts))

    def findings(self, tasks: dict[str, list[str]], *, text_of: list[str], not_searched: list[str]) -> dict[str, Any]:
        """For the run's folder, JSON: by task its items' digest and number, which are contaminated (positions), which cannot
        be judged, and where they were looked for.

        text_of: the runs whose text this is. not_searched: what the model comes from beside them.
        """
        by_task = {}
        for name, texts in tasks.items():
            flags = self.contaminated(texts)
            by_task[name] = {
                "digest": items_digest(texts),
                "items": len(texts),
                "unjudged": [place for place, flag in enumerate(flags) if flag is None],
                "contaminated": [place for place, flag in enumerate(flags) if flag],
                "shards": self.shards,
                "unchecked": self.unchecked,
                "text_of": text_of,
                "not_searched": not_searched,
            }
        return {"tasks": by_task}


def flags_of(findings: dict[str, Any], task: str, texts: list[str]) -> list[bool | None] | None:
    """What `findings` tell of a task's items; None when the run looked for other items, not for the task, or at no shard."""
    found = findings["tasks"].get(task)
    if found is None or "shards" not in found:  # as it was written before tasks told of their own search
        return None
    if found["unchecked"] == found["shards"] or found["digest"] != items_digest(texts):
        return None
    contaminated, unjudged = set(found["contaminated"]), set(found["unjudged"])
    return [None if place in unjudged else place in contaminated for place in range(len(texts))]


def without_contaminated(scores: Sequence[float], contaminated: Sequence[bool | None]) -> dict[str, Any]:
    """Counts, the share of contaminated items among those that can be judged, and the mean score with and without them.

    scores: of each item, such as whether it was answered right. Items that cannot be judged (None) stay in both means.
    A share or a mean of nothing is None.
    """
    clean = [score for score, flag in zip(scores, contaminated, strict=True) if not flag]
    judged = sum(flag is not None for flag in contaminated)
    found = len(scores) - len(clean)
    return {
        "items": len(scores),
        "unjudged": len(scores) - judged,
        "contaminated": found,
        "contaminated_share": found / judged if judged else None,
        "score": sum(scores) / len(scores) if scores else None,
        "score_without": sum(clean) / len(clean) if clean else None,
    }
