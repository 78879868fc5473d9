"""python -m pipeline.chat.serve RUN_OR_MODEL [options of `transformers serve`]: an OpenAI-compatible server.

It is `transformers serve` itself, which looks a model's class up by name inside transformers and so finds none that comes
with a model's own code (5.23; --trust-remote-code changes nothing). Here it finds ours, and no code of the model's is run.
"""

import argparse
from pathlib import Path

from pipeline.evals.subject import Subject
from pipeline.process.errors import InputMissingError
from pipeline.run_dir.failures import exit_with_status


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.chat.serve",
        description="Serve a model to OpenAI clients: `transformers serve`, whose options may follow (--port 8000 ...).",
    )
    parser.add_argument(
        "model", metavar="RUN_OR_MODEL", help="run directory, checkpoint, model folder or Hub id (ID@REVISION pins one)"
    )
    parser.add_argument(
        "--trust-code", action="store_true", help="run code files that come with models, which may do anything"
    )
    arguments, options = parser.parse_known_args(argv)
    from pipeline.evals.subject import find_subject

    subject = find_subject(arguments.model, trust_code=arguments.trust_code)
    _refuse_unservable(subject)
    import transformers
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise InputMissingError(
            'command line: the server needs packages that are not installed. Run pip install "transformers[serving]".'
        )
    from transformers.cli.transformers import app

    from pipeline.model.build import TandemForCausalLM  # which registers its config too
    from pipeline.tokenizer.template_bounds import bound_templates

    bound_templates()
    transformers.TandemForCausalLM = TandemForCausalLM  # type: ignore[attr-defined]
    print(f"requests name the model {subject.path}", flush=True)
    trust = ["--trust-remote-code"] if arguments.trust_code else []
    app(["serve", subject.path, *trust, *options])
    return 0


def _refuse_unservable(subject: Subject) -> None:
    """Raise what a chat with the model would: every request would end in an error otherwise. What is fetched later is not looked at."""
    from pipeline.evals.subject import load, refuse_nonfinite_model, trusts_model_code
    from pipeline.model.build import first_nonfinite_of_files

    folder = Path(subject.path)
    if folder.is_dir():
        trusts_model_code(subject.path, code=subject.code)
        refuse_nonfinite_model(subject.path, first_nonfinite_of_files(folder))
        if not any(folder.glob("*.safetensors")):
            load(subject, device="cpu")  # pickles: only torch knows which of them it refuses


if __name__ == "__main__":
    exit_with_status(main)
