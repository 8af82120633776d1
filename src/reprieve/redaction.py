"""What of a command, its environment and its errors is not written down: whatever looks like a secret.

A run that is resumed takes those variables from the environment that it is resumed in. The rule is by name and by
shape, and errs on the side of leaving out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

HIDDEN = "***"

_NAME = re.compile(
    r"(^|_)(TOKEN|SECRETS?|PASS|PWD|PASSPHRASE|CREDENTIALS?|APIKEY|KEY|AUTH|COOKIE|DSN)(_|$)|PASSW(OR)?D", re.IGNORECASE
)
VALUE = re.compile(
    r"""://[^/\s:@]*:[^/\s@]+@          # a password in a URL
      | \bhf_[A-Za-z0-9]{16,}
      | \b(sk-|ghp_|gho_|github_pat_|glpat-|xox[abp]-|AKIA|ASIA|eyJ)[\w.\-]{8,}
      | -----BEGIN\ [A-Z ]*PRIVATE\ KEY""",
    re.VERBOSE,
)
_OPTION = re.compile(
    r"--?([\w-]*[-_])?(token|secret|password|passwd|passphrase|credentials?|(api|access|secret)[-_]?key)", re.IGNORECASE
)
_VARIABLE = re.compile(rf"(?=[A-Z0-9_]+$).*(?:{_NAME.pattern}).*")
"""`env WANDB_API_KEY=… python train.py`"""
_SHORTEST = 8
"""Characters of a secret: `--eos-token '<eos>'` is none."""
_OF_THIS_SHELL = {
    "_",
    "SHLVL",
    "OLDPWD",
    "PWD",
    "TERM",
    "COLUMNS",
    "LINES",
    "SSH_AUTH_SOCK",
    "SSH_CLIENT",
    "SSH_CONNECTION",
    "SSH_TTY",
}


def is_secret(name: str, value: str) -> bool:
    return bool(_NAME.search(name) or VALUE.search(value))


def storable(env: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """What may be written down, and the names of what may not."""
    kept = {name: value for name, value in env.items() if name not in _OF_THIS_SHELL and not is_secret(name, value)}
    left_out = sorted(name for name in env if name not in kept and name not in _OF_THIS_SHELL)
    return kept, left_out


def masked(words: Sequence[str]) -> list[str]:
    """A command line that may be shown and written down."""
    found: list[str] = []
    before = ""
    for word in words:
        option, equals, value = word.partition("=")
        if _OPTION.fullmatch(before) and not word.startswith("-") and _long(word):
            found.append(HIDDEN)
        elif equals and _long(value) and (_OPTION.fullmatch(option) or _VARIABLE.fullmatch(option)):
            found.append(f"{option}={HIDDEN}")
        elif VALUE.search(word):
            found.append(f"{option}={HIDDEN}" if equals and not VALUE.search(option) else HIDDEN)
        else:
            found.append(word)
        before = word
    return found


def _long(value: str) -> bool:
    return len(value) >= _SHORTEST and not value.startswith("<")
