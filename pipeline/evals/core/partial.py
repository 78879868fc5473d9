"""Why a mean over tasks of CORE may not be called CORE. Nothing here imports torch: reports tell it too."""

from collections.abc import Iterable


def why_partial(missing: Iterable[str], tasks: Iterable[tuple[str, int, int, bool]]) -> list[str]:
    """Reasons in words; none for CORE itself. tasks: name, items scored, items that were to be, whether the file is the
    published one."""
    missing, tasks = list(missing), list(tasks)
    reasons = [f"missing {', '.join(missing)}"] if missing else []
    scored, wanted = sum(items for _, items, _, _ in tasks), sum(of for _, _, of, _ in tasks)
    if scored < wanted:
        reasons.append(f"the time limit left room for {scored:,} of {wanted:,} items")
    other = [name for name, _, _, published in tasks if not published]
    if other and len(other) == len(tasks):
        reasons.append("none of the files is the published one")
    elif other:
        reasons.append(f"not the published file of {', '.join(other)}")
    return reasons
