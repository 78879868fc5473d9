"""Pages of the site that are written elsewhere: README.md, CONTRIBUTING.md, CHANGELOG.md and the notebook (a hook of
mkdocs.yml)."""

import json
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OF_THE_ROOT = {"README.md": "readme.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, page in OF_THE_ROOT.items():
        files.append(File.generated(config, page, content=with_links((ROOT / name).read_text(), of=ROOT)))
    notebook = json.loads((ROOT / "docs" / "quickstart.ipynb").read_text())
    files.append(File.generated(config, "quickstart_notebook.md", content=notebook_text(notebook)))
    return files


def on_page_markdown(markdown: str, page, **_) -> str:
    """Return a page of docs/ with links that lead out of the folder turned to the site's pages."""
    return markdown if page.file.generated_by else with_links(markdown, of=ROOT / "docs")


def with_links(markdown: str, *, of: Path) -> str:
    """Return the text with each link as the site needs it: what is no page of it keeps its words alone. of: the file's
    folder."""

    def replaced(match: re.Match) -> str:
        image, text, link = match.groups()
        target, _, anchor = link.partition("#")
        place = (of / target).resolve()
        if place.is_relative_to(ROOT / "docs"):
            page = place.relative_to(ROOT / "docs").as_posix()
        elif (page := OF_THE_ROOT.get(place.relative_to(ROOT).as_posix(), "")) == "":
            return text
        return f"{image}[{text}]({page}{'#' * bool(anchor)}{anchor})"

    return LINK.sub(replaced, markdown)


def notebook_text(notebook: dict) -> str:
    """Return the notebook's cells as Markdown, with a link to the file itself."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(f"```python\n{source}\n```" if cell["cell_type"] == "code" else source)
    parts.insert(1, "The file: [quickstart.ipynb](quickstart.ipynb)")
    return "\n\n".join(parts) + "\n"
