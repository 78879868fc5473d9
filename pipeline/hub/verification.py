"""Verification that the Hub has what was sent: by the hashes that it states, or downloaded, loaded and run without this package."""

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from pipeline.evals.core.bundle import git_blob
from pipeline.hub.client import retried
from pipeline.process.errors import ServiceError
from pipeline.process.storage import read_json, sha256_file
from pipeline.process.user_code import CodeFolder

# Of logits in fp32 between the class of this program and the published code.
CLOSE = 1e-4
NAMING_CLASSES = ("config.json", "generation_config.json", "tokenizer_config.json", "processor_config.json")


def verify(
    sums: dict[str, str], *, model: Path, repo_id: str, commit: str, within: Path, trust_code: bool = False
) -> str:
    """Download every file of the commit into an empty folder and compare it; then a process without this package loads the
    model from there, and its ids and logits must be ours. Returns what was done. ServiceError says what differs.

    A model with code files that are not this program's is compared and not loaded, unless they are trusted: that would run them.

    model: the local folder of the model. within: where the download is kept meanwhile; in the queue, what a killed process
    leaves behind is cleared away.
    """
    from huggingface_hub import hf_hub_download

    wrong = []
    with tempfile.TemporaryDirectory(prefix=".tmp-", dir=within) as folder:
        for name, expected in sums.items():
            download = partial(hf_hub_download, repo_id, name, revision=commit, local_dir=folder)
            path = Path(retried(download, what=f"downloading {name}"))
            if sha256_file(path) != expected:
                wrong.append(name)
            if not (model / name).exists():
                path.unlink()  # of large ones only those that are loaded stay
        _refuse(wrong, repo_id, commit)
        if not trust_code and (unknown := unknown_code(model)):
            return f"downloaded again and equal; not loaded, since {', '.join(unknown)} is not this program's code"
        _load_in_isolation(Path(folder), model=model, published=f"{repo_id}@{commit}")
    return "downloaded again, equal and loaded"


def unknown_code(model: Path) -> list[str]:
    """Return the names of the Python files of a model folder that are not those which this program writes, and of the classes that
    its JSON files take from another repository."""
    from pipeline.model.export import CODE_FILES

    ours = {file.name: sha256_file(file) for file in CODE_FILES}
    files = {str(file.relative_to(model)): file for file in sorted(model.rglob("*.py"))}
    elsewhere = [line for name in NAMING_CLASSES for line in _classes_elsewhere(model / name)]
    return [name for name, file in files.items() if ours.get(name) != sha256_file(file)] + elsewhere


def _classes_elsewhere(file: Path) -> list[str]:
    """Return what the file's auto_map takes from another repository, as `owner/name--module.Class`."""
    found = read_json(file).get("auto_map") if file.is_file() else None
    values = list(found.values()) if isinstance(found, dict) else [found]
    named = [str(name) for value in values for name in (value if isinstance(value, list) else [value])]
    return [f"{name} of {file.name}" for name in named if "--" in name]


def compare_sums(files: dict[str, Path], *, repo_id: str, commit: str) -> None:
    """Compare as verify does, by the hashes that the Hub states: a checkpoint is too large to fetch again at every save."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

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
            f"{repo_id}@{commit}: the Hub gives back other bytes than were sent for {', '.join(wrong)}. Push again; do not use this commit."
        )


def _load_in_isolation(folder: Path, *, model: Path, published: str) -> None:
    """Load it in a process without this package. The files are ours by their hashes: no code is run but what was sent."""
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
            f"{published}: arrived whole, and a program without this package cannot load it ({reason}). Do not use this commit; please report it."
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
            f"{published}: arrived whole, and a program without this package computes other ids or logits than this one. "
            "Do not use this commit; please report it."
        )
