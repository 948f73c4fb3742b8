"""The parser of a command's arguments."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors show the command's own usage, and the option nearest to a wrong one."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown options, then parse."""
        self._require_known(args or ())
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, and exit with status 2; ARGUMENT is optional."""
        super().error(message.removesuffix(", ARGUMENT"))

    def _require_known(self, arguments: Sequence[str]) -> None:
        has_target = any(action.nargs == argparse.REMAINDER for action in self._actions)
        remaining = iter(arguments)
        for text in remaining:
            if text == "--" or (has_target and not text.startswith("-")):
                return  # All further arguments are the target's.
            if text.startswith("-") and text != "-":
                name, action, alone = self.find(text)
                if action is None:
                    self._refuse(name)
                if action.nargs is None and alone:
                    next(remaining, None)

    def find(self, text: str) -> tuple[str, argparse.Action | None, bool]:
        """Return an option's name, its action or None, and whether it has no value in its text."""
        known = {name: action for action in self._actions for name in action.option_strings}
        name, equals, _ = text.partition("=")
        if name not in known and name.startswith("--"):
            longer = [other for other in known if other.startswith(name)]
            name = longer[0] if longer else name  # argparse refuses an ambiguous one.
        short = name[:2]
        if name not in known and short in known and not name[2:].isalpha():  # like -n4
            return short, known[short], False
        return name, known.get(name), not equals

    def _refuse(self, name: str) -> NoReturn:
        from difflib import get_close_matches  # It is slow to import.

        known = [other for action in self._actions for other in action.option_strings]
        nearest = get_close_matches(name, known, 1, 0.55)
        advice = f"did you mean {nearest[0]}?" if nearest else f"{self.prog} --help lists them"
        self.error(f"there is no option {name}: {advice}")
