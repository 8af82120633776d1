"""The operator's log: one JSON object a line on stderr, as collectors in clusters read it. No request is logged that
was allowed, and no value that looks like a secret.

    log.warning("refused", extra=fields(namespace="team", name="job"))
"""

from __future__ import annotations

import json
import logging
from datetime import datetime, timezone
from typing import Any

from reprieve.progress.redaction import HIDDEN, VALUE


def fields(**values: Any) -> dict[str, Any]:
    """Return the `extra` of a record: these become fields of its line."""
    return {"fields": values}


def redacted(text: str) -> str:
    """Return the text without what looks like a secret, such as a password in a URL."""
    return VALUE.sub(HIDDEN, text)


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redacted(record.getMessage()),
            **{name: redacted(str(value)) for name, value in getattr(record, "fields", {}).items()},
        }
        if record.exc_info:
            line["error"] = redacted(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False)


def configure_logging() -> None:
    """Log Reprieve's own records from INFO on, those of libraries from WARNING on."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("reprieve").setLevel(logging.INFO)
