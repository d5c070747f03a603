"""Pictures made with matplotlib: they take any text, and a picture that cannot be drawn never ends a run."""

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from framework.runtime.exits import headline
from framework.runtime.files import replacing
from framework.runtime.log import LOGGER


def png_of(figure: Any, *, dpi: int) -> bytes:
    """Return a figure as a PNG picture. All its texts are shown as they are; the numbers at its axes do not exist yet."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_text(text.get_text().replace("$", r"\$"))  # two dollar signs would begin and end a formula
    content = io.BytesIO()
    with warnings.catch_warnings():  # the font shows a box for a letter that it does not have
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        figure.savefig(content, dpi=dpi, format="png", pil_kwargs={"optimize": True})
    return content.getvalue()


def write_figure(target: Path, draw: Callable[[], Any], *, dpi: int) -> None:
    """Write the figure that `draw` returns (None: no picture). If it cannot be drawn, warn. Raise OSError for a full disk."""
    try:
        figure = draw()
        content = None if figure is None else png_of(figure, dpi=dpi)
    except Exception as error:
        LOGGER.warning("%s could not be drawn: %s", target, headline(error))
        return
    if content is not None:
        with replacing(target) as beside:
            beside.write_bytes(content)
