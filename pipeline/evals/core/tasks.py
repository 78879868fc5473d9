"""The 22 tasks of CORE: files, shots, delimiters and baselines, as DCLM defined them and nanochat scores them.

Sources: mosaicml/llm-foundry at 8c8dd48 (scripts/eval/local_data) for the files, the CORE list of nanochat's bundle for the
shots and delimiters, eval_meta_data_v1.csv and eval_meta_data.csv (September 2025) of mlfoundations/dclm for the baselines.
"""

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["multiple_choice", "schema", "language_modeling"]
FOUNDRY = "8c8dd48f72168c5d51e2f7b151595892a8fba43d"  # the commit whose files are meant


@dataclass(frozen=True)
class CoreTask:
    """file: under eval_data/; shots: examples before the question; v1, v2: share that guessing gets right.

    rows: items of the published file; blob: the hash by which git names its content.
    """

    name: str
    file: str
    kind: Kind
    shots: int
    rows: int
    v1: float
    blob: str
    v2: float | None = None
    delimiter: str = " "

    def centred(self, accuracy: Any, version: str) -> Any:
        """0 at guessing, 1 when all is right; of one accuracy or an array of them."""
        baseline = self.v1 if version == "v1" or self.v2 is None else self.v2
        return (accuracy - baseline) / (1 - baseline)


MC: Kind = "multiple_choice"
LM: Kind = "language_modeling"
ANSWER = "\nAnswer: "
HELLASWAG = ("language_understanding/hellaswag.jsonl", "448321079fdc140bd8566b16b24eda9ceacd3501")

# fmt: off
ROWS: tuple[dict[str, Any], ...] = (
    {"name": "hellaswag_zeroshot", "file": HELLASWAG[0], "kind": MC, "shots": 0, "rows": 10042, "v1": 0.25, "blob": HELLASWAG[1]},
    {"name": "jeopardy", "file": "world_knowledge/jeopardy_all.jsonl", "kind": LM, "shots": 10, "rows": 2117, "v1": 0.0, "delimiter": ANSWER, "blob": "2f771918dbc8b68550df204171b14d2648b5d494"},
    {"name": "bigbench_qa_wikidata", "file": "world_knowledge/bigbench_qa_wikidata.jsonl", "kind": LM, "shots": 10, "rows": 20321, "v1": 0.0, "blob": "5e1be72797ba082fd4f6efa42f7d759d2d23339a"},
    {"name": "arc_easy", "file": "world_knowledge/arc_easy.jsonl", "kind": MC, "shots": 10, "rows": 2376, "v1": 0.25, "delimiter": ANSWER, "blob": "b5fd1bf87a24246a6be67230b721541688f5c349"},
    {"name": "arc_challenge", "file": "world_knowledge/arc_challenge.jsonl", "kind": MC, "shots": 10, "rows": 1172, "v1": 0.25, "delimiter": ANSWER, "blob": "ce66b8dcfb4bac892a404a0dda8b4e8ed0f84b89"},
    {"name": "copa", "file": "commonsense_reasoning/copa.jsonl", "kind": MC, "shots": 0, "rows": 100, "v1": 0.5, "blob": "b22f96e08ae9d0e97e1ae58f67b6425c77ef200a"},
    {"name": "commonsense_qa", "file": "commonsense_reasoning/commonsense_qa.jsonl", "kind": MC, "shots": 10, "rows": 1221, "v1": 0.2, "v2": 0.403, "blob": "f1cc16a88b05ab0934aab2ec2d02a6869e6e5520"},
    {"name": "piqa", "file": "commonsense_reasoning/piqa.jsonl", "kind": MC, "shots": 10, "rows": 1838, "v1": 0.5, "delimiter": ANSWER, "blob": "a9992adfdefde366fe7ccff871f5aa62449a09cf"},
    {"name": "openbook_qa", "file": "commonsense_reasoning/openbook_qa.jsonl", "kind": MC, "shots": 0, "rows": 500, "v1": 0.25, "blob": "a8aff255a64cbc72a85252acf00df25a315686c2"},
    {"name": "lambada_openai", "file": "language_understanding/lambada_openai.jsonl", "kind": LM, "shots": 0, "rows": 5153, "v1": 0.0, "blob": "4da02dd53b9e7385871d06ab855471d77b2f7dda"},
    {"name": "hellaswag", "file": HELLASWAG[0], "kind": MC, "shots": 10, "rows": 10042, "v1": 0.25, "blob": HELLASWAG[1]},
    {"name": "winograd", "file": "language_understanding/winograd_wsc.jsonl", "kind": "schema", "shots": 0, "rows": 273, "v1": 0.5, "blob": "762fe030ac6938ecba438c47a04057247c6ab891"},
    {"name": "winogrande", "file": "language_understanding/winogrande.jsonl", "kind": "schema", "shots": 0, "rows": 1267, "v1": 0.5, "blob": "316e87ae4659f0c402b0f00551fdec83ab0a0986"},
    {"name": "bigbench_dyck_languages", "file": "symbolic_problem_solving/bigbench_dyck_languages.jsonl", "kind": LM, "shots": 10, "rows": 1000, "v1": 0.0, "blob": "27a4ac2b3b18716add92f4ecd62475c4f8d77768"},
    {"name": "agi_eval_lsat_ar", "file": "symbolic_problem_solving/agi_eval_lsat_ar.jsonl", "kind": MC, "shots": 3, "rows": 230, "v1": 0.2, "v2": 0.25, "blob": "d663b427ba310d3f877f09a6830198ca7c856189"},
    {"name": "bigbench_cs_algorithms", "file": "symbolic_problem_solving/bigbench_cs_algorithms.jsonl", "kind": LM, "shots": 10, "rows": 1320, "v1": 0.0, "blob": "7ecee0f270f3de8b6558da14ae02181f3d950a40"},
    {"name": "bigbench_operators", "file": "symbolic_problem_solving/bigbench_operators.jsonl", "kind": LM, "shots": 10, "rows": 210, "v1": 0.0, "blob": "a982dc4f962725c9dc4abb07d3cc333c99959290"},
    {"name": "bigbench_repeat_copy_logic", "file": "symbolic_problem_solving/bigbench_repeat_copy_logic.jsonl", "kind": LM, "shots": 10, "rows": 32, "v1": 0.0, "blob": "86621f10e7124ed6f3a61fb91493c1256c008f60"},
    {"name": "squad", "file": "reading_comprehension/squad.jsonl", "kind": LM, "shots": 10, "rows": 10570, "v1": 0.0, "blob": "dc733b8f58ec666c53fd946198c434b819a00680"},
    {"name": "coqa", "file": "reading_comprehension/coqa.jsonl", "kind": LM, "shots": 0, "rows": 7983, "v1": 0.0, "blob": "028bd4e51326cc43f8394987ae47fbb271aeba9d"},
    {"name": "boolq", "file": "reading_comprehension/boolq.jsonl", "kind": MC, "shots": 10, "rows": 3270, "v1": 0.62, "delimiter": ANSWER, "blob": "f42083a58713d00ef4600118cfdf79618c269190"},
    {"name": "bigbench_language_identification", "file": "language_understanding/bigbench_language_identification.jsonl", "kind": MC, "shots": 10, "rows": 10000, "v1": 0.091, "v2": 0.25, "blob": "1f132fbbb12a67ce267b7b92b458175632c265f3"},
)
# fmt: on
TASKS = tuple(CoreTask(**row) for row in ROWS)
