"""`reprieve show`: shows a checkpoint: run, attempt, the checkpoint it continued from, versions, metrics, files.

example: reprieve show checkpoints/checkpoint-500
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from rich.table import Table

from reprieve.cli.checkpoint_argument import checkpoints_at
from reprieve.cli.ls import as_dict
from reprieve.cli.output import data, print_json
from reprieve.errors import ConfigError
from reprieve.units import format_size


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="a checkpoint, or a folder, for its newest checkpoint")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: Namespace) -> int:
    checkpoints = checkpoints_at(args.checkpoint)
    if not checkpoints:
        raise ConfigError(f"no checkpoints in {args.checkpoint}")
    checkpoint, manifest = checkpoints[0], checkpoints[0].manifest
    if args.json:
        files = (
            {name: {"bytes": entry.bytes, "xxh3_128": entry.xxh3_128} for name, entry in manifest.files.items()}
            if manifest
            else None
        )
        print_json(
            {
                **as_dict(checkpoint),
                "files": files,
                "parent": manifest.parent if manifest else None,
                "versions": dict(manifest.versions) if manifest else None,
                "world_size": manifest.world_size if manifest else None,
            }
        )
        return 1 if checkpoint.problem else 0
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    rows = [
        ("path", str(checkpoint.path)),
        ("step", str(checkpoint.step)),
        ("size", format_size(checkpoint.bytes)),
        ("saved", checkpoint.created.isoformat()),
    ]
    rows.append(("state", checkpoint.problem or ("valid" if manifest else "no manifest (written by other tools)")))
    if manifest:
        rows += [
            ("epoch", "" if manifest.epoch is None else f"{manifest.epoch:g}"),
            ("run", f"{manifest.run}, attempt {manifest.attempt}"),
            ("continued from", manifest.parent or "nothing: a fresh start"),
            ("world size", str(manifest.world_size)),
            ("metrics", ", ".join(f"{name}={value:g}" for name, value in manifest.metrics.items())),
            ("versions", ", ".join(f"{name} {value}" for name, value in manifest.versions.items())),
        ]
        rows += [(name, f"{format_size(entry.bytes):>9}  {entry.xxh3_128}") for name, entry in manifest.files.items()]
    for key, value in rows:
        table.add_row(key, value)
    data.print(table)
    return 1 if checkpoint.problem else 0
