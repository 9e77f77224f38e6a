"""Settings of the documentation site, which `make docs` builds into build/docs.

The notebooks of `notebooks/` appear with their stored outputs. Nothing is executed here.
"""

import shutil
import sys
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

project = "taas-magic"
author = "the taas-magic developers"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
html_theme = "furo"
html_title = "taas-magic"
exclude_patterns = ["notebooks/taas.toml"]

myst_heading_anchors = 4
nb_execution_mode = "off"
nb_merge_streams = True
autodoc_typehints = "description"
autodoc_member_order = "bysource"
# IPython's `%%taas` and TOML with comments at odd places are no errors of a page.
suppress_warnings = ["misc.highlighting_failure"]

# Sphinx reads pages below docs/ only. These are copied there, and git ignores the copies.
PROJECT_PAGES = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")
shutil.copytree(ROOT / "notebooks", DOCS / "notebooks", dirs_exist_ok=True)
(DOCS / "project").mkdir(exist_ok=True)
for name in PROJECT_PAGES:
    shutil.copy(ROOT / name, DOCS / "project" / name)


def point_to_copies(app, docname, source):
    """Change links that are right in the repository to those that are right on the site."""
    text = source[0]
    if docname.startswith("project/"):
        text = text.replace("](docs/", "](../").replace("](notebooks/", "](../notebooks/")
    elif docname.startswith("notebooks/"):
        text = text.replace("](../docs/", "](../")
    else:
        text = text.replace("](../notebooks/", "](notebooks/")
        for name in PROJECT_PAGES:
            text = text.replace(f"](../{name}", f"](project/{name}")
    source[0] = text


def setup(app):
    """Register the hook with Sphinx."""
    app.connect("source-read", point_to_copies)
