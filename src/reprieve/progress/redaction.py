"""Redacts secrets in commands, environments and errors before they are stored or shown.

Secrets are recognized by name and by shape; when in doubt, a value is redacted. A resumed run takes the variables that
were not stored from the environment that it is resumed in.
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
_MIN_SECRET_LENGTH = 8
"""Shorter values are not secrets: `--eos-token '<eos>'`."""
_SHELL_VARIABLES = {
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
    has_secret_name = name not in _SHELL_VARIABLES and _NAME.search(name)
    return bool(has_secret_name or VALUE.search(value))


def storable(env: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables that may be stored, and the names of those that may not."""
    stored = {name: value for name, value in env.items() if name not in _SHELL_VARIABLES and not is_secret(name, value)}
    left_out = sorted(name for name in env if name not in stored and name not in _SHELL_VARIABLES)
    return stored, left_out


def masked(words: Sequence[str]) -> list[str]:
    """Return the command line with its secrets masked."""
    masked_words: list[str] = []
    previous = ""
    for word in words:
        option, equals, value = word.partition("=")
        if _OPTION.fullmatch(previous) and not word.startswith("-") and _is_long(word):
            masked_words.append(HIDDEN)
        elif equals and _is_long(value) and (_OPTION.fullmatch(option) or _VARIABLE.fullmatch(option)):
            masked_words.append(f"{option}={HIDDEN}")
        elif VALUE.search(word):
            masked_words.append(f"{option}={HIDDEN}" if equals and not VALUE.search(option) else HIDDEN)
        else:
            masked_words.append(word)
        previous = word
    return masked_words


def _is_long(value: str) -> bool:
    return len(value) >= _MIN_SECRET_LENGTH and not value.startswith("<")
