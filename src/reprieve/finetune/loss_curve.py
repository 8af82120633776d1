"""Draws losses as a text for the terminal, and as a PNG."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence

from reprieve.errors import needing

Points = Sequence[tuple[int, float]]
"""Step and loss."""

_MARKS = "▁▂▃▄▅▆▇█"
_INK, _AXIS, _PAPER = (31, 119, 180), (120, 120, 120), (255, 255, 255)
_EVALUATION = (214, 90, 30)


def draw_text(points: Points, *, width: int = 60, height: int = 6) -> list[str]:
    """Return the lines of a curve: each column shows the mean of the losses at its steps."""
    if not points:
        return []
    columns = _averages(points, width)
    low, high = min(columns), max(columns)
    levels = height * len(_MARKS) - 1
    heights = [round((value - low) / (high - low) * levels) if high > low else 0 for value in columns]
    labels = {0: f"{high:.4g}", height - 1: f"{low:.4g}"}
    margin = max(map(len, labels.values()))
    lines = []
    for row in range(height):
        base = (height - 1 - row) * len(_MARKS)
        cells = (" " if level < base else _MARKS[min(level - base, len(_MARKS) - 1)] for level in heights)
        lines.append(f"{labels.get(row, ''):>{margin}} ┤{''.join(cells)}".rstrip())
    first, last = f"step {points[0][0]}", str(points[-1][0])
    gap = max(1, len(columns) - len(first) - len(last))
    return [*lines, f"{'':{margin}}  {first}{'':{gap}}{last}"]


def _averages(points: Points, width: int) -> list[float]:
    """Return the mean loss of each of at most `width` parts of the points."""
    count = min(width, len(points))
    edges = [len(points) * number // count for number in range(count + 1)]
    parts = [points[first:last] for first, last in itertools.pairwise(edges)]
    return [sum(loss for _, loss in part) / len(part) for part in parts]


def draw_png(points: Points, evaluations: Points = (), *, size: tuple[int, int] = (900, 480)) -> bytes:
    """Return a PNG of the losses over the steps, with those of evaluations in another colour."""
    with needing("the picture of the losses"):
        from PIL import Image, ImageDraw

    image = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(image)
    left, top, right, bottom = 80, 30, size[0] - 20, size[1] - 50
    drawn = [*points, *evaluations]
    low, high = min(loss for _, loss in drawn), max(loss for _, loss in drawn)
    last = max(step for step, _ in drawn)

    def position(step: int, loss: float) -> tuple[float, float]:
        share = (loss - low) / (high - low) if high > low else 0.5
        return left + (right - left) * step / max(1, last), bottom - (bottom - top) * share

    draw.line([(left, top), (left, bottom), (right, bottom)], _AXIS)
    for share in (0.0, 0.5, 1.0):
        loss = low + (high - low) * share
        at = position(0, loss)[1] if high > low else bottom - (bottom - top) * share
        draw.line([(left - 4, at), (left, at)], _AXIS)
        draw.text((left - 70, at - 7), f"{loss:.4g}", _AXIS)
        step = round(last * share)
        across = position(step, low)[0]
        draw.line([(across, bottom), (across, bottom + 4)], _AXIS)
        draw.text((across - 10, bottom + 10), str(step), _AXIS)
    draw.text((left, 8), "loss", _INK)
    for values, colour in ((points, _INK), (evaluations, _EVALUATION)):
        if len(values) > 1:
            draw.line([position(*point) for point in values], colour, width=2)
        for across, at in (position(*point) for point in values):
            draw.ellipse([(across - 2, at - 2), (across + 2, at + 2)], fill=colour)
    if evaluations:
        draw.text((left + 50, 8), "loss of evaluations", _EVALUATION)
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()
