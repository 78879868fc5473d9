"""Verification that the Hub has what was sent: by the hashes that it states, or downloaded, loaded and run without this
package."""

import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from huggingface_hub import (
    get_hf_file_metadata,
    hf_hub_url,
)

from pipeline.evals.core_bundle import git_blob
from pipeline.hub.client import retried
from pipeline.hub.pull import download
from pipeline.process.errors import (
    ServiceError,
)
from pipeline.process.storage import sha256_file
from pipeline.process.user_code import CodeFolder

# Of logits in fp32 between the class of this program and the published code.
CLOSE = 1e-4
# As auto_map names a class of another repository: owner/name--module.Class.
CLASS_ELSEWHERE = re.compile(r'"[\w./-]+--[\w.]+"')
NAMING_CLASSES = ("config.json", "generation_config.json", "tokenizer_config.json", "processor_config.json")


def verify(
    sums: dict[str, str], *, model: Path, repo_id: str, commit: str, within: Path, trust_code: bool = False
) -> str:
    """Download the files of the commit into an empty folder and compare them; then a process without this package
    loads the model from there, and its ids and logits must be ours. Return what was done.

    A model with code files that are not this program's is compared and not loaded, unless they are trusted: that would
    run them. model: the local folder of the model. within: where the download is kept meanwhile. Raises ServiceError
    for a difference.
    """
    with tempfile.TemporaryDirectory(prefix=".tmp-", dir=within) as folder:
        download(repo_id, commit, Path(folder), only=list(sums))
        there = {name: Path(folder, name) for name in sums}
        # 1. The same bytes under the same names.
        wrong = [name for name, path in there.items() if not path.exists() or sha256_file(path) != sums[name]]
        _refuse(wrong, repo_id, commit)
        # 2. The same ids and logits where nothing of this package is on the path.
        if not trust_code and (unknown := unknown_code(model)):
            return f"downloaded again and equal; not loaded, since {', '.join(unknown)} is not this program's code"
        _load_in_isolation(Path(folder), model=model, published=f"{repo_id}@{commit}")
    return "downloaded again, equal and loaded"


def unknown_code(model: Path) -> list[str]:
    """Return the names of the Python files of a model folder that are not those which this program writes, and of the
    JSON files that take a class from another repository."""
    from pipeline.model.saved import CODE_FILES

    ours = {file.name: sha256_file(file) for file in CODE_FILES}
    files = {str(file.relative_to(model)): file for file in sorted(model.rglob("*.py"))}
    unknown = [name for name, file in files.items() if ours.get(name) != sha256_file(file)]
    for name in NAMING_CLASSES:
        file = model / name
        if file.is_file() and CLASS_ELSEWHERE.search(file.read_text(errors="replace")):
            unknown.append(name)
    return unknown


def compare_sums(files: dict[str, Path], *, repo_id: str, commit: str) -> None:
    """Compare as verify does, by the hashes that the Hub states: a checkpoint is too large to fetch again at every
    save."""
    wrong = []
    for name, path in files.items():
        url = hf_hub_url(repo_id, name, revision=commit)
        stated = retried(partial(get_hf_file_metadata, url), what=f"reading the hash of {name}").etag
        # Large files are stated by their sha256, small ones as git does.
        if stated != (sha256_file(path) if len(stated or "") == 64 else git_blob(path.read_bytes())):
            wrong.append(name)
    _refuse(wrong, repo_id, commit)


def _refuse(wrong: list[str], repo_id: str, commit: str) -> None:
    if wrong:
        raise ServiceError(
            f"{repo_id}@{commit}: the Hub gives back other bytes than were sent for {', '.join(wrong)}. Push again; "
            "do not use this commit."
        )


def _load_in_isolation(folder: Path, *, model: Path, published: str) -> None:
    """Load it in a process without this package. The files are ours by their hashes: no code is run but what was
    sent."""
    import torch
    from safetensors.torch import load_file

    from pipeline.evals.subject import open_model
    from pipeline.hub import isolated_load_test
    from pipeline.tokenizer.load import open_tokenizer

    output = folder / ".isolated.safetensors"
    # -P: the script's folder, which is in this package, is not searched for imports.
    command = [sys.executable, "-P", str(isolated_load_test.__file__), str(folder), str(output)]
    done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise ServiceError(
            f"{published}: arrived whole, and a program without this package cannot load it ({reason}). Do not use "
            "this commit; please report it."
        )
    theirs = load_file(output)
    ids_T = torch.tensor(
        open_tokenizer(str(model), revision=None, beside=None, where=str(model))(isolated_load_test.TEXT).input_ids
    )
    ids_T = ids_T[: len(theirs["ids"])]
    ours = open_model(str(model), code=CodeFolder(None), dtype=torch.float32).eval()
    with torch.no_grad():
        logits_TV = ours(ids_T[None]).logits[0].float()
    same = torch.equal(ids_T, theirs["ids"]) and torch.allclose(logits_TV, theirs["logits"], rtol=0, atol=CLOSE)
    if not same:
        raise ServiceError(
            f"{published}: arrived whole, and a program without this package computes other ids or logits than this "
            "one. Do not use this commit; please report it."
        )
