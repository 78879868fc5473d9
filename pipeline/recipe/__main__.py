"""`python -m pipeline.recipe` writes docs/recipes.md."""

from pathlib import Path

from pipeline.process.storage import write_text
from pipeline.recipe.docs import render

if __name__ == "__main__":
    page = Path(__file__).parents[2] / "docs" / "recipes.md"
    page.parent.mkdir(exist_ok=True)
    write_text(page, render())
    print(f"wrote {page}")
