"""`python -m pipeline.recipe` writes docs/recipes.md and recipes/schema.json."""

import json
from pathlib import Path

from pipeline.process.storage import write_text
from pipeline.recipe.docs import json_schema, render

if __name__ == "__main__":
    root = Path(__file__).parents[2]
    for path, text in {
        root / "docs" / "recipes.md": render(),
        root / "recipes" / "schema.json": json.dumps(json_schema(), indent=1) + "\n",
    }.items():
        write_text(path, text)
        print(f"wrote {path}")
