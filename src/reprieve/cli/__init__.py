"""The command line: one file a command. stdout is data, stderr is talk.

Exit codes: 0 as asked; 1 the answer is bad news (a checkpoint is not valid); 2 the command could not be understood or
carried out.
"""

from __future__ import annotations

import sys

from cyclopts import App

from reprieve._version import __version__
from reprieve.cli import ls, show, verify
from reprieve.cli.output import talk
from reprieve.errors import ReprieveError

app = App(
    name="reprieve", help="Training that can be stopped: look at checkpoints and check them.", version=__version__
)
app.command(ls.ls)
app.command(show.show)
app.command(verify.verify)


def main() -> None:
    try:
        code = app()
    except ReprieveError as error:
        talk.print(f"[bold red]error:[/] {error}", highlight=False)
        code = 2
    except BrokenPipeError:  # `reprieve ls | head`
        sys.stderr.close()
        code = 0
    sys.exit(code if isinstance(code, int) else 0)
