"""`make picture`: run the demo and draw its output as a terminal window, `docs/images/demo.svg`, for the README.

The drawing holds what the demo printed and nothing else.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from rich.console import Console

from examples import demo, preemption

PICTURE = Path(__file__).parents[1] / "docs/images/demo.svg"
WIDTH = 100


def main() -> int:
    console = Console(record=True, width=WIDTH, force_terminal=False)
    demo.console = preemption.console = console
    exit_code = demo.main()
    if exit_code == 0:
        PICTURE.parent.mkdir(exist_ok=True)
        PICTURE.write_text(drawing(console))
    return exit_code


def drawing(console: Console, title: str = "make demo") -> str:
    """Return what the console has recorded as a terminal window."""
    svg = console.export_svg(title=title, unique_id="demo")
    # A picture in a README loads no fonts from elsewhere: the viewer's own monospaced font does.
    return re.sub(r"\s*@font-face \{.*?\n    \}", "", svg, flags=re.DOTALL)


if __name__ == "__main__":
    sys.exit(main())
