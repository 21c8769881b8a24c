"""Settings of Sphinx for the site; `make docs` (tools/build_docs.py) gathers the pages and starts it."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "_ext"))

project = "mpispeed"
author = "the authors of mpispeed"
copyright = "the authors of mpispeed"
release = version = os.environ.get("MPISPEED_DOCS_VERSION", "dev")

extensions = ["myst_parser", "sphinx_copybutton", "docpages.sphinx_part"]
source_suffix = {".md": "markdown"}
root_doc = "index"
nitpicky = False
suppress_warnings = ["ref.python"]  # two public classes have one short name; annotations by it lead to the first
highlight_language = "text"
language = "en"
python_maximum_signature_line_length = 88
python_display_short_literal_types = True
toc_object_entries = False
maximum_signature_line_length = 88
smartquotes = False

myst_heading_anchors = 6
myst_enable_extensions = ["colon_fence", "attrs_block"]
myst_links_external_new_tab = False

html_theme = "furo"
html_title = f"mpispeed {release}"
html_static_path = [str(HERE / "_static")]
templates_path = [str(HERE / "_templates")]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_last_updated_fmt = None
html_theme_options = {
    "navigation_with_keys": False,
    "light_css_variables": {"color-brand-primary": "#0b5cad", "color-brand-content": "#0b5cad"},
    "dark_css_variables": {"color-brand-primary": "#7ab8ff", "color-brand-content": "#7ab8ff"},
}
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/versions.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
