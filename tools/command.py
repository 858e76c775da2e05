"""What several commands state alike."""

import argparse


def add_overrides(parser: argparse.ArgumentParser, example: str) -> None:
    """`--set KEY=VALUE`, which may be repeated: `args.overrides`, the list that `load_config` takes
    as a tuple."""
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        dest="overrides",
        action="append",
        default=[],
        help=f"change one value of the YAML, as {example}; may be repeated",
    )
