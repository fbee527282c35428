"""What Streamlit runs: controls in the sidebar, one page of figures beside them.

foreload dashboard
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import streamlit as st

from foreload.dashboard.app.controls import sidebar
from foreload.dashboard.app.url import begin, publish
from foreload.dashboard.app.view import View
from foreload.dashboard.app.views import cache, compare, exports, live, timeline, tuner, validation, whatif
from foreload.errors import ForeloadError

ICON = Path(__file__).parent / "icon.svg"
PAGES: tuple[tuple[str, str, str, Callable[[View], None]], ...] = (
    ("What if", "what-if", ":material/tune:", whatif.page),
    ("Timeline", "timeline", ":material/view_timeline:", timeline.page),
    ("Cache", "cache", ":material/grid_view:", cache.page),
    ("Tune", "tune", ":material/auto_fix_high:", tuner.page),
    ("Compare", "compare", ":material/compare_arrows:", compare.page),
    ("Validation", "validation", ":material/rule:", validation.page),
    ("Export", "export", ":material/output:", exports.page),
    ("Live engine", "live", ":material/sensors:", live.page),
)


def main() -> None:
    """One run of the script."""
    st.set_page_config(page_title="Foreload", page_icon=str(ICON), layout="wide")
    chosen = st.navigation(
        [st.Page(_drawn(draw), title=title, url_path=path, icon=icon) for title, path, icon, draw in PAGES]
    )
    chosen.run()


def _drawn(draw: Callable[[View], None]) -> Callable[[], None]:
    """A page that draws the controls first; errors of ours are one line on it."""

    def page() -> None:
        begin()
        view = sidebar()
        try:
            if view is not None:
                draw(view)
        except ForeloadError as error:
            st.error(str(error))
        publish()

    return page


main()
