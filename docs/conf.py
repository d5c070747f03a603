"""The documentation as a site: `sphinx-build -W -c docs . OUT`, without a network.

The folder of the sources is the project's root, so that the pages and their links are the same here and where the repository
is read.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from framework.runtime.version import __version__

project, author, release = "Steadfast", "the authors of Steadfast", __version__
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "*.md",
    "slurm/README.md",
    "examples/*/README.md",
    "extras/*/README.md",
    "benchmarks/RESULTS.md",
]
exclude_patterns = ["examples/project"]  # what `steadfast init` writes
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # a page may begin with a second-level heading

html_theme = "furo"
html_title = f"Steadfast {release}"
html_copy_source = html_show_copyright = False

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_preserve_defaults = True
add_module_names = False
default_role = "code"  # of docstrings: `x` is code there
