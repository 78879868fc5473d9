"""python -m pipeline.chat.serve RUN_OR_MODEL [options of `transformers serve`]: an OpenAI-compatible server.

It is `transformers serve` itself, which looks a model's class up by name inside transformers and so finds none that
comes with a model's own code (5.23; --trust-remote-code changes nothing). Here it finds ours, and no code of the
model's is run.
"""

import argparse
from pathlib import Path
from typing import Any

from pipeline.evals.subject import Subject, find_subject, load, refuse_nonfinite_model, trusts_model_code
from pipeline.process.errors import DataError, InputMissingError, Interrupted, RecipeError, first_line
from pipeline.run_dir.failures import exit_with_status


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.chat.serve",
        description=(
            "Serve a model to OpenAI clients: `transformers serve`, whose options may follow (--port 8000 ...)."
        ),
    )
    parser.add_argument(
        "model",
        metavar="RUN_OR_MODEL",
        help="run directory, checkpoint, model folder or Hub id (ID@REVISION pins one)",
    )
    parser.add_argument(
        "--trust-code", action="store_true", help="run code files that come with models, which may do anything"
    )
    arguments, options = parser.parse_known_args(argv)
    subject = find_subject(arguments.model, trust_code=arguments.trust_code)
    _refuse_unservable(subject)
    import transformers
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise InputMissingError(
            'command line: the server needs packages that are not installed. Run pip install "transformers[serving]".'
        )
    from transformers.cli.transformers import app

    from pipeline.model.saved import TandemForCausalLM  # which registers its config too
    from pipeline.tokenizer.template_sandbox import bound_templates

    bound_templates()
    transformers.TandemForCausalLM = TandemForCausalLM  # type: ignore[attr-defined]
    print(f"requests name the model {subject.path}", flush=True)
    trust = ["--trust-remote-code"] if arguments.trust_code else []
    return _serve(app, ["serve", subject.path, *trust, *options], path=subject.path)


def _serve(app: Any, words: list[str], *, path: str) -> int:
    """Run the command of transformers until Ctrl-C, and return the exit status."""
    import click

    try:
        app(words, standalone_mode=False)  # else click ends the process itself: Ctrl-C with status 1
    except (KeyboardInterrupt, click.Abort):
        return Interrupted.status
    except click.ClickException as error:
        raise RecipeError(f"command line: transformers serve: {error.format_message()}") from None
    except SystemExit as error:  # uvicorn's, where the port is taken
        if error.code:
            raise RecipeError(
                "command line: the server did not start, for the reason above. Another --port may be free."
            ) from None
    except Exception as error:  # a model's files are somebody else's, and may hold anything
        reason = first_line(error)
        raise DataError(f"{path}: transformers serve cannot serve it ({reason}). Take another model.") from error
    return 0


def _refuse_unservable(subject: Subject) -> None:
    """Raise what a chat with the model would: every request would end in an error otherwise. Of a Hub id, only its
    code is looked at."""
    from pipeline.model.finite import first_nonfinite_of_files

    folder = Path(subject.path)
    name, _, revision = (subject.path, "", "") if folder.is_dir() else subject.path.partition("@")
    try:
        trusts_model_code(name, code=subject.code, revision=revision or None)
    except OSError as error:
        reason = first_line(error)
        raise InputMissingError(
            f"{subject.path}: the model cannot be loaded ({reason}). Name a folder with its weights, or a Hub id you "
            "may read."
        ) from None
    if folder.is_dir():
        refuse_nonfinite_model(subject.path, first_nonfinite_of_files(folder))
        if not any(folder.glob("*.safetensors")):
            load(subject, device="cpu")  # pickles: only torch knows which of them it refuses


if __name__ == "__main__":
    exit_with_status(main)
