"""`kvmesh`: the signals that the process handles are set up before anything is imported that takes time."""

import os
import sys

from services.ending import end_on_signal


def main() -> None:
    """Run the command."""
    end_on_signal()
    if sys.getfilesystemencoding() != "utf-8" and not sys.flags.ignore_environment:
        _begin_in_utf_8()
    from services.cli.app import run

    run()


def _begin_in_utf_8() -> None:
    """Begin again with names of files in UTF-8, whatever the locale says, and so all processes that this one starts:
    messages, configuration and the tokenizer's library know no others. What the terminal gets stays in its encoding."""
    from services.config import set_environment

    set_environment({"PYTHONUTF8": "1"} | ({"PYTHONIOENCODING": sys.stdout.encoding} if sys.stdout else {}))
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


if __name__ == "__main__":
    main()
